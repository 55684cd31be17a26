"""Reads a job file and `--set` overrides into a `Job`, or raises one error with a line per problem."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from elasticrec.config.document import parse
from elasticrec.config.fields import BASE, show
from elasticrec.config.job import Job
from elasticrec.config.problems import Location, describe, is_consequence, may_hold_secret
from elasticrec.errors import ConfigError

_OVERRIDE = re.compile(r"([A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class _Override:
    """One `--set KEY=VALUE`."""

    path: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        value = "***" if may_hold_secret(self.path) else show(self.text)[1:-1]
        return f"--set {'.'.join(self.path)}={value}"

    def covers(self, location: Location) -> bool:
        return self.path == tuple(map(str, location[: len(self.path)]))


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """Read and check a job file; relative paths in it start from its directory."""
    source = str(path)
    content = Path(path).read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        position = error.start
    else:
        base = Path(path).resolve().parent
        return parse_job(parse(text, source), base=base, source=source, overrides=overrides)
    raise ConfigError(f"{source}: expected UTF-8 text, got an invalid byte at position {position}")


def parse_job(raw: Any, *, base: Path, source: str = "job", overrides: Sequence[str] = ()) -> Job:
    """Check a job given as plain values; `raw` is not modified."""
    parsed = [_parse_override(text) for text in overrides]
    for override, value in parsed:
        raw = _replace_at(raw, override, override.path, value)
    try:
        job = Job.model_validate(raw, context={BASE: base})
    except ValidationError as error:
        # Only the lines leave this block: the error holds all inputs, which may include secrets.
        lines = _problem_lines(error, source, [override for override, _ in parsed])
    else:
        job._source = source
        return job
    raise ConfigError("\n".join(lines))


def default_job(overrides: Sequence[str] = ()) -> Job:
    """Return a minimal job for serving without a job file."""
    bare = {"name": "serve", "data": {"format": "criteo", "train": "."}}
    return parse_job(bare, base=Path.cwd(), source="serve", overrides=overrides)


def _parse_override(text: str) -> tuple[_Override, Any]:
    match = _OVERRIDE.fullmatch(text)
    if match is None:
        # The message does not repeat the text: it may be a secret whose key was left out.
        raise ConfigError("--set: expected KEY=VALUE such as `train.epochs=3`")
    override = _Override(tuple(match[1].split(".")), match[2])
    return override, parse(override.text, str(override))


def _replace_at(container: Any, override: _Override, path: tuple[str, ...], value: Any) -> Any:
    """Return a copy of `container` with the value at `path` replaced; create missing parents."""
    if not path:
        return value
    key, *rest = path
    if container is None:
        container = [] if key.isdigit() else {}
    if isinstance(container, dict):
        return {**container, key: _replace_at(container.get(key), override, tuple(rest), value)}
    here = ".".join(override.path[: len(override.path) - len(path)])
    if not isinstance(container, list):
        raise ConfigError(f"{override}: `{here}` is a single value and has no `{key}`")
    if not re.fullmatch(r"[0-9]{1,9}", key) or int(key) > len(container):
        raise ConfigError(f"{override}: expected an index from 0 to {len(container)}, got `{key}`")
    index = int(key)
    item = container[index] if index < len(container) else None
    return [*container[:index], _replace_at(item, override, tuple(rest), value), *container[index + 1 :]]


def _problem_lines(error: ValidationError, source: str, overrides: list[_Override]) -> list[str]:
    lines: list[str] = []
    for details in error.errors(include_url=False):
        if is_consequence(details):
            continue
        location = details["loc"] = tuple(part for part in details["loc"] if not str(part).startswith("<"))
        where = [source]
        key = ".".join(show(str(part))[1:-1] for part in location)
        # The last override of a key wins.
        override = next((o for o in reversed(overrides) if o.covers(location)), None)
        if override is not None:
            where = [str(override)]
            key = "" if len(location) == len(override.path) else key
        line = ": ".join([*where, *([key] if key else []), describe(details)])
        if line not in lines:
            lines.append(line)
    return lines
