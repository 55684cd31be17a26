"""Units: byte ranges of the data files, recorded before they are first read and always split the same way."""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from elasticrec import _core
from elasticrec.config import Job, fingerprint
from elasticrec.durable import write_atomically
from elasticrec.errors import ModelError, SampleError
from elasticrec.net.messages import UnitEntry


@dataclass(frozen=True)
class Unit:
    """The records whose first byte lies in `start..end` of a file, in one epoch; for Parquet a range of row groups."""

    id: int
    path: str
    size: int
    modified_ns: int
    start: int
    end: int
    epoch: int
    split_digest: str
    """Digest of everything that decides how the unit is split into batches."""
    day: int | None = None
    """With `data.hours`: the day of the samples, counted from the first."""

    @classmethod
    def of(cls, entry: UnitEntry) -> Self:
        """Return the unit of an entry."""
        return cls(
            id=entry["id"],
            path=entry["path"],
            size=entry["size"],
            modified_ns=entry["modified_ns"],
            start=entry["start"],
            end=entry["end"],
            epoch=entry["epoch"],
            split_digest=entry["cut"],
            day=entry.get("day"),
        )

    def entry(self) -> UnitEntry:
        """Return the unit as files and messages contain it."""
        return {
            "id": self.id,
            "path": self.path,
            "size": self.size,
            "modified_ns": self.modified_ns,
            "start": self.start,
            "end": self.end,
            "epoch": self.epoch,
            "cut": self.split_digest,
            "day": self.day,
        }

    @property
    def seen(self) -> int:
        """Data time of the samples, which rows store as last seen."""
        return self.epoch if self.day is None else self.day

    def core(self) -> tuple[int, str, int, int, int, int, int]:
        """Return the unit as the Rust reader expects it."""
        return self.id, self.path, self.start, self.end, self.epoch, self.size, self.modified_ns


@dataclass(frozen=True)
class UnitSplit:
    """The settings that decide how files are split into units, and units into batches."""

    unit_bytes: int
    shuffle: bool
    seed: int
    digest: str
    format: str = "slots"

    @classmethod
    def of(cls, job: Job) -> Self:
        """Return the settings of a job; a change of any setting that decides about batches changes the digest."""
        return cls(job.data.unit_bytes, job.data.shuffle, job.train.seed, fingerprint(job)[:16], job.data.format)


def plan_units(
    files: Iterable[Path], split: UnitSplit, epoch: int, first_id: int, day: int | None = None
) -> list[Unit]:
    """Return the units of one epoch in reading order."""
    ranges = []
    for path in files:
        stat = path.stat()
        for start, end in _ranges(path, stat.st_size, split):
            ranges.append((str(path.absolute()), stat.st_size, stat.st_mtime_ns, start, end))
    order = _core.shuffle_units(len(ranges), split.seed, epoch) if split.shuffle else range(len(ranges))
    return [Unit(first_id + i, *ranges[at], epoch, split.digest, day) for i, at in enumerate(order)]


def _ranges(path: Path, size: int, split: UnitSplit) -> list[tuple[int, int]]:
    if split.format == "parquet":
        from elasticrec.data.parquet import group_ranges

        return group_ranges(path, split.unit_bytes)
    return text_ranges(path, size, split.unit_bytes)


def text_ranges(path: Path, size: int, unit_bytes: int) -> list[tuple[int, int]]:
    """Return byte ranges of a text file; a compressed file is one range, as it can only be read from its start."""
    return [(0, size)] if is_compressed(path) else _core.split_units(size, unit_bytes)


def is_compressed(path: Path) -> bool:
    """Return whether a file is gzip or zstd, by its content."""
    with path.open("rb") as file:
        return _core.is_compressed(file.read(4))


def write_units(path: Path, units: Iterable[Unit]) -> None:
    """Write the units of an epoch to a file atomically."""
    path.parent.mkdir(exist_ok=True)
    lines = b"".join(json.dumps(unit.entry()).encode() + b"\n" for unit in units)
    write_atomically(path, lines + _seal(lines))


def read_units(path: Path) -> list[Unit]:
    """Read the units of an epoch and check their checksum."""
    *lines, seal = path.read_bytes().splitlines(keepends=True) or [b""]
    if seal != _seal(b"".join(lines)):
        raise ModelError(f"{path}: the checksum in its last line differs, the file is damaged")
    return [Unit.of(json.loads(line)) for line in lines]


def _seal(lines: bytes) -> bytes:
    return json.dumps({"sha256": hashlib.sha256(lines).hexdigest()}).encode() + b"\n"


def is_lost(unit: Unit) -> bool:
    """Return whether the data of a unit is gone or has changed."""
    try:
        check_unchanged([unit])
    except (FileNotFoundError, NotADirectoryError, SampleError):
        return True
    return False


def check_unchanged(units: Iterable[Unit]) -> None:
    """Check that the files of units are unchanged since the units were recorded."""
    for path, size, modified_ns in {(unit.path, unit.size, unit.modified_ns) for unit in units}:
        stat = os.stat(path)
        if (stat.st_size, stat.st_mtime_ns) != (size, modified_ns):
            raise SampleError(
                f"{path}: changed since its units were recorded: expected {size} bytes modified "
                f"at {modified_ns} ns, got {stat.st_size} bytes modified at {stat.st_mtime_ns} ns"
            )
