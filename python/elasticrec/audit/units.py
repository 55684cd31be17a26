"""The recorded units of a run: checks that each pass covers all data, each byte once."""

import hashlib
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from elasticrec.errors import ModelError, SampleError


@dataclass(frozen=True)
class Unit:
    """The fields of a recorded unit that the audit needs."""

    id: int
    path: Path
    size: int
    modified_ns: int
    start: int
    end: int


@dataclass(frozen=True)
class PassUnits:
    """The units of one pass."""

    number: int
    sha256: str
    units: list[Unit]
    lost: set[Path] = field(default_factory=set)
    """Files that were lost before they were read."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that the pass reads, each once."""
        return tuple(sorted({unit.path for unit in self.units} - self.lost))

    def without(self, lost: set[Path]) -> "PassUnits":
        """Return the pass without lost files, none of whose samples was trained."""
        return replace(self, lost=lost & set(self.files))

    def check_files(self) -> None:
        """Refuse files that have changed since training, as they cannot be counted again."""
        units = [unit for unit in self.units if unit.path not in self.lost]
        for path, size, modified_ns in sorted({(unit.path, unit.size, unit.modified_ns) for unit in units}):
            stat = os.stat(path)
            if (stat.st_size, stat.st_mtime_ns) != (size, modified_ns):
                raise SampleError(
                    f"{path}: changed since it was trained on: expected {size} bytes modified at {modified_ns} ns, "
                    f"got {stat.st_size} bytes modified at {stat.st_mtime_ns} ns"
                )

    def problems(self, first_id: int, expected: list[Path], format: str) -> list[str]:
        """Return an error for bytes in no unit or in two, files without units, unexpected files and wrong ids."""
        found = []
        if [unit.id for unit in self.units] != list(range(first_id, first_id + len(self.units))):
            found.append(f"pass {self.number}: expected units {first_id} to {first_id + len(self.units) - 1} in order")
        ranges: dict[Path, list[tuple[int, int]]] = {}
        for unit in self.units:
            if unit.path not in self.lost:
                ranges.setdefault(unit.path, []).append((unit.start, unit.end))
        for path in expected:
            end = _end_of(path, format)
            at = 0
            for start, stop in sorted(ranges.get(path, [])):
                if start != at:
                    found.append(f"pass {self.number}: {path}: expected a unit from {at} on, got one from {start} on")
                at = stop
            if at != end:
                found.append(f"pass {self.number}: {path}: expected units up to {end}, got them up to {at}")
        strange = sorted(ranges.keys() - set(expected))
        found += [f"pass {self.number}: {path}: has units, but is not a file of `data.train`" for path in strange]
        return found


def _end_of(path: Path, format: str) -> int:
    if format != "parquet":
        return path.stat().st_size
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return int(pq.ParquetFile(path).metadata.num_row_groups)
    except pa.ArrowException as error:
        raise SampleError(f"{path}: expected a Parquet file: {str(error).splitlines()[0]}") from None


def read_pass(directory: Path, number: int) -> PassUnits:
    """Read the units of a pass and check the checksum in their last line."""
    path = directory / f"epoch-{number:05d}.jsonl"
    content = path.read_bytes()
    *lines, seal = content.splitlines(keepends=True) or [b""]
    try:
        is_sound = json.loads(seal)["sha256"] == hashlib.sha256(b"".join(lines)).hexdigest()
        units = [
            Unit(one["id"], Path(one["path"]), one["size"], one["modified_ns"], one["start"], one["end"])
            for one in map(json.loads, lines)
        ]
    except (ValueError, KeyError, TypeError):
        is_sound, units = False, []
    if not is_sound:
        raise ModelError(f"{path}: the checksum in its last line differs, the file is damaged")
    return PassUnits(number, hashlib.sha256(content).hexdigest(), units)
