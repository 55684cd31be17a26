"""Versions: number, directory and manifest."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from elasticrec.errors import ModelError
from elasticrec.manifest import MANIFEST, FileEntry, decode_manifest
from elasticrec.repository.storage import join

KIND = "model"
FORMATS = (1, 2)
GRAPH_FILE = "graph.onnx"
DENSE_FILE = "dense.bin"
# Source of a custom reader; `data.reader` in the manifest names its class.
READER_FILE = "reader.py"
CUBE = "cube"
# The single output of the graph, f32 [batch, labels].
OUTPUT = "scores"

_DELTAS = "deltas"
_NAME = re.compile(rf"([1-9][0-9]{{0,17}})(?:/{_DELTAS}/([1-9][0-9]{{0,17}}))?")


class MissingVersionError(ModelError):
    """A version, or a part of its chain, is not in the repository."""


def directory_of(number: int, base: int | None) -> str:
    """Return the directory of a version, relative to the model; deltas are inside their base."""
    return str(number) if base is None else f"{base}/{_DELTAS}/{number}"


def number_of(name: str) -> int | None:
    """Return the number of the version in a directory, or None if it is not the directory of a version."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[2] or match[1])


def part_name(part: int) -> str:
    """Return the name of a part file of the cube."""
    return f"{CUBE}/part-{part:05d}"


@dataclass(frozen=True)
class Version:
    """A complete version, which has a manifest."""

    number: int
    name: str
    """Directory, relative to the model."""
    manifest: dict[str, Any]

    @property
    def parent(self) -> int | None:
        """The version that a delta applies to; None for a base."""
        parent: int | None = self.manifest.get("parent")
        return parent

    @property
    def base(self) -> int:
        """The base of the chain; the version itself if it is a base."""
        base: int | None = self.manifest["base"]
        return self.number if base is None else base

    @property
    def is_delta(self) -> bool:
        """Whether it is a delta."""
        return self.manifest["base"] is not None

    @property
    def rows(self) -> int:
        """Rows of the whole version."""
        rows: int = self.manifest["table"]["rows"]
        return rows

    @property
    def files(self) -> dict[str, FileEntry]:
        """Files of this version by name, without those of its chain."""
        return {name: FileEntry(entry["bytes"], entry["sha256"]) for name, entry in self.manifest["files"].items()}

    @property
    def num_bytes(self) -> int:
        """Total size of its files, without those of its chain."""
        return sum(entry.num_bytes for entry in self.files.values())

    @property
    def parts(self) -> list[str]:
        """Names of the part files of its cube."""
        return sorted(name for name in self.manifest["files"] if name.startswith(f"{CUBE}/"))

    def parts_of(self, partitions: range | None) -> list[str]:
        """Return the part files that hold any of these partitions; all for None."""
        ranges: dict[str, list[int]] | None = self.manifest["table"].get("parts")
        if partitions is None or ranges is None:
            return self.parts
        return [name for name in self.parts if ranges[name][0] < partitions.stop and partitions.start < ranges[name][1]]


def decode_version(content: bytes, name: str, location: str) -> Version:
    """Parse and check the manifest in the directory `name` of the model at `location`."""
    where = f"{join(location, name)}/{MANIFEST}"
    manifest = decode_manifest(content, where, KIND, FORMATS)
    number = number_of(name)
    try:
        _check_keys(where, manifest)
        if type(manifest["version"]) is not int or number not in (None, manifest["version"]):
            raise ModelError(f"{where}: version: expected {number}, got {manifest['version']}")
        version = Version(manifest["version"], name, manifest)
        _check_base(where, version)
        _check_parts(where, version)
        for file in version.files:
            check_file_name(file, where)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{where}: a key is missing or has the wrong type: {error}") from None
    return version


def _check_keys(where: str, manifest: dict[str, Any]) -> None:
    for key in ("features", "table", "graph", "dense", "metrics", "data", "files"):
        if not isinstance(manifest[key], dict):
            raise ModelError(f"{where}: {key}: expected an object, got {type(manifest[key]).__name__}")
    rows = manifest["table"]["rows"]
    if type(rows) is not int or rows < 0:
        raise ModelError(f"{where}: table.rows: expected a count, got {rows}")


def _check_base(where: str, version: Version) -> None:
    base, parent = version.manifest["base"], version.parent
    for key, value in (("base", base), ("parent", parent)):
        if value is not None and (type(value) is not int or not 1 <= value < version.number):
            raise ModelError(f"{where}: {key}: expected an earlier version or null, got {value}")
    if (base is None) != (parent is None):
        raise ModelError(f"{where}: expected `base` and `parent` or neither, got {base} and {parent}")
    if parent is not None and parent < base:
        raise ModelError(f"{where}: parent: expected {base} or a delta of it, got {parent}")
    # A directory with any other name is a copy; its base is not found by name.
    if number_of(version.name) is not None and version.name != directory_of(version.number, base):
        raise ModelError(f"{where}: base: expected the base in its directory name, got {base}")


def _check_parts(where: str, version: Version) -> None:
    table = version.manifest["table"]
    ranges = table.get("parts")
    if ranges is None:
        return
    if sorted(ranges) != version.parts:
        raise ModelError(f"{where}: table.parts: expected {', '.join(version.parts)}, got {', '.join(sorted(ranges))}")
    for name, bounds in ranges.items():
        first, end = bounds
        if type(first) is not int or type(end) is not int or not 0 <= first < end <= table["partitions"]:
            raise ModelError(
                f"{where}: table.parts: {name}: expected a range within 0 to {table['partitions']}, got {bounds}"
            )


def check_file_name(name: str, where: str) -> None:
    """Raise an error unless a file name stays within its directory."""
    if name == MANIFEST:
        raise ModelError(f"{where}: files: expected a path within the directory, got {name!r}")
    for part in name.split("/"):
        check_part(part, where, name)


def check_part(part: str, where: str, name: str | None = None) -> None:
    """Raise an error unless a part of a file name is plain, without `..` or separators."""
    if part in ("", ".", "..") or any(character in part for character in "/\\\0"):
        shown = part if name is None else name
        raise ModelError(f"{where}: files: expected a path within the directory, got {shown!r}")


@dataclass(frozen=True)
class Content:
    """The content of a manifest, except for the version number and the files."""

    run: str
    checkpoint: str
    """Name of the checkpoint, or the step or publish of a training in progress."""
    features: dict[str, Any]
    partitions: int
    columns: list[dict[str, Any]]
    """Name and width of each column."""
    rows: int
    """Rows of the whole version, also for a delta."""
    inputs: list[str]
    """Inputs of the graph in order."""
    tensors: list[dict[str, Any]]
    """Name, shape and offset of each tensor in the dense file."""
    metrics: dict[str, Any]
    data: dict[str, Any]
    """Training data: counts, `until` (last complete hour), `reader` (custom reader)."""
    row_type: str = "f32"
    labels: tuple[str, ...] | None = None
    """Labels of the graph's scores; None for all labels."""
    changed: int = 0
    """Number of rows in a delta."""
    removed: int = 0
    """Number of signs that a delta removes."""
    parts: dict[str, range] | None = None
    """Partitions of each part file if there are several, so that a shard fetches only its files."""

    def body(self, model: str, number: int, base: int | None, parent: int | None) -> tuple[int, dict[str, Any]]:
        """Return the format number, and the manifest without its files.

        Format 1 is used whenever it suffices, so that the previous release can read the version.
        """
        is_format_1 = base is None and self.row_type == "f32" and self.labels is None and self.parts is None
        table: dict[str, Any] = {
            "partitions": self.partitions,
            "columns": self.columns,
            "rows": self.rows,
            "row_type": self.row_type,
        }
        if base is not None:
            table |= {"changed": self.changed, "removed": self.removed}
        if self.parts is not None:
            table["parts"] = {name: [owned.start, owned.stop] for name, owned in sorted(self.parts.items())}
        graph: dict[str, Any] = {"file": GRAPH_FILE, "inputs": self.inputs, "outputs": [OUTPUT]}
        if self.labels is not None:
            graph["labels"] = list(self.labels)
        body = {
            "model": model,
            "version": number,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "run": self.run,
            "checkpoint": self.checkpoint,
            "base": base,
            **({} if is_format_1 else {"parent": parent}),
            "features": self.features,
            "table": table,
            "graph": graph,
            "dense": {"file": DENSE_FILE, "tensors": self.tensors},
            "metrics": self.metrics,
            "data": self.data,
        }
        return (1 if is_format_1 else 2), body
