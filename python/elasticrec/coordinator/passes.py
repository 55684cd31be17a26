"""Passes: which units come when. A pass is an epoch over the files; its end is a boundary in the order of units."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticrec.coordinator.journal import Entry
from elasticrec.data.units import Cut, Unit, plan_units, read_units, write_units
from elasticrec.errors import ModelError, SampleError


@dataclass(frozen=True)
class Upkeep:
    """What is done to the whole table at the end of a pass: `sparse.decay` and `sparse.evict` of the job."""

    decay: float = 1.0
    min_score: float | None = None
    max_age: int | None = None
    nonclk_coeff: float = 0.1
    click_coeff: float = 1.0

    def boundary(self, number: int, before_unit: int) -> dict[str, Any]:
        """The end of a pass as a shard takes it (`crates/ps/src/shard.rs`), with the effect it has in one process."""
        return {
            "before_unit": before_unit,
            "decay": self.decay if self.decay < 1 else None,
            "decay_step": number,
            "coefficients": [self.nonclk_coeff, self.click_coeff],
            "min_score": self.min_score,
            "now": number,
            "max_age": self.max_age,
        }


@dataclass(frozen=True)
class Pass:
    """Units `first_unit..end_unit`, written down."""

    number: int
    first_unit: int
    end_unit: int
    file: str
    sha256: str
    boundary: dict[str, Any]


@dataclass(frozen=True)
class PassPlan:
    """What decides the passes of a job."""

    files: Callable[[int], Sequence[Path]]
    """The files of a pass."""
    cut: Cut
    num_passes: int
    upkeep: Upkeep = Upkeep()


class Passes:
    """The passes that have begun. Each is written down, units and boundary, before its first unit is leased."""

    def __init__(self, directory: Path, plan: PassPlan, write: Callable[[Entry], None]) -> None:
        self._directory = directory
        self._plan = plan
        self._write = write
        self._units: dict[int, list[Unit]] = {}
        self.begun: list[Pass] = []

    def replay(self, entry: Entry) -> None:
        """Take a pass of the journal in, its units checked."""
        begun = Pass(**{key: value for key, value in entry.items() if key not in ("n", "term", "kind")})
        path = self._directory / begun.file
        units = read_units(path)
        if _digest(path) != begun.sha256:
            raise ModelError(f"{path}: not the units that pass {begun.number} began with, the file was replaced")
        self._add(begun, units)

    @property
    def end_unit(self) -> int:
        """One behind the last unit that is planned."""
        return self.begun[-1].end_unit if self.begun else 0

    @property
    def boundaries(self) -> list[dict[str, Any]]:
        """The ends of the passes that have begun, in order."""
        return [begun.boundary for begun in self.begun]

    @property
    def is_last(self) -> bool:
        """Whether no pass comes behind those that have begun."""
        return len(self.begun) >= self._plan.num_passes

    def begin_next(self) -> Pass:
        """Plan the units of the next pass and write them down."""
        number, first = len(self.begun), self.end_unit
        files = self._plan.files(number)
        units = plan_units(files, self._plan.cut, number, first)
        if not units:
            raise SampleError(f"data.train: expected samples, got {len(files)} file(s) without any")
        path = self._directory / f"epoch-{number:05d}.jsonl"
        # a file that a crash left here is of no lease: its pass had not begun
        write_units(path, units)
        end = units[-1].id + 1
        boundary = self._plan.upkeep.boundary(number, end)
        begun = Pass(number, first, end, path.name, _digest(path), boundary)
        self._write({"kind": "pass", **vars(begun)})
        self._add(begun, units)
        return begun

    def _add(self, begun: Pass, units: list[Unit]) -> None:
        if [unit.id for unit in units] != list(range(begun.first_unit, begun.end_unit)):
            raise ModelError(f"{begun.file}: expected units {begun.first_unit} to {begun.end_unit - 1} in order")
        self.begun.append(begun)
        self._units[begun.number] = units

    def unit(self, number: int) -> Unit:
        """A unit by its id."""
        begun = next(one for one in self.begun if one.first_unit <= number < one.end_unit)
        return self._units[begun.number][number - begun.first_unit]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
