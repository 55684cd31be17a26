"""Columns of a table to their roles: label, categories, numbers, time; every doubt becomes a note for the user."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from elasticrec.config.fields import show, show_names
from elasticrec.errors import SampleError

Kind = Literal["text", "whole", "real", "list", "time", "other"]

_WHOLE = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,18})")
_REAL = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_WORD = re.compile(r"[^\s:=,]{1,128}")

# Texts for "no value": the first always, the others where numbers are expected.
NULLS = ("\\N", "NULL", "null", "NaN", "nan", "None", "none")
INFINITE = ("inf", "-inf", "+inf", "Inf", "-Inf", "Infinity", "-Infinity")
NUMBER_NULLS = (*NULLS, "NA", "N/A", "-", "?", *INFINITE)

_LABELS = ("click", "label", "clicked", "is_click", "is_clicked", "clk", "click_label", "target", "y")
_OTHER_LABELS = frozenset(
    "click clicked clk is_click is_clicked label target conversion conversions convert converted is_conversion cvr "
    "purchase purchased is_purchase buy bought order ordered install installed like liked is_like add_to_cart paid "
    "dwell_time watch_time play_time stay_time response".split()
)
_TIMES = frozenset("time timestamp ts date datetime at".split())
_WEIGHTS = frozenset(("weight", "sample_weight"))
# Two values that say yes and no, but not as a label is read.
_YES_AND_NO = tuple(frozenset(pair.split()) for pair in ("-1 1", "-1.0 1.0", "no yes", "n y", "false true", "f t"))
_IDS = frozenset(
    "id ids uid code zip zipcode hash key type category cat class group user item ad campaign shop brand city province "
    "country region device os position pos hour day weekday month gender version".split()
)
_QUANTITIES = frozenset(
    "age price count cnt num number amount duration score rate size length len total sum avg mean median quantity qty "
    "income salary height width weight temperature distance days minutes seconds ratio pct percent views visits clicks "
    "impressions balance".split()
)

# So many of the samples may have no time before the job would fail: the default of `data.max_bad_ratio`.
_MAX_BAD = 0.001
_FEW = 100
_NEARLY_ALL = 0.9
_MOST = 0.98
_SEPARATORS = ("|", ";", "\x02", "\x01", "^", "~", "#", ",", " ")


@dataclass
class Column:
    """A column of the samples looked at: values that are there, as text; lists of them for kind `list`."""

    name: str
    kind: Kind
    values: Sequence[str] | Sequence[Sequence[str]]
    times: Sequence[float] = ()
    """Kind `time`: seconds since 1970."""
    odd: Sequence[str] = ()
    """Kind `time`: values that are none."""
    is_float: bool = False
    """Stored as numbers with a fraction, whatever they look like: no slot can be made of it."""
    num_missing: int = 0
    problem: str | None = None
    """Why it cannot be used."""
    note: str | None = None
    """What the user should know of it, if it is used as a number."""


@dataclass(frozen=True)
class Feature:
    """A slot or a dense column of the job to be written."""

    name: str
    column: str | None = None
    separator: str | None = None
    note: str | None = None
    count: int | None = None

    def item(self) -> str | dict[str, str | int]:
        """As it stands in a job."""
        keys = {"name": self.name, "column": self.column, "separator": self.separator, "count": self.count}
        given = {key: value for key, value in keys.items() if value is not None}
        return self.name if given.keys() == {"name"} else given


@dataclass
class Roles:
    """What the columns are."""

    label: str
    label_rate: float
    slots: list[Feature] = field(default_factory=list)
    dense: list[Feature] = field(default_factory=list)
    weight: str | None = None
    time: str | None = None
    times: Sequence[float] = ()
    time_note: str | None = None
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """Columns that are not used, and why."""
    notes: list[str] = field(default_factory=list)


def column_of_text(name: str, texts: Sequence[str], nulls: set[str]) -> Column:
    """A column of a text file; texts that stand for no value are added to `nulls`."""
    there = [text for text in texts if text and text not in NULLS]
    nulls.update(text for text in NULLS if text in texts)
    if (column := time_column(name, there, len(texts) - len(there))) is not None:
        return column
    numbers = [text for text in there if text not in NUMBER_NULLS]
    if numbers and all(_REAL.fullmatch(text) for text in numbers) and not _has_leading_zeros(numbers):
        nulls.update(text for text in NUMBER_NULLS if text in there)
        whole = all(_WHOLE.fullmatch(text) for text in numbers)
        return Column(name, "whole" if whole else "real", numbers, num_missing=len(texts) - len(numbers))
    return Column(name, "text", there)


def is_number(text: str) -> bool:
    """Whether a text is a number, with a fraction or without."""
    return _REAL.fullmatch(text) is not None


def _has_leading_zeros(texts: Sequence[str]) -> bool:
    """`00123` is the name of something, not a number."""
    return any(len(text) > 1 and text[0] == "0" and text[1].isdigit() for text in texts)


def time_column(name: str, texts: Sequence[str], num_missing: int) -> Column | None:
    """A column of times, in which a few values may be none; None if it is something else."""
    times: list[float] = []
    odd: list[str] = []
    may_be_number = is_time_name(name)
    for text in texts:
        seconds = _iso_time(text)
        if seconds is None and may_be_number:
            seconds = _epoch_time(text)
        if seconds is not None:
            times.append(seconds)
        else:
            odd.append(text)
            if len(odd) > (1 - _NEARLY_ALL) * len(texts):
                return None
    return Column(name, "time", texts, times, odd, num_missing=num_missing) if times else None


def _epoch_time(text: str) -> float | None:
    """Seconds since 1970, given in seconds or milliseconds of our days."""
    if not _WHOLE.fullmatch(text):
        return None
    value = float(text)
    return value if 9e8 < value < 4e9 else value / 1000 if 9e11 < value < 4e12 else None


def _iso_time(text: str) -> float | None:
    """Seconds since 1970 of a date, and a time of day with hour and minute: what the parser of training takes."""
    if not re.match(r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d.*)?$", text):
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def words_of(name: str) -> list[str]:
    """`userId` and `user_id` as [user, id]."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_").replace(" ", "_").split("_")


def is_time_name(name: str) -> bool:
    """Whether a column may be called so because it is the time of a sample."""
    return words_of(name)[-1] in _TIMES


def assign(columns: Sequence[Column], where: str, label: str | None, *, has_lines: bool = True) -> Roles:
    """The roles of columns; `label` is the one that the user named. What has lines can have a reader."""
    if not columns:
        raise SampleError(f"{where}: expected columns, got none")
    chosen = _label_of(columns, where, label, has_lines)
    truths = [truth for truth in (_truth(str(text)) for text in chosen.values) if not math.isnan(truth)]
    roles = Roles(chosen.name, sum(truths) / max(len(truths), 1))
    for column in columns:
        if column is not chosen:
            _assign_one(column, roles)
    if not roles.slots:
        _find_a_slot(columns, roles, where)
    return roles


def _label_of(columns: Sequence[Column], where: str, label: str | None, has_lines: bool) -> Column:
    # one without a name only stands for slots
    names = show_names(column.name for column in columns if column.name != "\0")
    if label is not None:
        for column in columns:
            if column.name == label:
                odd = [str(text) for text in column.values if math.isnan(_truth(str(text)))]
                if odd or not column.values:
                    _refuse_two_values(column, where, has_lines)
                    got = f"such as {show(odd[0])}" if odd else "nothing"
                    raise SampleError(f"{where}: column {show(label)}: expected labels from 0 to 1, got {got}")
                return column
        raise SampleError(f"{where}: expected a column {show(label)} for the label, got {names}")
    plain = [column for column in columns if column.name and column.kind in ("whole", "real", "text")]
    binary = [column for column in plain if _is_binary(column)]
    by_name = {_snake(column): column for column in reversed(binary)}
    for name in _LABELS:
        if name in by_name:
            return _checked(by_name[name], where)
        for column in plain:
            # a column that is called a label goes before another that only looks like one
            if _snake(column) == name:
                _refuse_two_values(column, where, has_lines)
    if not binary:
        for column in plain:
            if frozenset(str(text).lower() for text in column.values) in _YES_AND_NO:
                _refuse_two_values(column, where, has_lines)
        raise SampleError(
            f"{where}: expected a column of 0 and 1 for the label, got none in {names}; name one with --label"
        )
    return _checked(binary[0], where)


def _snake(column: Column) -> str:
    return "_".join(words_of(column.name))


def _refuse_two_values(column: Column, where: str, has_lines: bool) -> None:
    """A column that says yes and no in other words than a label is read in: say how to map them."""
    values = sorted({str(text) for text in column.values})
    if len(values) != 2 or not any(math.isnan(_truth(text)) for text in values):
        return
    # `yes`, `true`, `1` and `2` come behind `no`, `false`, `-1` and `1` by the order of letters
    no, yes = values
    reader = ", or map them in a reader of your own (`data.reader`, see docs/guide/data.md)" if has_lines else ""
    raise SampleError(
        f"{where}: column {show(column.name)}: expected 0 and 1 for a label, got {show(no)} and {show(yes)}; "
        f"write 0 and 1 for them{reader}"
    )


def _checked(column: Column, where: str) -> Column:
    if not _WORD.fullmatch(column.name):
        raise SampleError(
            f"{where}: column {show(column.name)}: expected the label's name without spaces, `:`, `=` and `,`"
        )
    return column


def _is_binary(column: Column) -> bool:
    truths = [_truth(str(text)) for text in column.values]
    num_clicks, num_others = truths.count(1.0), truths.count(0.0)
    # a few bad records are no reason to miss the label
    return min(num_clicks, num_others) > 0 and num_clicks + num_others >= _MOST * len(truths)


def _truth(text: str) -> float:
    """A label as the parser reads it; NaN if it does not."""
    if text in ("true", "True", "false", "False"):
        return float(text in ("true", "True"))
    value = float(text) if _REAL.fullmatch(text) else math.nan
    return value if 0 <= value <= 1 else math.nan


def _assign_one(column: Column, roles: Roles) -> None:
    name, values = column.name, column.values
    words = words_of(name)
    if not name:
        roles.left_out.append(("(a column)", "has no name"))
    elif column.problem or not values or column.kind == "other":
        reason = "no value in the samples looked at" if column.kind != "other" else "its type is none for a feature"
        roles.left_out.append((name, column.problem or reason))
    elif "_".join(words) in _OTHER_LABELS:
        roles.left_out.append((name, "looks like something that is known only after the sample was shown"))
    elif column.kind == "time":
        _assign_time(column, roles)
    elif "_".join(words) in _WEIGHTS and not column.num_missing and _are_positive(column):
        roles.weight = name
    elif len(values) >= 50 and len({str(value) for value in values}) == 1:
        roles.left_out.append((name, "one value only in the samples looked at"))
    elif column.kind == "real" or column.is_float:
        note = column.note
        if column.is_float and words[-1] in _IDS:
            note = "stored with a fraction; if it is an id store whole numbers and list it under `sparse`"
        roles.dense.append(_feature(name, note=note))
    elif column.kind == "whole":
        _assign_whole(column, roles)
    elif column.kind == "list":
        roles.slots.append(_feature(name, note="a list of values"))
    else:
        _assign_text(column, roles)


def _assign_time(column: Column, roles: Roles) -> None:
    """The time of a sample; the parser refuses a sample without one, so that there must be few of them."""
    name, num_values = column.name, len(column.values)
    bad = [text for text in column.odd if not _REAL.fullmatch(text)]
    if column.num_missing:
        roles.left_out.append((name, "a time that some samples do not have"))
    elif len(bad) > _MAX_BAD * num_values:
        reason = (
            f"a time, but {show(bad[0])} is none ({len(bad):,} of {num_values:,}); with times only it can be `time`"
        )
        roles.left_out.append((name, reason))
    elif roles.time is not None:
        roles.left_out.append((name, f"a time, as `{roles.time}` is"))
    else:
        roles.time, roles.times = name, column.times
        if column.odd:
            what = "bad records" if bad else "an odd time"
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
        roles.dense.append(_feature(column.name, note="whole numbers taken for a quantity; ids belong under `sparse`"))
    else:
        note = _distinct_note(texts) or "whole numbers taken for ids; a quantity belongs under `dense`"
        roles.slots.append(_feature(column.name, note=note))


def _assign_text(column: Column, roles: Roles) -> None:
    texts = [str(value) for value in column.values]
    if all(re.fullmatch(r"[-+]?[0-9]+,[0-9]+", text) for text in texts):
        roles.left_out.append((column.name, "numbers with a decimal comma; with a point they can be `dense`"))
        return
    separator = _separator_of(texts)
    if separator is not None:
        note = f"several values, separated by {show(separator)}"
        roles.slots.append(_feature(column.name, separator=separator, note=note))
        return
    doubt = _distinct_note(texts)
    if doubt and sum(map(len, texts)) > 60 * len(texts):
        roles.left_out.append((column.name, "free text"))
    else:
        roles.slots.append(_feature(column.name, note=doubt))


def _distinct_note(texts: Sequence[str]) -> str | None:
    num_distinct = len(set(texts))
    if len(texts) < _FEW or num_distinct <= _NEARLY_ALL * len(texts):
        return None
    return f"nearly every value differs ({num_distinct:,} of {len(texts):,}): if it only names the sample, take it out"


def _separator_of(texts: Sequence[str]) -> str | None:
    """What stands between several values in one text, if they are such."""
    whole = set(texts)
    for separator in _SEPARATORS:
        num_with = sum(separator in text for text in texts)
        if num_with < max(2, (0.3 if separator in " ,#" else 0.05) * len(texts)):
            continue
        pieces = {piece for text in whole for piece in text.split(separator) if piece}
        if separator == " " and not all(re.fullmatch(r"[\w.-]+", piece) for piece in pieces):
            continue
        if len(pieces) < len(whole):
            return separator
    return None


def _feature(name: str, *, separator: str | None = None, note: str | None = None) -> Feature:
    """A feature with a name that a job takes; the column keeps its own."""
    word = re.sub(r"[\s:=,]+", "_", name.strip())[:128] or "column"
    if re.fullmatch(r"[0-9]+-[0-9]+", word):
        word = word.replace("-", "_")
    return Feature(word, None if word == name else name, separator, note)


def _find_a_slot(columns: Sequence[Column], roles: Roles, where: str) -> None:
    """A job has at least one slot: take the column that is most like one."""
    kinds = {column.name: column for column in columns if column.values and not column.is_float}
    left_out = [(name, reason) for name, reason in roles.left_out if reason.startswith("one value") and name in kinds]
    dense = [feature for feature in roles.dense if (feature.column or feature.name) in kinds]
    if dense:
        found = min(dense, key=lambda feature: len({str(v) for v in kinds[feature.column or feature.name].values}))
        roles.dense.remove(found)
        roles.slots.append(Feature(found.name, found.column, note="a number, but a job has at least one slot"))
    elif left_out:
        roles.left_out.remove(left_out[0])
        roles.slots.append(_feature(left_out[0][0], note=left_out[0][1]))
    else:
        raise SampleError(f"{where}: expected a column of categories beside the label {show(roles.label)}, got none")
