"""CSV by its lines: the delimiter, whether there is a header, and fields that a line cannot hold."""

import csv
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elasticrec.config.fields import show
from elasticrec.data.guess import NUMBER_NULLS, assign, column_of_text, is_number
from elasticrec.data.sniff import MOST, Found
from elasticrec.errors import SampleError

# the longest record there may be; the module's own limit is lower
csv.field_size_limit(16 << 20)

_DELIMITERS = (",", "\t", ";", "|", "\x01")
# So many lines may be bad before the job would fail: the default of `data.max_bad_ratio`.
_MAX_BAD = 0.001


def _delimiter_of(lines: Sequence[str]) -> str | None:
    """The delimiter by which all lines have the same number of fields, the largest there is; a space if no other."""
    best, most = None, 1
    for delimiter in (*_DELIMITERS, " "):
        try:
            counts = Counter(len(fields_of(line, delimiter)) for line in lines)
        except csv.Error:
            # such as a lone carriage return: no line of a table
            return None
        width, num_lines = counts.most_common(1)[0]
        if width > most and num_lines >= MOST * len(lines) and not (best and delimiter == " "):
            best, most = delimiter, width
    return best


def fields_of(line: str, delimiter: str) -> list[str]:
    """The fields of a line, which is a record whatever its quotes say."""
    return next(csv.reader([line], delimiter=delimiter), [])


def is_table(lines: list[str]) -> bool:
    delimiter = _delimiter_of(lines)
    if delimiter != " ":
        return delimiter is not None
    # words of a text may be as many in each line; a label among them is no accident
    rows = [line.split(" ") for line in lines]
    # nor are `1 3:0.5 9:1` columns
    if sum(line.count(":") for line in lines) > len(lines):
        return False
    return any({row[at] for row in rows[1:] if at < len(row)} == {"0", "1"} for at in range(len(rows[0])))


def refuse_open_quotes(path: Path, lines: Sequence[str]) -> None:
    """Refuse lines that are a table only where a field goes on over the end of a line."""
    for delimiter in _DELIMITERS:
        try:
            rows = list(csv.reader(lines, delimiter=delimiter))
        except csv.Error:
            continue
        width, num_rows = Counter(map(len, rows)).most_common(1)[0]
        if width > 1 and num_rows >= MOST * len(rows) and len(rows) < len(lines):
            raise _open_quote(str(path), next(line for line in lines if _is_open(line, delimiter)))


def _open_quote(where: str, line: str) -> SampleError:
    return SampleError(
        f"{where}: expected a sample on each line, got a quoted field that goes on over a line end in {show(line)}; "
        "take the line ends out of the fields, or write the data as Parquet"
    )


def _is_open(line: str, delimiter: str) -> bool:
    """Whether a quote is open at the end of a line."""
    if '"' not in line:
        return False
    try:
        next(csv.reader([line], delimiter=delimiter, strict=True), None)
    except csv.Error as error:
        return "unexpected end" in str(error)
    return False


def describe_csv(parts: list[list[str]], where: str, label: str | None) -> Found:
    """CSV by its lines, of each file looked at."""
    delimiter = _delimiter_of([line for part in parts for line in part])
    if delimiter is None:
        raise SampleError(f"{where}: expected as many fields in each line, got other numbers in other files")
    opened = [line for part in parts for line in part if _is_open(line, delimiter)]
    if len(opened) > _MAX_BAD * sum(map(len, parts)):
        raise _open_quote(where, opened[0])
    tables = [[fields_of(line, delimiter) for line in part] for part in parts]
    first = tables[0][0]
    has_header = _is_header(first, tables[0][1:])
    if has_header:
        _refuse_twice(first, where)
    names = first if has_header else [f"c{at}" for at in range(len(first))]
    rows = [row for table in tables for row in table if len(row) == len(names) and not (has_header and row == first)]
    if not rows:
        raise SampleError(f"{where}: expected samples behind the header, got none")
    nulls: set[str] = set()
    columns = [column_of_text(name, [row[at] for row in rows], nulls) for at, name in enumerate(names)]
    roles = assign(columns, where, label)
    extra: dict[str, Any] = {} if delimiter == "," else {"delimiter": delimiter}
    if not has_header:
        extra |= {"header": False, "names": names}
    if nulls:
        extra["null"] = sorted(nulls)
    by = {",": "commas", "\t": "tabs", " ": "spaces"}.get(delimiter, show(delimiter))
    title = f"CSV with{'' if has_header else 'out'} a header, separated by {by}"
    return Found("csv", title, [], [], len(rows), roles, labels=[roles.label], columns=extra)


def _is_header(first: list[str], rows: list[list[str]]) -> bool:
    """Names are texts that are no values of their columns; that of an index may be missing.

    Numbers are names if they count the columns, or if the name of another column cannot be one of its values.
    """
    if not any(first):
        return False
    columns = [[row[at] for row in rows if at < len(row)] for at in range(len(first))]
    if len(first) > 2 and first in ([str(at + start) for at in range(len(first))] for start in (0, 1)):
        return True
    is_sure = any(map(_is_name_of_numbers, first, columns))
    for name, values in zip(first, map(set, columns), strict=True):
        # of two values one is the name of nothing: it is the label of the first sample
        if name in values and name and not (is_sure and is_number(name) and len(values) > 2):
            return False
    return is_sure or not any(re.fullmatch(r"[-+]?[0-9.]+", name) for name in first)


def _is_name_of_numbers(name: str, values: list[str]) -> bool:
    """Whether all values of a column are numbers, and its first field is a word."""
    numbers = [value for value in values if value and value not in NUMBER_NULLS]
    is_word = bool(name) and name not in NUMBER_NULLS and not is_number(name)
    return is_word and bool(numbers) and all(map(is_number, numbers))


def _refuse_twice(names: list[str], where: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            what = show(name) if name else "one without a name"
            raise SampleError(
                f"{where}:1: expected each column once in the header, got {what} {count} times; rename them"
            )
