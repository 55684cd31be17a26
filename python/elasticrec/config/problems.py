"""Turns errors of pydantic into lines that a user can act on: `where: key: expected …, got …`."""

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic_core import ErrorDetails

from elasticrec.config.fields import Section, show
from elasticrec.config.job import Job
from elasticrec.config.secret import Secret

Location = tuple[int | str, ...]

_EXPECTED = {
    "bool_type": "`true` or `false`",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "model_attributes_type": "a mapping",
    "model_type": "a mapping",
    "string_type": "text",
    "tuple_type": "a list",
}
_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def describe(error: ErrorDetails) -> str:
    """Return what is wrong with one key, without its location."""
    kind, location, context = error["type"], error["loc"], error.get("ctx", {})
    if kind == "missing":
        return "required key is missing"
    if kind == "extra_forbidden":
        return _unknown_key(location)
    if kind == "problem":
        return str(context["problem"])
    if kind in ("too_short", "string_too_short"):
        return f"expected at least {_count_text(kind, context['min_length'])}, got {_length_of(error['input'])}"
    if kind in ("too_long", "string_too_long"):
        return f"expected at most {_count_text(kind, context['max_length'])}, got {_length_of(error['input'])}"
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        wanted = f"{words} {_number(context[bound])}"
    elif kind == "literal_error":
        wanted = str(context["expected"]).replace("'", "`")
    elif kind == "expected":
        wanted = str(context["expected"])
    elif kind in _EXPECTED:
        wanted = _EXPECTED[kind]
    else:
        return _fallback_text(error)
    return f"expected {wanted}, got {_describe_value(error['input'], location)}"


def may_hold_secret(location: Sequence[int | str]) -> bool:
    """Whether the value at this location may contain a secret; true for unknown keys, which may be misspelt."""
    section: type[Section] | None = Job
    annotation: Any = Job
    for part in location:
        if _is_index(part):
            continue
        if section is None or part not in section.model_fields:
            return True
        annotation = section.model_fields[str(part)].annotation
        section = _section_in(annotation)
    return _can_hold_secret(annotation)


def _can_hold_secret(annotation: Any) -> bool:
    for kind in _types_in(annotation):
        if issubclass(kind, Secret):
            return True
        if issubclass(kind, Section) and any(
            _can_hold_secret(field.annotation) for field in kind.model_fields.values()
        ):
            return True
    return False


def _unknown_key(location: Location) -> str:
    *parents, key = location
    section = section_at(parents)
    keys = list(section.model_fields) if section else []
    near = difflib.get_close_matches(str(key), keys, n=1)
    if near:
        return f"unknown key, did you mean `{near[0]}`?"
    elsewhere = [path for path in _all_keys(Job, "") if path.rpartition(".")[2] == key]
    if elsewhere:
        return f"unknown key, did you mean `{elsewhere[0]}`?"
    return f"unknown key, expected one of {', '.join(f'`{name}`' for name in keys)}"


def section_at(location: Sequence[int | str]) -> type[Section] | None:
    """Return the section at this location of a job, or None."""
    section: type[Section] | None = Job
    for part in location:
        if _is_index(part):
            continue
        field = section.model_fields.get(str(part)) if section else None
        section = _section_in(field.annotation) if field else None
    return section


def _is_index(part: int | str) -> bool:
    return isinstance(part, int) or part.isdigit()


def _all_keys(section: type[Section], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        inner = _section_in(field.annotation)
        if inner is not None:
            yield from _all_keys(inner, f"{prefix}{name}.")


def _section_in(annotation: Any) -> type[Section] | None:
    return next((kind for kind in _types_in(annotation) if issubclass(kind, Section)), None)


def _types_in(annotation: Any) -> Iterator[type]:
    arguments = get_args(annotation)
    if not arguments and isinstance(annotation, type):
        yield annotation
    for argument in arguments:
        yield from _types_in(argument)


def _describe_value(value: Any, location: Location) -> str:
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    if may_hold_secret(location):
        return "a literal (not shown)"
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    if isinstance(value, str):
        return show(value)
    return show(str(value)).strip("`")


def is_consequence(error: ErrorDetails) -> bool:
    """Whether the error follows from another one: pydantic counts only the valid items of a list."""
    return error["type"] == "too_short" and len(error["input"]) >= error["ctx"]["min_length"]


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _count_text(kind: str, count: int) -> str:
    name = "character" if kind.startswith("string") else "item"
    return f"{count} {name}{'' if count == 1 else 's'}"


def _length_of(value: Any) -> str:
    return str(len(value)) if isinstance(value, str | list | tuple) else "another number"


def _fallback_text(error: ErrorDetails) -> str:
    """Format an error of any other type; no key raises one at present. Pydantic's text does not contain the value."""
    text = re.sub(r"^(Value error|Assertion failed), ", "", error["msg"]).rstrip(".")
    return f"{text[:1].lower()}{text[1:]}, got {_describe_value(error['input'], error['loc'])}"
