"""Types of job values: names, sizes, paths, and the base class of every section."""

import ipaddress
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

# Validation context key: the directory that relative paths of a job start from.
BASE = "base"

# Counts reach Rust as fixed-width integers; this bound turns an absurd count into a message instead of an overflow.
MAX_COUNT = 2**31 - 1
MAX_SECONDS = 1e9

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SIZE = re.compile(r"([0-9]{1,15})\s*([KMGT]i?B|B)")


_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(ms|s|m|h|d)")


def expected(what: str) -> PydanticCustomError:
    """Return the error `expected WHAT, got VALUE` for one key."""
    return PydanticCustomError("expected", "expected {expected}", {"expected": what})


def problem(text: str) -> PydanticCustomError:
    """Return an error for one key with its own text, where `expected ..., got ...` does not fit."""
    return PydanticCustomError("problem", "{problem}", {"problem": text})


def show(text: str, limit: int = 60) -> str:
    """Quote a user's text for a message: in backticks, on one line, shortened to `limit` characters."""
    return f"`{_printable(text, limit)}`"


def show_names(names: Iterable[str], most: int = 40) -> str:
    """Join names of the data for a message: on one line, at most `most` of them."""
    listed = list(names)
    more = f" and {len(listed) - most:,} more" if len(listed) > most else ""
    return ", ".join(_printable(name, 60) for name in listed[:most]) + more


def _printable(text: str, limit: int) -> str:
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return escaped if len(escaped) <= limit else f"{escaped[: limit - 3]}..."


def base_of(info: ValidationInfo | core_schema.ValidationInfo) -> Path:
    """Return the directory that relative paths start from: that of the job file, or the current one."""
    base = (info.context or {}).get(BASE)
    return base if isinstance(base, Path) else Path.cwd()


def is_loopback(host: str) -> bool:
    """Whether an address is reachable only from this machine; of all host names, only `localhost` qualifies."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Section(BaseModel):
    """A mapping of the job: refuses unknown keys, converts nothing silently, immutable after loading."""

    # Pydantic's messages must not show inputs: one of them may be a secret written literally.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_means_defaults(cls, value: Any) -> Any:
        """Treat a section whose keys are all commented out, which is `null` in YAML, as empty."""
        return {} if value is None else value


def _parse_bytes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    if match is None:
        raise expected("a size in bytes such as 65536, `64KB` or `16MiB`")
    return int(match[1]) * _UNITS[match[2]]


def _show_bytes(value: int) -> int | str:
    """Return the size with the largest suffix that is exact, such as `16MiB`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if value > 0 and value % _UNITS[unit] == 0:
            return f"{value // _UNITS[unit]}{unit}"
    return value


# Sizes of buffers: the lower bound of one page catches a forgotten suffix (`16` for 16 MiB).
_ByteCount = Annotated[int, Field(ge=4096, le=2**50)]
Bytes = Annotated[
    _ByteCount,
    BeforeValidator(
        _parse_bytes, json_schema_input_type=_ByteCount | Annotated[str, Field(pattern=f"^{_SIZE.pattern}$")]
    ),
    PlainSerializer(_show_bytes, return_type=int | str, when_used="json"),
]


def parse_seconds(value: Any) -> Any:
    """Return a duration such as `90s` in seconds; leave other types unchanged."""
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value)
    if match is None:
        raise expected("a number of seconds such as 90, or `90s`, `30m` or `2h`")
    return float(match[1]) * _SECONDS[match[2]]


# Durations: a plain number means seconds, as the suffix `_s` of the keys says.
_SecondCount = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
Seconds = Annotated[
    _SecondCount,
    BeforeValidator(
        parse_seconds, json_schema_input_type=_SecondCount | Annotated[str, Field(pattern=f"^{_DURATION.pattern}$")]
    ),
]


# A class of the user: the file and the name of the class.
CUSTOM_CLASS = re.compile(r"(.+\.py):([A-Za-z_][A-Za-z0-9_]*)")


def _check_name(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,62}", value):
        raise expected("1 to 63 of `a-z 0-9 . _ -`, the first a letter or digit")
    return value


# Names become directories, URL segments and metric labels, hence the narrow alphabet.
Name = Annotated[str, AfterValidator(_check_name)]


def _check_word(value: str) -> str:
    if not re.fullmatch(r"[^\s:=,]{1,128}", value) or not value.isprintable():
        raise expected("1 to 128 characters without spaces, `:`, `=` and `,`")
    return value


# Names of slots, columns and labels: text that cannot be mistaken for a separator in a line of slot text.
Word = Annotated[str, AfterValidator(_check_word)]


def absolute_path(value: str, info: ValidationInfo) -> str:
    """Return a path relative to the directory of the job file as an absolute path."""
    if not value or not value.isprintable():
        raise expected("a path, a directory or a glob")
    try:
        return str(base_of(info) / Path(value).expanduser())
    except RuntimeError:
        raise problem("`~`: this user has no home directory") from None


def one_or_list(value: Any) -> Any:
    """Wrap a single value in a list, so that it may be written without brackets."""
    return [value] if isinstance(value, str | int) and not isinstance(value, bool) else value


PathText = Annotated[str, AfterValidator(absolute_path)]
Paths = Annotated[
    tuple[PathText, ...],
    Field(strict=False),
    BeforeValidator(one_or_list, json_schema_input_type=str | list[str]),
]
NonEmptyPaths = Annotated[
    tuple[PathText, ...],
    Field(strict=False, min_length=1),
    BeforeValidator(one_or_list, json_schema_input_type=str | Annotated[list[str], Field(strict=False, min_length=1)]),
]

Pooling = Literal["sum", "mean", "sqrtn"]
