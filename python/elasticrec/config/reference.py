"""Generates the reference page of `job.yaml` from the sections: `python -m elasticrec.config.reference`."""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import PlainSerializer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from elasticrec.config.document import dump
from elasticrec.config.fields import Section
from elasticrec.config.job import Job, job_schema

_HEAD = """\
# `job.yaml`, key by key

Generated from the code by `make reference`; `elasticrec schema` prints the same as JSON Schema for editors. A key that
is left out has the default shown here, unknown keys are refused with a suggestion, and `--set a.b=c` overrides any
key. Relative paths start from the directory of the job file unless a key says otherwise.
"""

_BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
}
# Bounds from here on only prevent overflow and are not shown.
_LARGE = 10**9
# Names for kinds of text, by a piece of their pattern.
_PATTERNS = {"[KMGT]": "a size such as `16MiB`", "ms|s|m": "a duration such as `30m`"}


def reference() -> str:
    """Return the page as Markdown."""
    definitions = job_schema()["$defs"]
    parts = [_HEAD, *_section(Job, "", definitions)]
    return "\n".join(parts)


def _section(section: type[Section], prefix: str, definitions: dict[str, Any]) -> Iterator[str]:
    title = f"## `{prefix.rstrip('.')}`" if prefix else "## The job"
    words = (section.__doc__ or "").strip().split("\n\n")[0]
    schema = definitions.get(section.__name__) or section.model_json_schema()
    rows = [
        f"| `{prefix}{name}` | {_value_kind(schema['properties'][name], definitions)} "
        f"| {_default_text(field)} | {_description(field)} |"
        for name, field in section.model_fields.items()
    ]
    yield "\n".join([title, "", words, "", "| key | value | default | meaning |", "|---|---|---|---|", *rows, ""])
    for name, field in section.model_fields.items():
        inner, many = _find_section(field.annotation)
        if inner is not None:
            yield from _section(inner, f"{prefix}{name}{'[]' if many else ''}.", definitions)


def _find_section(annotation: Any, many: bool = False) -> tuple[type[Section] | None, bool]:
    """Return the section that a key holds, and whether it holds several."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, many
    for argument in get_args(annotation):
        inner, repeated = _find_section(argument, many or getattr(annotation, "__origin__", None) is tuple)
        if inner is not None:
            return inner, repeated
    return None, False


def _value_kind(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    if "$ref" in schema:
        inner = definitions[schema["$ref"].rpartition("/")[2]]
        return "section" if inner.get("type") == "object" else _value_kind(inner, definitions)
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        kinds = [_value_kind(one, definitions) for one in schema["anyOf"]]
        return " or ".join(dict.fromkeys(kinds))
    kind = schema.get("type", "any")
    if kind == "array":
        kind = f"list of {_value_kind(schema['items'], definitions)}" if "items" in schema else "list"
    elif kind == "string":
        kind = next((words for mark, words in _PATTERNS.items() if mark in schema.get("pattern", "")), "text")
    bounds = [words.format(schema[key]) for key, words in _BOUNDS.items() if key in schema and schema[key] < _LARGE]
    kind = {"boolean": "`true` or `false`"}.get(kind, kind)
    return f"{kind} ({', '.join(bounds)})" if bounds else kind


def _default_text(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    value = field.default
    if isinstance(value, Section):
        return ""
    if value is None:
        return "`null`"
    if value in ("", ()):
        return ""
    for part in field.metadata:
        if isinstance(part, PlainSerializer):
            value = part.func(value)  # type: ignore[call-arg]
    text = dump(list(value) if isinstance(value, tuple) else value).removesuffix("...\n").strip()
    return f"`{text}`"


def _description(field: FieldInfo) -> str:
    return (field.description or "").replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
