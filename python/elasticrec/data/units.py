"""Units: byte ranges of the data files, written down before they are first read and always cut the same way."""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from elasticrec import _core
from elasticrec.durable import write_atomically
from elasticrec.errors import ModelError, SampleError


@dataclass(frozen=True)
class Unit:
    """The records whose first byte lies in `start..end` of a file, in one epoch; of Parquet these row groups."""

    id: int
    path: str
    size: int
    modified_ns: int
    start: int
    end: int
    epoch: int
    cut: str
    """Digest of what decides how the unit is cut into batches."""
    day: int | None = None
    """Of `data.hours`: the day of its samples, counted from the first."""

    @property
    def seen(self) -> int:
        """Data time: when rows say that they were last seen."""
        return self.epoch if self.day is None else self.day

    def core(self) -> tuple[int, str, int, int, int, int, int]:
        """As the reader in Rust takes it."""
        return self.id, self.path, self.start, self.end, self.epoch, self.size, self.modified_ns


@dataclass(frozen=True)
class Cut:
    """What decides how files become units, and units batches."""

    unit_bytes: int
    shuffle: bool
    seed: int
    digest: str
    format: str = "slots"


def plan_units(files: Iterable[Path], cut: Cut, epoch: int, first_id: int, day: int | None = None) -> list[Unit]:
    """The units of one epoch in the order in which they are read."""
    ranges = []
    for path in files:
        stat = path.stat()
        for start, end in _ranges(path, stat.st_size, cut):
            ranges.append((str(path.absolute()), stat.st_size, stat.st_mtime_ns, start, end))
    order = _core.shuffle_units(len(ranges), cut.seed, epoch) if cut.shuffle else range(len(ranges))
    return [Unit(first_id + i, *ranges[at], epoch, cut.digest, day) for i, at in enumerate(order)]


def _ranges(path: Path, size: int, cut: Cut) -> list[tuple[int, int]]:
    if cut.format == "parquet":
        from elasticrec.data.parquet import group_ranges

        return group_ranges(path, cut.unit_bytes)
    return text_ranges(path, size, cut.unit_bytes)


def text_ranges(path: Path, size: int, unit_bytes: int) -> list[tuple[int, int]]:
    """Byte ranges of a text file; a compressed one can only be read from its start and is one."""
    return [(0, size)] if is_compressed(path) else _core.cut_units(size, unit_bytes)


def is_compressed(path: Path) -> bool:
    """Whether a file is gzip or zstd, by its content."""
    with path.open("rb") as file:
        return _core.is_compressed(file.read(4))


def write_units(path: Path, units: Iterable[Unit]) -> None:
    """Write the units of an epoch down, whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    lines = b"".join(json.dumps(asdict(unit)).encode() + b"\n" for unit in units)
    write_atomically(path, lines + _seal(lines))


def read_units(path: Path) -> list[Unit]:
    """The units of an epoch as they were written down."""
    *lines, seal = path.read_bytes().splitlines(keepends=True) or [b""]
    if seal != _seal(b"".join(lines)):
        raise ModelError(f"{path}: the checksum in its last line differs, the file is damaged")
    return [Unit(**json.loads(line)) for line in lines]


def _seal(lines: bytes) -> bytes:
    return json.dumps({"sha256": hashlib.sha256(lines).hexdigest()}).encode() + b"\n"


def is_lost(unit: Unit) -> bool:
    """Whether the bytes of a unit are not there any more."""
    try:
        check_unchanged([unit])
    except (FileNotFoundError, NotADirectoryError, SampleError):
        return True
    return False


def check_unchanged(units: Iterable[Unit]) -> None:
    """A unit that is read again must find the bytes of its first time."""
    for path, size, modified_ns in {(unit.path, unit.size, unit.modified_ns) for unit in units}:
        stat = os.stat(path)
        if (stat.st_size, stat.st_mtime_ns) != (size, modified_ns):
            raise SampleError(
                f"{path}: changed since its units were written down: expected {size} bytes as of "
                f"{modified_ns} ns, got {stat.st_size} bytes as of {stat.st_mtime_ns} ns"
            )
