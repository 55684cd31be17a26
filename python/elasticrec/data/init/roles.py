"""The role of each column: label, slot, dense column, weight, time or unused; notes mark guesses to check."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from elasticrec.config.fields import show, show_names
from elasticrec.data.init.columns import Column, is_number, words_of
from elasticrec.errors import SampleError

_WORD = re.compile(r"[^\s:=,]{1,128}")

_LABELS = ("click", "label", "clicked", "is_click", "is_clicked", "clk", "click_label", "target", "y")
# Further outcomes: known only after the sample was shown, so they cannot be features.
_OUTCOMES = frozenset(
    "click clicked clk is_click is_clicked label target conversion conversions convert converted is_conversion cvr "
    "purchase purchased is_purchase buy bought order ordered install installed like liked is_like add_to_cart paid "
    "dwell_time watch_time play_time stay_time response".split()
)
_WEIGHTS = frozenset(("weight", "sample_weight"))
# Pairs of values that mean no and yes, but are not 0 and 1.
_NO_AND_YES = tuple(frozenset(pair.split()) for pair in ("-1 1", "-1.0 1.0", "no yes", "n y", "false true", "f t"))
_IDS = frozenset(
    "id ids uid code zip zipcode hash key type category cat class group user item ad campaign shop brand city province "
    "country region device os position pos hour day weekday month gender version".split()
)
_QUANTITIES = frozenset(
    "age price count cnt num number amount duration score rate size length len total sum avg mean median quantity qty "
    "income salary height width weight temperature distance days minutes seconds ratio pct percent views visits clicks "
    "impressions balance".split()
)

# Samples without a time are bad records; this is the default of `data.max_bad_ratio`.
_MAX_BAD = 0.001
# A column of at most this many distinct whole numbers is a slot, unless its name suggests a quantity.
_FEW = 100
# Above this share of distinct values, a column may be an id of the sample.
_NEARLY_ALL = 0.9
# Share of the values of a label that must be 0 or 1; the rest may be bad records.
_MIN_BINARY = 0.98
_SEPARATORS = ("|", ";", "\x02", "\x01", "^", "~", "#", ",", " ")


@dataclass(frozen=True)
class Feature:
    """A slot or a dense column of the job to write."""

    name: str
    column: str | None = None
    separator: str | None = None
    note: str | None = None
    count: int | None = None

    def item(self) -> str | dict[str, str | int]:
        """Return the feature as a job lists it."""
        keys = {"name": self.name, "column": self.column, "separator": self.separator, "count": self.count}
        given = {key: value for key, value in keys.items() if value is not None}
        return self.name if given.keys() == {"name"} else given


@dataclass
class Roles:
    """The role of each column."""

    label: str
    label_rate: float
    slots: list[Feature] = field(default_factory=list)
    dense: list[Feature] = field(default_factory=list)
    weight: str | None = None
    time: str | None = None
    times: Sequence[float] = ()
    time_note: str | None = None
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """Unused columns, and the reason for each."""


def assign_roles(columns: Sequence[Column], where: str, label: str | None, *, has_lines: bool = True) -> Roles:
    """Return the roles of columns.

    `label` is the label column if the user named it. With `has_lines`, errors suggest a reader of the user's own.
    """
    if not columns:
        raise SampleError(f"{where}: expected columns, got none")
    label_column = _find_label(columns, where, label, has_lines)
    values = [value for value in (_label_value(str(text)) for text in label_column.values) if not math.isnan(value)]
    roles = Roles(label_column.name, sum(values) / max(len(values), 1))
    for column in columns:
        if column is not label_column:
            _assign_role(column, roles)
    if not roles.slots:
        _choose_slot(columns, roles, where)
    return roles


def _find_label(columns: Sequence[Column], where: str, label: str | None, has_lines: bool) -> Column:
    # The column named "\0" only stands for the slots of PaddleRec text.
    names = show_names(column.name for column in columns if column.name != "\0")
    if label is not None:
        return _named_label(columns, where, label, has_lines, names)
    plain = [column for column in columns if column.name and column.kind in ("whole", "real", "text")]
    binary = [column for column in plain if _is_binary(column)]
    by_name = {_snake_case(column): column for column in reversed(binary)}
    for name in _LABELS:
        if name in by_name:
            return _check_name(by_name[name], where)
        for column in plain:
            # A column with the name of a label has precedence over a column that only looks like one.
            if _snake_case(column) == name:
                _refuse_two_values(column, where, has_lines)
    if not binary:
        for column in plain:
            if frozenset(str(text).lower() for text in column.values) in _NO_AND_YES:
                _refuse_two_values(column, where, has_lines)
        raise SampleError(
            f"{where}: expected a column of 0 and 1 for the label, got none in {names}; name one with --label"
        )
    return _check_name(binary[0], where)


def _named_label(columns: Sequence[Column], where: str, label: str, has_lines: bool, names: str) -> Column:
    for column in columns:
        if column.name == label:
            odd = [str(text) for text in column.values if math.isnan(_label_value(str(text)))]
            if odd or not column.values:
                _refuse_two_values(column, where, has_lines)
                got = f"such as {show(odd[0])}" if odd else "nothing"
                raise SampleError(f"{where}: column {show(label)}: expected labels from 0 to 1, got {got}")
            return column
    raise SampleError(f"{where}: expected a column {show(label)} for the label, got {names}")


def _snake_case(column: Column) -> str:
    return "_".join(words_of(column.name))


def _refuse_two_values(column: Column, where: str, has_lines: bool) -> None:
    """Refuse a column with two values that are not 0 and 1, and say how to map them."""
    values = sorted({str(text) for text in column.values})
    if len(values) != 2 or not any(math.isnan(_label_value(text)) for text in values):
        return
    # `no`, `false`, `-1` and `1` sort before `yes`, `true`, `1` and `2`.
    no, yes = values
    reader = ", or map them in a reader of your own (`data.reader`, see docs/guide/data.md)" if has_lines else ""
    raise SampleError(
        f"{where}: column {show(column.name)}: expected 0 and 1 for a label, got {show(no)} and {show(yes)}; "
        f"write 0 and 1 instead{reader}"
    )


def _check_name(column: Column, where: str) -> Column:
    if not _WORD.fullmatch(column.name):
        raise SampleError(
            f"{where}: column {show(column.name)}: expected a label name without spaces, `:`, `=` and `,`"
        )
    return column


def _is_binary(column: Column) -> bool:
    values = [_label_value(str(text)) for text in column.values]
    num_ones, num_zeros = values.count(1.0), values.count(0.0)
    # A few bad records must not hide the label.
    return min(num_ones, num_zeros) > 0 and num_ones + num_zeros >= _MIN_BINARY * len(values)


def _label_value(text: str) -> float:
    """Return a label as the parser reads it; NaN if the parser refuses it."""
    if text in ("true", "True", "false", "False"):
        return float(text in ("true", "True"))
    value = float(text) if is_number(text) else math.nan
    return value if 0 <= value <= 1 else math.nan


def _assign_role(column: Column, roles: Roles) -> None:
    name, values = column.name, column.values
    words = words_of(name)
    if not name:
        roles.left_out.append(("(a column)", "has no name"))
    elif column.problem or not values or column.kind == "other":
        reason = "no value in the inspected samples" if column.kind != "other" else "its type cannot be a feature"
        roles.left_out.append((name, column.problem or reason))
    elif "_".join(words) in _OUTCOMES:
        roles.left_out.append((name, "looks like an outcome that is known only after the sample was shown"))
    elif column.kind == "time":
        _assign_time(column, roles)
    elif "_".join(words) in _WEIGHTS and not column.num_missing and _are_positive(column):
        roles.weight = name
    elif len(values) >= 50 and len({str(value) for value in values}) == 1:
        roles.left_out.append((name, "one value only in the inspected samples"))
    elif column.kind == "real" or column.is_float:
        note = column.note
        if column.is_float and words[-1] in _IDS:
            note = "stored as floating-point numbers; if it is an id, store whole numbers and list it under `sparse`"
        roles.dense.append(_feature(name, note=note))
    elif column.kind == "whole":
        _assign_whole(column, roles)
    elif column.kind == "list":
        roles.slots.append(_feature(name, note="a list of values"))
    else:
        _assign_text(column, roles)


def _assign_time(column: Column, roles: Roles) -> None:
    """Use the column as the time of samples, unless samples lack a time or too many would be bad records."""
    name, num_values = column.name, len(column.values)
    bad = [text for text in column.odd if not is_number(text)]
    if column.num_missing:
        roles.left_out.append((name, "a time that some samples do not have"))
    elif len(bad) > _MAX_BAD * num_values:
        reason = (
            f"a time, but {show(bad[0])} is not one ({len(bad):,} of {num_values:,}); "
            "use it as `time` when all values are times"
        )
        roles.left_out.append((name, reason))
    elif roles.time is not None:
        roles.left_out.append((name, f"a second time column beside `{roles.time}`"))
    else:
        roles.time, roles.times = name, column.times
        if column.odd:
            what = "bad records" if bad else "odd times"
            roles.time_note = (
                f"{len(column.odd):,} of {num_values:,} are {what}, such as {show((bad or column.odd)[0])}"
            )


def _are_positive(column: Column) -> bool:
    return column.kind in ("whole", "real") and all(float(str(value)) > 0 for value in column.values)


def _assign_whole(column: Column, roles: Roles) -> None:
    texts = [str(value) for value in column.values]
    words = set(words_of(column.name))
    num_distinct = len(set(texts))
    if words & _IDS or (num_distinct <= _FEW and not words & _QUANTITIES):
        roles.slots.append(_feature(column.name, note=_distinct_note(texts)))
    elif words & _QUANTITIES or any(text.startswith("-") for text in texts):
        roles.dense.append(_feature(column.name, note="whole numbers, taken for a quantity; move ids to `sparse`"))
    else:
        note = _distinct_note(texts) or "whole numbers, taken for ids; move a quantity to `dense`"
        roles.slots.append(_feature(column.name, note=note))


def _assign_text(column: Column, roles: Roles) -> None:
    texts = [str(value) for value in column.values]
    if all(re.fullmatch(r"[-+]?[0-9]+,[0-9]+", text) for text in texts):
        roles.left_out.append((column.name, "numbers with a decimal comma; write a point to use it under `dense`"))
        return
    separator = _separator_of(texts)
    if separator is not None:
        note = f"several values, separated by {show(separator)}"
        roles.slots.append(_feature(column.name, separator=separator, note=note))
        return
    distinct_note = _distinct_note(texts)
    if distinct_note and sum(map(len, texts)) > 60 * len(texts):
        roles.left_out.append((column.name, "free text"))
    else:
        roles.slots.append(_feature(column.name, note=distinct_note))


def _distinct_note(texts: Sequence[str]) -> str | None:
    num_distinct = len(set(texts))
    if len(texts) < _FEW or num_distinct <= _NEARLY_ALL * len(texts):
        return None
    return (
        f"nearly every value differs ({num_distinct:,} of {len(texts):,}); remove it if it only identifies the sample"
    )


def _separator_of(texts: Sequence[str]) -> str | None:
    """Return the separator between several values in one text, or None."""
    distinct = set(texts)
    for separator in _SEPARATORS:
        num_with = sum(separator in text for text in texts)
        if num_with < max(2, (0.3 if separator in " ,#" else 0.05) * len(texts)):
            continue
        pieces = {piece for text in distinct for piece in text.split(separator) if piece}
        if separator == " " and not all(re.fullmatch(r"[\w.-]+", piece) for piece in pieces):
            continue
        # Values that repeat in other combinations are fewer than the combinations.
        if len(pieces) < len(distinct):
            return separator
    return None


def _feature(name: str, *, separator: str | None = None, note: str | None = None) -> Feature:
    """Return a feature whose name is valid in a job; `column` keeps the original name if it differs."""
    word = re.sub(r"[\s:=,]+", "_", name.strip())[:128] or "column"
    if re.fullmatch(r"[0-9]+-[0-9]+", word):
        word = word.replace("-", "_")
    return Feature(word, None if word == name else name, separator, note)


def _choose_slot(columns: Sequence[Column], roles: Roles, where: str) -> None:
    """Turn the column that is most like a category into a slot, as a job needs at least one slot."""
    usable = {column.name: column for column in columns if column.values and not column.is_float}
    left_out = [(name, reason) for name, reason in roles.left_out if reason.startswith("one value") and name in usable]
    dense = [feature for feature in roles.dense if (feature.column or feature.name) in usable]
    if dense:
        chosen = min(dense, key=lambda feature: len({str(v) for v in usable[feature.column or feature.name].values}))
        roles.dense.remove(chosen)
        roles.slots.append(Feature(chosen.name, chosen.column, note="a number, but a job needs at least one slot"))
    elif left_out:
        roles.left_out.remove(left_out[0])
        roles.slots.append(_feature(left_out[0][0], note=left_out[0][1]))
    else:
        raise SampleError(f"{where}: expected a column of categories beside the label {show(roles.label)}, got none")
