"""Conversion of texts and values of the data to numbers and times, as in docs/guide/data.md."""

import ctypes
import math
import re
import struct
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

_NUMBER = re.compile(
    rb"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|inf|infinity|nan)",
    re.IGNORECASE,
)
_DATE = re.compile(rb"(\d{4})-(\d\d)-(\d\d)(?:[Tt _](\d\d):(\d\d)(?::(\d\d)(?:[.,](\d{1,6}))?)?(Z|z|[+-]\d\d:?\d\d)?)?")
_LIKE_A_DATE = re.compile(rb"\d{4}-\d\d-\d\d[-0-9:.,+TtZz_ ]*")
_SPACES = b" \t\n\r\x0c"
# Larger numbers are milliseconds.
_MAX_SECONDS = 2e10


class BadRecordError(Exception):
    """A record that cannot be parsed; it is not counted."""


class OddError(BadRecordError):
    """A record that the trainer may read differently."""


def f32(number: float) -> float:
    """Return the nearest 32-bit float."""
    return ctypes.c_float(number).value


def f32_of(text: bytes) -> float | None:
    """Return a text as a number, rounded once to 32 bits; None if it is not a number. NaN and infinity are numbers."""
    if _NUMBER.fullmatch(text) is None:
        return None
    wide = float(text)
    (bits,) = struct.unpack("<Q", struct.pack("<d", wide))
    if bits & 0x1FFFFFFF == 0x10000000 and math.isfinite(wide):
        # A tie between two 32-bit floats: the exact text decides the direction of the rounding.
        exact, rounded = Decimal(text.decode()), Decimal(wide)
        if exact != rounded:
            wide = math.nextafter(wide, math.inf if exact > rounded else -math.inf)
    return f32(wide)


def trimmed_f32_of(text: bytes) -> float | None:
    """Return `f32_of` a text without spaces around it."""
    return f32_of(text.strip(_SPACES))


def check_finite(value: float | None) -> float:
    """Return a finite number; raise `BadRecordError` for anything else."""
    if value is None or not math.isfinite(value):
        raise BadRecordError
    return value


def label_of(text: bytes) -> float:
    """Return a label: true, false or a number from 0 to 1."""
    if text in (b"false", b"False"):
        return 0.0
    if text in (b"true", b"True"):
        return 1.0
    return check_share(trimmed_f32_of(text))


def check_share(value: float | None) -> float:
    """Return a number from 0 to 1; raise `BadRecordError` for anything else."""
    if value is None or not 0 <= value <= 1:
        raise BadRecordError
    return value


def check_weight(value: float | None) -> None:
    """Raise `BadRecordError` for an invalid weight; a valid one does not change the counts."""
    if check_finite(value) <= 0:
        raise BadRecordError


def number_of(value: Any) -> float:
    """Return a number that a reader returned, as a 32-bit float."""
    if isinstance(value, str | bytes | bytearray | memoryview):
        raise BadRecordError
    try:
        return f32(float(value))
    except (TypeError, ValueError, OverflowError):
        raise BadRecordError from None


def seconds_of(text: bytes) -> float | None:
    """Return seconds since 1970 of a number or a date; None if the text is neither."""
    if _NUMBER.fullmatch(text) and math.isfinite(number := float(text)):
        return number / 1000 if abs(number) > _MAX_SECONDS else number
    match = _DATE.fullmatch(text)
    if match is None:
        if _LIKE_A_DATE.fullmatch(text):
            raise OddError(f"time `{text.decode('utf-8', 'replace')[:40]}`")
        return None
    year, month, day, hour, minute, second, fraction, zone = match.groups()
    offset = UTC
    if zone and zone not in b"Zz":
        minutes = int(zone[1:3]) * 60 + int(zone[-2:])
        offset = timezone(timedelta(minutes=-minutes if zone[:1] == b"-" else minutes))
    try:
        time = datetime(
            *(int(part or 0) for part in (year, month, day, hour, minute, second)),  # type: ignore[arg-type, misc]
            tzinfo=offset,
        )
    except ValueError:
        return None
    micros = int((fraction or b"0").ljust(6, b"0"))
    return time.timestamp() + micros / 1e6
