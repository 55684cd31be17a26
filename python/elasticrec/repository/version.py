"""What a version is: its number, its place in the model's directory, and what its manifest says."""

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
# What a reader of the user's own says that read the lines; `data.reader` names its class.
READER_FILE = "reader.py"
CUBE = "cube"
# The graph's one output, f32 [batch, labels].
OUTPUT = "scores"

_DELTAS = "deltas"
_NAME = re.compile(rf"([1-9][0-9]{{0,17}})(?:/{_DELTAS}/([1-9][0-9]{{0,17}}))?")


class MissingVersionError(ModelError):
    """A version, or one that it is made of, is not in the repository, or not any more."""


def directory_of(number: int, base: int | None) -> str:
    """Where a version lies in the directory of its model: a delta in that of its base."""
    return str(number) if base is None else f"{base}/{_DELTAS}/{number}"


def number_of(name: str) -> int | None:
    """The version whose directory this is, if it is one."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[2] or match[1])


def part_name(part: int) -> str:
    """The name of a part file of the cube."""
    return f"{CUBE}/part-{part:05d}"


@dataclass(frozen=True)
class Version:
    """A version that is complete: it has a manifest."""

    number: int
    name: str
    """Its directory in that of the model."""
    manifest: dict[str, Any]

    @property
    def parent(self) -> int | None:
        """The version that a delta applies to."""
        parent: int | None = self.manifest.get("parent")
        return parent

    @property
    def base(self) -> int:
        """The whole version that it goes back to: itself if it is one."""
        base: int | None = self.manifest["base"]
        return self.number if base is None else base

    @property
    def is_delta(self) -> bool:
        """Whether it needs others."""
        return self.manifest["base"] is not None

    @property
    def rows(self) -> int:
        """Rows of the whole version."""
        rows: int = self.manifest["table"]["rows"]
        return rows

    @property
    def files(self) -> dict[str, FileEntry]:
        """Its own files by their name in its directory."""
        return {name: FileEntry(entry["bytes"], entry["sha256"]) for name, entry in self.manifest["files"].items()}

    @property
    def num_bytes(self) -> int:
        """Size of its own files."""
        return sum(entry.num_bytes for entry in self.files.values())

    @property
    def parts(self) -> list[str]:
        """Names of the part files of its cube."""
        return sorted(name for name in self.manifest["files"] if name.startswith(f"{CUBE}/"))

    def parts_of(self, partitions: range | None) -> list[str]:
        """Those of them that say something of some partitions, or of all."""
        ranges: dict[str, list[int]] | None = self.manifest["table"].get("parts")
        if partitions is None or ranges is None:
            return self.parts
        return [name for name in self.parts if ranges[name][0] < partitions.stop and partitions.start < ranges[name][1]]


def decode_version(content: bytes, name: str, place: str) -> Version:
    """The version of a manifest in the directory `name` of the model at `place`; all that is used of it is checked."""
    where = f"{join(place, name)}/{MANIFEST}"
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
        raise ModelError(f"{where}: a key is missing or of another type: {error}") from None
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
    # a directory of another name is a copy; who looks for its base will not find it
    if number_of(version.name) is not None and version.name != directory_of(version.number, base):
        raise ModelError(f"{where}: base: expected that of its directory, got {base}")


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
                f"{where}: table.parts: {name}: expected two of 0 to {table['partitions']}, ascending, got {bounds}"
            )


def check_file_name(name: str, where: str) -> None:
    """A name stays within the directory: plain parts, nothing else."""
    if name == MANIFEST:
        raise ModelError(f"{where}: files: expected a path within the directory, got {name!r}")
    for part in name.split("/"):
        check_part(part, where, name)


def check_part(part: str, where: str, name: str | None = None) -> None:
    """A part of a name is plain: it leads nowhere else."""
    if part in ("", ".", "..") or any(character in part for character in "/\\\0"):
        shown = part if name is None else name
        raise ModelError(f"{where}: files: expected a path within the directory, got {shown!r}")


@dataclass(frozen=True)
class Content:
    """What a version says of itself beside its number and its files; the manifest is made of it."""

    run: str
    checkpoint: str
    """What it was cut from, in words: the name of a checkpoint, or a step of a running job."""
    features: dict[str, Any]
    partitions: int
    columns: list[dict[str, Any]]
    """Name and width of each."""
    rows: int
    """Of the whole version."""
    inputs: list[str]
    """Of the graph, in its order."""
    tensors: list[dict[str, Any]]
    """Name, shape and offset of each tensor in the dense file."""
    metrics: dict[str, Any]
    data: dict[str, Any]
    """What it was trained on; `until`: up to which time, `reader`: who read its lines."""
    row_type: str = "f32"
    labels: tuple[str, ...] | None = None
    """Those that the graph gives scores of, where they are not all."""
    changed: int = 0
    """Rows of a delta."""
    removed: int = 0
    """Signs that a delta takes away."""
    parts: dict[str, range] | None = None
    """The partitions of each part file, where there are several: who needs some of them reads only their files."""

    def body(self, model: str, number: int, base: int | None, parent: int | None) -> tuple[int, dict[str, Any]]:
        """The number of the format, and all of the manifest but its files.

        What format 1 can say is said in it, so that the release before reads it.
        """
        is_first = base is None and self.row_type == "f32" and self.labels is None and self.parts is None
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
            **({} if is_first else {"parent": parent}),
            "features": self.features,
            "table": table,
            "graph": graph,
            "dense": {"file": DENSE_FILE, "tensors": self.tensors},
            "metrics": self.metrics,
            "data": self.data,
        }
        return (1 if is_first else 2), body
