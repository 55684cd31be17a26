"""YAML text to plain values and back.

Scalars follow the core schema of YAML 1.2, because 1.1 reads `no` as false, `1e-3` as text and `010` as 8.
"""

import re
from typing import Any

import yaml

from elasticrec.config.fields import show
from elasticrec.errors import ConfigError

_TAG = "tag:yaml.org,2002:"
_FLOAT = re.compile(
    r"""[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"""
)
_RESOLVERS: list[tuple[str, re.Pattern[str], list[str]]] = [
    ("null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    # A number with a leading zero stays text: it may be the name of a slot, and messages show it as written.
    ("int", re.compile(r"[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789")),
    ("float", _FLOAT, list("-+0123456789.")),
]
_PATTERNS = {kind: pattern for kind, pattern, _ in _RESOLVERS}
# Python refuses to convert integers of several thousand digits; no key needs that many.
_MAX_DIGITS = 1000
# Nested aliases can expand to more values than fit in memory.
_MAX_NODES = 1_000_000


class _Loader(yaml.SafeLoader):
    """Parses text to nodes; `_Builder` turns nodes into values."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as another type."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        return super().represent_mapping(tag, mapping, flow_style=False)

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # Other styles keep unusual line ends such as U+0085 unescaped, and a reader folds them into a space.
        return self.represent_scalar(f"{_TAG}str", data, style=None if data.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.represent_str)
# Drop the inherited resolvers of YAML 1.1; only `_RESOLVERS` apply.
_Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, _first)
    _Dumper.add_implicit_resolver(_TAG + _name, _pattern, _first)


def dump(value: Any) -> str:
    """Return a value as YAML in block style, lists of plain values on one line, keys in the given order."""
    return yaml.dump(value, Dumper=_Dumper, default_flow_style=None, sort_keys=False, allow_unicode=True, width=100)


def parse(text: str, source: str) -> Any:
    """Return the single document of `text`. Errors never show values, because a value may be a secret."""
    problem = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else _Builder(source).build(node)
    except yaml.reader.ReaderError as error:
        problem = f"{source}: character number {error.position + 1} is not allowed in YAML"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        what = ", ".join(part for part in (error.context, error.problem) if part)
        problem = f"{source}{line}: not valid YAML: {_without_values(what)}"
    except RecursionError:
        problem = f"{source}: nested too deeply"
    # Raised outside the handlers: their errors hold the text, and must not become the context of this one.
    raise ConfigError(problem)


def _without_values(text: str) -> str:
    """Remove quoted aliases and tags, which may be a secret; keep quoted token names and single characters."""
    return re.sub(r"\s*'(?!<[a-z ]+>'|\\.')[^']{2,}'", "", text)


class _Builder:
    """Turns nodes into plain values and refuses duplicate keys; constructors of PyYAML silently keep the last one."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._open: set[int] = set()
        self._num_nodes = 0

    def build(self, node: yaml.Node) -> Any:
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES:
            raise self._error(node, f"expected at most {_MAX_NODES} values including aliases, got more")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if id(node) in self._open:
            raise self._error(node, "an alias may not contain itself")
        self._open.add(id(node))
        value: Any
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            value = self._mapping(node)
        elif isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            value = [self.build(item) for item in node.value]
        else:
            raise self._error(node, "tags are not supported")
        self._open.remove(id(node))
        return value

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        lines: dict[str, int] = {}
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, "expected text as a key, got a list or a mapping")
            key = key_node.value
            if key in mapping:
                raise self._error(key_node, f"duplicate key {show(key)}, first on line {lines[key]}")
            lines[key] = key_node.start_mark.line + 1
            mapping[key] = self.build(value_node)
        return mapping

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        text: str = node.value
        kind = node.tag.removeprefix(_TAG)
        if kind == "str":
            return text
        # Without this an explicit `!!bool abc` would be false.
        if kind not in _PATTERNS or not _PATTERNS[kind].match(text):
            raise self._error(node, "tags are not supported")
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if len(text) > _MAX_DIGITS:
            raise self._error(node, f"expected a number of at most {_MAX_DIGITS} digits")
        if kind == "int":
            return int(text)
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))

    def _error(self, node: yaml.Node, text: str) -> ConfigError:
        return ConfigError(f"{self._source}:{node.start_mark.line + 1}: {text}")


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries to one with dotted keys; lists are kept."""
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return flat
