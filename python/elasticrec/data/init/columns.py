"""Columns of inspected samples, and the kind of a column by its values."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

Kind = Literal["text", "whole", "real", "list", "time", "other"]

_WHOLE = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,18})")
_REAL = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")

# Texts that mean "no value" in any column, and in columns of numbers.
NULLS = ("\\N", "NULL", "null", "NaN", "nan", "None", "none")
INFINITE = ("inf", "-inf", "+inf", "Inf", "-Inf", "Infinity", "-Infinity")
NUMBER_NULLS = (*NULLS, "NA", "N/A", "-", "?", *INFINITE)

_TIMES = frozenset("time timestamp ts date datetime at".split())
# A column holds times if at least this share of its values are times.
_MIN_TIMES = 0.9


@dataclass
class Column:
    """A column of the inspected samples: its values without the missing ones, as text."""

    name: str
    kind: Kind
    values: Sequence[str] | Sequence[Sequence[str]]
    """A list of texts per sample for kind `list`."""
    times: Sequence[float] = ()
    """Kind `time`: seconds since 1970."""
    odd: Sequence[str] = ()
    """Kind `time`: values that are not times."""
    is_float: bool = False
    """The values are stored as floating-point numbers, so the column cannot be a slot."""
    num_missing: int = 0
    problem: str | None = None
    """Reason why the column cannot be used; None if it can."""
    note: str | None = None
    """Note for the user if the column is used as a number."""


def column_of_text(name: str, texts: Sequence[str], nulls: set[str]) -> Column:
    """Return a column of a text file; add the texts that mean "no value" to `nulls`."""
    present = [text for text in texts if text and text not in NULLS]
    nulls.update(text for text in NULLS if text in texts)
    if (column := time_column(name, present, len(texts) - len(present))) is not None:
        return column
    numbers = [text for text in present if text not in NUMBER_NULLS]
    if numbers and all(is_number(text) for text in numbers) and not _has_leading_zeros(numbers):
        nulls.update(text for text in NUMBER_NULLS if text in present)
        kind: Kind = "whole" if all(_WHOLE.fullmatch(text) for text in numbers) else "real"
        return Column(name, kind, numbers, num_missing=len(texts) - len(numbers))
    return Column(name, "text", present)


def is_number(text: str) -> bool:
    """Return whether a text is a number, whole or with a fraction."""
    return _REAL.fullmatch(text) is not None


def _has_leading_zeros(texts: Sequence[str]) -> bool:
    """Return whether a text such as `00123`, an id and not a number, is among the texts."""
    return any(len(text) > 1 and text[0] == "0" and text[1].isdigit() for text in texts)


def time_column(name: str, texts: Sequence[str], num_missing: int) -> Column | None:
    """Return a column of times, a few of whose values may not be times; None if the texts are not times."""
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
            if len(odd) > (1 - _MIN_TIMES) * len(texts):
                return None
    return Column(name, "time", texts, times, odd, num_missing=num_missing) if times else None


def _epoch_time(text: str) -> float | None:
    """Return seconds since 1970 of a number of seconds or milliseconds in a plausible range."""
    if not _WHOLE.fullmatch(text):
        return None
    value = float(text)
    return value if 9e8 < value < 4e9 else value / 1000 if 9e11 < value < 4e12 else None


def _iso_time(text: str) -> float | None:
    """Return seconds since 1970 of a date, or a date and time in the format that training parses."""
    if not re.match(r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d.*)?$", text):
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def words_of(name: str) -> list[str]:
    """Split a column name into lower-case words: `userId` and `user_id` give [user, id]."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_").replace(" ", "_").split("_")


def is_time_name(name: str) -> bool:
    """Return whether the name of a column suggests the time of a sample."""
    return words_of(name)[-1] in _TIMES
