"""Values of samples, checked and converted to the types of chunks."""

import math
from typing import Any

from elasticrec.errors import SampleError


def number_of(kind: str, name: str, value: Any) -> float | None:
    """Return a finite number, or None for a missing value; `kind` and `name` are for errors."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise SampleError(f"{kind} `{name}`: expected a number, got {value!r}") from None
    if not math.isfinite(number):
        got = "NaN" if math.isnan(number) else number
        raise SampleError(f"{kind} `{name}`: expected a finite number, got {got}")
    return number


def label_of(name: str, value: Any) -> float:
    """Return a label from 0 to 1."""
    number = number_of("label", name, value)
    if number is None or not 0 <= number <= 1:
        raise SampleError(
            f"label `{name}`: expected a number from 0 to 1, got {'nothing' if number is None else number}"
        )
    return number


def categories_of(name: str, value: Any, is_list: bool) -> Any:
    """Return a value of a slot as text, or its values as a list of texts."""
    if isinstance(value, list | tuple):
        if not is_list:
            raise SampleError(f"slot `{name}`: expected one value as in the first samples, got a list")
        return [_category(name, item) for item in value if item is not None]
    if value is None or value == "":
        return [] if is_list else None
    return [_category(name, value)] if is_list else _category(name, value)


def _category(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int):
        return str(value)
    raise SampleError(f"slot `{name}`: expected a string or a whole number, got {type(value).__name__}")
