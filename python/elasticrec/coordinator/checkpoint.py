"""A checkpoint of a run with shards: one part per shard, and a manifest written last.

runs/<name>/checkpoints/ps-00000003-000012/    term and number: no name is used twice
    shard-00000.rows  shard-00000.dense        written by shard 0
    manifest.json                              lists every partition exactly once
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticrec.errors import ModelError
from elasticrec.manifest import MANIFEST, read_manifest
from elasticrec.net.messages import PartPaths, WrittenFile

KIND = "ps checkpoint"
PREFIX = "ps-"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with a valid manifest."""

    path: Path
    manifest: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the directory."""
        return self.path.name

    def parts(self, owned: range) -> list[PartPaths]:
        """Return the files that hold any of these partitions."""
        return [
            {"rows": str(self.path / part["rows"]), "dense": str(self.path / part["dense"])}
            for part in self.manifest["parts"]
            if part["partitions"][0] < owned.stop and owned.start < part["partitions"][1]
        ]


def open_checkpoint(path: Path, num_partitions: int) -> Checkpoint:
    """Open a checkpoint and validate its manifest; its files are not read."""
    manifest = read_manifest(path, KIND)
    if manifest["num_partitions"] != num_partitions:
        got = manifest["num_partitions"]
        raise ModelError(f"{path}: checkpoint of another table: expected {num_partitions} partitions, got {got}")
    check_cover(path, [range(*part["partitions"]) for part in manifest["parts"]], num_partitions)
    return Checkpoint(path, manifest)


def last_term(directory: Path) -> int:
    """Return the highest term in the names of checkpoints: new names must sort after existing ones."""
    terms = (path.name.removeprefix(PREFIX).partition("-")[0] for path in directory.glob(f"{PREFIX}*"))
    return max((int(term) for term in terms if term.isdecimal()), default=0)


def check_cover(path: Path, ranges: list[range], num_partitions: int) -> None:
    """Raise unless the ranges contain every partition once."""
    listed = sorted(partition for one in ranges for partition in one)
    if listed != list(range(num_partitions)):
        raise ModelError(f"{path}: expected each of {num_partitions} partitions once, got {len(listed)} entries")


def link_part(
    checkpoint: Checkpoint, part: dict[str, Any], path: Path, names: tuple[str, str]
) -> tuple[WrittenFile, WrittenFile]:
    """Link a part of another checkpoint into the directory of this one, replacing files that a dead shard left."""
    written = []
    for kind, name in zip(("rows", "dense"), names, strict=True):
        (path / name).unlink(missing_ok=True)
        os.link(checkpoint.path / part[kind], path / name)
        entry = checkpoint.manifest["files"][part[kind]]
        written.append(WrittenFile(bytes=entry["bytes"], sha256=entry["sha256"]))
    return written[0], written[1]


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, its manifest first: a shard may still be writing into the directory."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
