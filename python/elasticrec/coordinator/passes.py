"""Passes: the order of units. A pass is an epoch over the files, or an hour; its end is a boundary between units."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elasticrec.data.hours import HourPass, HourPlan, PlanCallbacks
from elasticrec.data.units import Unit, UnitSplit, plan_units, read_units, write_units
from elasticrec.errors import ModelError, SampleError
from elasticrec.journal import Entry
from elasticrec.net.messages import Boundary

_PASSES_IN_MEMORY = 16


@dataclass(frozen=True)
class Upkeep:
    """Maintenance of the whole table at the end of a pass: `sparse.decay` and `sparse.evict` of the job."""

    decay: float = 1.0
    min_score: float | None = None
    max_age: int | None = None
    nonclk_coeff: float = 0.1
    click_coeff: float = 1.0

    def boundary(self, number: int, before_unit: int, now: int | None = None) -> Boundary:
        """Return the boundary at the end of a pass.

        `now` is the data time; the default is the number of the epoch.
        """
        return {
            "before_unit": before_unit,
            "decay": self.decay if self.decay < 1 else None,
            "decay_step": number,
            "coefficients": [self.nonclk_coeff, self.click_coeff],
            "min_score": self.min_score,
            "now": number if now is None else now,
            "max_age": self.max_age,
        }


@dataclass(frozen=True)
class Pass:
    """Units `first_unit..end_unit`, as recorded in the journal."""

    number: int
    first_unit: int
    end_unit: int
    file: str
    sha256: str
    boundary: Boundary
    hour: dict[str, Any] | None = None
    """With `data.hours`: the `HourPass` of the units."""


@dataclass(frozen=True)
class PassPlan:
    """The settings and functions that determine the passes of a job."""

    files: Callable[[int], Sequence[Path]]
    """Returns the files of a pass."""
    split: UnitSplit
    num_passes: int
    """Ignored with `hours`: their number is not known in advance."""
    upkeep: Upkeep = Upkeep()
    hours: Callable[[PlanCallbacks], HourPlan] | None = None
    """Makes the plan of a job with hours instead of epochs."""
    check: Callable[[Sequence[Path]], None] = lambda _: None
    """Raises if the files do not belong to this job."""
    on_missing: str = "fail"
    """`data.on_missing`."""


class Passes:
    """The passes that have begun. Units and boundary of each are recorded before its first unit is leased."""

    def __init__(
        self, directory: Path, plan: PassPlan, write: Callable[[Entry], None], callbacks: PlanCallbacks | None = None
    ) -> None:
        self._directory = directory
        self._plan = plan
        self._write = write
        # The units of the last passes that were used: a year of hours would not fit into memory.
        self._units: dict[int, list[Unit]] = {}
        self.begun: list[Pass] = []
        self.skipped: list[Entry] = []
        """Hours that were skipped."""
        self.missing: dict[int, Entry] = {}
        """Units whose data is lost, by id."""
        callbacks = replace(callbacks or PlanCallbacks(), write=self._skip_hour)
        self.hours = plan.hours(callbacks) if plan.hours else None

    def replay(self, entry: Entry) -> None:
        """Replay a pass of the journal, and verify its units."""
        begun = Pass(**_plain(entry))
        path = self._directory / begun.file
        units = read_units(path)
        if _digest(path) != begun.sha256:
            raise ModelError(f"{path}: sha-256 differs from the journal: the units of pass {begun.number} were changed")
        self._add(begun, units)
        if self.hours is not None and begun.hour is not None:
            self.hours.replay(begun.hour)

    def replay_hour(self, entry: Entry) -> None:
        """Replay a skipped hour of the journal."""
        self.skipped.append(_plain(entry))
        if self.hours is not None:
            self.hours.replay(_plain(entry))

    def _skip_hour(self, entry: Entry) -> None:
        self._write({"kind": "hour", **entry})
        self.skipped.append(entry)

    def replay_missing(self, entry: Entry) -> None:
        """Replay a lost unit of the journal."""
        self.missing[entry["unit"]] = _plain(entry)

    def record_missing(self, unit: Unit, num_batches: int) -> None:
        """Record that the data of a unit is lost."""
        entry = {"unit": unit.id, "path": unit.path, "bytes": unit.end - unit.start, "batches": num_batches}
        self._write({"kind": "missing", **entry})
        self.missing[unit.id] = entry

    @property
    def end_unit(self) -> int:
        """One past the last planned unit."""
        return self.begun[-1].end_unit if self.begun else 0

    @property
    def boundaries(self) -> list[Boundary]:
        """The ends of the passes that have begun, in order."""
        return [begun.boundary for begun in self.begun]

    @property
    def is_last(self) -> bool:
        """Whether no further pass follows."""
        return len(self.begun) >= self._plan.num_passes if self.hours is None else self.hours.is_over

    def last_complete_hour(self, *, is_complete: bool) -> str | None:
        """Return the last hour in sequence that is trained completely, None without hours.

        `is_complete`: whether the last pass is complete.
        """
        done = self.begun if is_complete else self.begun[:-1]
        hours = (begun.hour["hour"] for begun in reversed(done) if begun.hour and begun.hour["why"] == "next")
        return next(hours, None)

    def begin_next(self) -> Pass | None:
        """Plan and record the units of the next pass; return None if there is no further pass, or not yet."""
        if self.hours is None:
            return None if self.is_last else self._begin(self._plan.files(len(self.begun)), None)
        hour = self.hours.next_pass()
        try:
            return None if hour is None else self._begin(self.hours.files(hour), hour)
        except FileNotFoundError:
            if self._plan.on_missing == "fail":
                raise
            # The files of the hour were removed while it was planned; the next call plans again.
            return None

    def _begin(self, files: Sequence[Path], hour: HourPass | None) -> Pass:
        number, first = len(self.begun), self.end_unit
        self._plan.check(files)
        units = plan_units(files, self._plan.split, number, first, hour.day if hour else None)
        if not units and hour is None:
            raise SampleError(f"data.train: expected samples, got {len(files)} file(s) without any")
        path = self._directory / f"epoch-{number:05d}.jsonl"
        # A file that a crash left here was never used: its pass is not in the journal.
        write_units(path, units)
        end = first + len(units)
        upkeep = self._plan.upkeep
        if hour is not None and not hour.ends_day:
            # Decay and eviction wait for the end of the day; the coefficients still rank rows if memory runs out.
            upkeep = replace(upkeep, decay=1.0, min_score=None, max_age=None)
        boundary = upkeep.boundary(number, end, hour.day if hour else None)
        begun = Pass(number, first, end, path.name, _digest(path), boundary, hour.entry() if hour else None)
        self._write({"kind": "pass", **vars(begun)})
        self._add(begun, units)
        if self.hours is not None and hour is not None:
            self.hours.replay(hour.entry())
        return begun

    def _add(self, begun: Pass, units: list[Unit]) -> None:
        if [unit.id for unit in units] != list(range(begun.first_unit, begun.end_unit)):
            raise ModelError(f"{begun.file}: expected units {begun.first_unit} to {begun.end_unit - 1} in order")
        self.begun.append(begun)
        self._keep(begun, units)

    def _keep(self, begun: Pass, units: list[Unit]) -> None:
        self._units[begun.number] = units
        while len(self._units) > _PASSES_IN_MEMORY:
            del self._units[next(iter(self._units))]

    def unit(self, number: int) -> Unit:
        """Return a unit by its id."""
        begun = next(one for one in reversed(self.begun) if one.first_unit <= number < one.end_unit)
        if begun.number not in self._units:
            self._keep(begun, read_units(self._directory / begun.file))
        return self._units[begun.number][number - begun.first_unit]


def _plain(entry: Entry) -> Entry:
    """Return an entry without the fields that the journal adds."""
    return {key: value for key, value in entry.items() if key not in ("n", "term", "kind")}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
