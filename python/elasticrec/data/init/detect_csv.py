"""Detection of CSV: the delimiter, the header, and quoted fields that contain line ends."""

import csv
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elasticrec.config.fields import show
from elasticrec.data.init.columns import NUMBER_NULLS, column_of_text, is_number
from elasticrec.data.init.detection import MIN_GOOD, Detection
from elasticrec.data.init.roles import assign_roles
from elasticrec.errors import SampleError

# Longest record of the parser in training; the limit of the csv module is lower.
csv.field_size_limit(16 << 20)

_DELIMITERS = (",", "\t", ";", "|", "\x01")
# Above this share of bad lines a job fails; this is the default of `data.max_bad_ratio`.
_MAX_BAD = 0.001


def _delimiter_of(lines: Sequence[str]) -> str | None:
    """Return the delimiter that gives the most fields, the same number in nearly all lines; a space is tried last."""
    best, most = None, 1
    for delimiter in (*_DELIMITERS, " "):
        try:
            counts = Counter(len(fields_of(line, delimiter)) for line in lines)
        except csv.Error:
            # A lone carriage return, for example: not a line of CSV.
            return None
        width, num_lines = counts.most_common(1)[0]
        if width > most and num_lines >= MIN_GOOD * len(lines) and not (best and delimiter == " "):
            best, most = delimiter, width
    return best


def fields_of(line: str, delimiter: str) -> list[str]:
    """Return the fields of a line; an open quote ends with the line."""
    return next(csv.reader([line], delimiter=delimiter), [])


def is_csv(lines: list[str]) -> bool:
    """Return whether lines are CSV with a known delimiter."""
    delimiter = _delimiter_of(lines)
    if delimiter != " ":
        return delimiter is not None
    # Lines such as `1 3:0.5 9:1` are not columns.
    if sum(line.count(":") for line in lines) > len(lines):
        return False
    # Lines of prose may have the same number of words, but no column of 0 and 1.
    rows = [line.split(" ") for line in lines]
    return any({row[at] for row in rows[1:] if at < len(row)} == {"0", "1"} for at in range(len(rows[0])))


def refuse_open_quotes(path: Path, lines: Sequence[str]) -> None:
    """Refuse lines that are CSV only if quoted fields may contain line ends."""
    for delimiter in _DELIMITERS:
        try:
            rows = list(csv.reader(lines, delimiter=delimiter))
        except csv.Error:
            continue
        width, num_rows = Counter(map(len, rows)).most_common(1)[0]
        if width > 1 and num_rows >= MIN_GOOD * len(rows) and len(rows) < len(lines):
            raise _open_quote(str(path), next(line for line in lines if _is_open(line, delimiter)))


def _open_quote(where: str, line: str) -> SampleError:
    return SampleError(
        f"{where}: expected a sample on each line, got a quoted field with a line end in {show(line)}; "
        "remove line ends from fields, or write the data as Parquet"
    )


def _is_open(line: str, delimiter: str) -> bool:
    """Return whether a quote is open at the end of a line."""
    if '"' not in line:
        return False
    try:
        next(csv.reader([line], delimiter=delimiter, strict=True), None)
    except csv.Error as error:
        return "unexpected end" in str(error)
    return False


def describe_csv(parts: list[list[str]], where: str, label: str | None) -> Detection:
    """Describe CSV, given the lines of each inspected file."""
    delimiter = _delimiter_of([line for part in parts for line in part])
    if delimiter is None:
        raise SampleError(f"{where}: expected the same number of fields in each line, got files with different numbers")
    open_lines = [line for part in parts for line in part if _is_open(line, delimiter)]
    if len(open_lines) > _MAX_BAD * sum(map(len, parts)):
        raise _open_quote(where, open_lines[0])
    tables = [[fields_of(line, delimiter) for line in part] for part in parts]
    first = tables[0][0]
    has_header = _is_header(first, tables[0][1:])
    if has_header:
        _refuse_repeated_names(first, where)
    names = first if has_header else [f"c{at}" for at in range(len(first))]
    rows = [row for table in tables for row in table if len(row) == len(names) and not (has_header and row == first)]
    if not rows:
        raise SampleError(f"{where}: expected samples after the header, got none")
    nulls: set[str] = set()
    columns = [column_of_text(name, [row[at] for row in rows], nulls) for at, name in enumerate(names)]
    roles = assign_roles(columns, where, label)
    extra: dict[str, Any] = {} if delimiter == "," else {"delimiter": delimiter}
    if not has_header:
        extra |= {"header": False, "names": names}
    if nulls:
        extra["null"] = sorted(nulls)
    by = {",": "commas", "\t": "tabs", " ": "spaces"}.get(delimiter, show(delimiter))
    title = f"CSV with{'' if has_header else 'out'} a header, separated by {by}"
    return Detection("csv", title, len(rows), roles, [roles.label], columns=extra)


def _is_header(first: list[str], rows: list[list[str]]) -> bool:
    """Return whether the first line is a header: its fields do not occur as values of their columns.

    The name of an index column may be missing. Numbers can be names if they count the columns, or if another column
    has a name that cannot be one of its values.
    """
    if not any(first):
        return False
    columns = [[row[at] for row in rows if at < len(row)] for at in range(len(first))]
    if len(first) > 2 and first in ([str(at + start) for at in range(len(first))] for start in (0, 1)):
        return True
    is_sure = any(map(_is_name_of_numbers, first, columns))
    for name, values in zip(first, map(set, columns), strict=True):
        # In a column of two values, one of them is a label and not a name.
        if name in values and name and not (is_sure and is_number(name) and len(values) > 2):
            return False
    return is_sure or not any(re.fullmatch(r"[-+]?[0-9.]+", name) for name in first)


def _is_name_of_numbers(name: str, values: list[str]) -> bool:
    """Return whether all values of a column are numbers and its first field is a word."""
    numbers = [value for value in values if value and value not in NUMBER_NULLS]
    is_word = bool(name) and name not in NUMBER_NULLS and not is_number(name)
    return is_word and bool(numbers) and all(map(is_number, numbers))


def _refuse_repeated_names(names: list[str], where: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            what = show(name) if name else "an empty name"
            raise SampleError(
                f"{where}:1: expected each column once in the header, got {what} {count} times; rename them"
            )
