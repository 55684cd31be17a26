"""The passes of a training in one process: epochs over the same files, or hours as they come."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from elasticrec.config import Job, match_files
from elasticrec.data.header import check_headers
from elasticrec.data.hours import HourPass, HourPlan, PlanCallbacks
from elasticrec.data.units import Unit, check_unchanged, is_lost, plan_units, read_units, write_units
from elasticrec.errors import SampleError
from elasticrec.run import Run
from elasticrec.training.checkpoint import Progress
from elasticrec.training.read import cut_of

# A stop is heard in this time while an hour is waited for.
_PAUSE_S = 0.1


class LocalPasses:
    """Knows which pass comes next, and which units it has."""

    def __init__(self, job: Job, run: Run, say: Callable[[str], None]) -> None:
        self._job, self._run, self._say = job, run, say
        self.files = [] if job.data.hours else match_files(job, "train")
        """Those of an epoch."""
        check_headers(job, self.files)
        self._skipped: list[dict[str, Any]] = []
        self._hour: HourPass | None = None
        callbacks = PlanCallbacks(say=say, write=self._skipped.append)
        self._plan = HourPlan(job.data.hours, Path(job.data.train[0]), callbacks) if job.data.hours else None

    @property
    def has_hours(self) -> bool:
        """Whether passes are hours."""
        return self._plan is not None

    @property
    def hour(self) -> str | None:
        """The hour at hand."""
        return self._hour.hour if self._hour else None

    @property
    def ends_day(self) -> bool:
        """Whether counts decay and rows are evicted at the end of the pass at hand."""
        return self._hour is None or self._hour.ends_day

    def seen(self, progress: Progress) -> int:
        """Data time: days for hours, else epochs."""
        return self._hour.day if self._hour else progress.epoch

    def name(self, number: int) -> str:
        """The pass at hand for people, by its number from 1 on."""
        if self._plan is None:
            return f"epoch {number}/{self._job.train.epochs}"
        return f"pass {number} {self.hour or 'day end'}"

    def is_over(self, progress: Progress) -> bool:
        """Whether nothing is left to train."""
        if self._plan is None:
            return progress.epoch >= self._job.train.epochs
        return progress.finished and self._plan.is_over

    def restore(self, progress: Progress) -> Progress:
        """Go on from a checkpoint; a pass of which it has nothing has not begun."""
        if self._plan is None:
            return progress
        num_passes = progress.epoch + (progress.batches > 0 or progress.upkept > progress.epoch)
        kept = [entry for entry in progress.hours if "skipped" not in entry][:num_passes]
        entries = tuple(entry for entry in progress.hours if "skipped" in entry or entry in kept)
        for entry in entries:
            self._plan.replay(entry)
        if num_passes > progress.epoch:
            self._hour = HourPass(**{**kept[-1], "passed_over": tuple(kept[-1]["passed_over"])})
        return replace(progress, hours=entries)

    def begin_next(self, progress: Progress, check_stop: Callable[[], None]) -> Progress | None:
        """Wait for the next pass, or go on with that at hand; none if there is no other one."""
        if self._plan is None:
            return progress if progress.epoch < self._job.train.epochs else None
        if progress.batches or progress.upkept > progress.epoch:
            return progress
        while (found := self._plan.next_pass()) is None:
            if self._plan.is_over:
                return None
            check_stop()
            time.sleep(_PAUSE_S)
        self._hour = found
        self._plan.replay(found.entry())
        check_headers(self._job, self._plan.files(found))
        progress = self.noted(progress)
        return replace(progress, hours=(*progress.hours, found.entry()))

    def noted(self, progress: Progress) -> Progress:
        """With the hours that were left out since."""
        skipped, self._skipped[:] = list(self._skipped), []
        return replace(progress, hours=(*progress.hours, *skipped))

    def open_units(self, progress: Progress) -> tuple[list[Unit], Progress]:
        """The units of the pass at hand that are left, without those whose data is lost if the job allows that."""
        path = self.units_path(progress.epoch)
        if progress.batches:
            lost = {entry["unit"] for entry in progress.missing}
            units = [unit for unit in read_units(path) if unit.id >= progress.unit and unit.id not in lost]
            if self._job.data.on_missing == "skip":
                return self.without_lost(units, progress)
            check_unchanged(units)
            return units, progress
        # units that a crash left of this epoch are of no checkpoint, and the job or the data may be others by now
        units = self._plan_units(progress)
        write_units(path, units)
        return units, progress

    def _plan_units(self, progress: Progress) -> list[Unit]:
        day = self._hour.day if self._hour else None
        while True:
            files = self.files if self._plan is None or self._hour is None else self._plan.files(self._hour)
            try:
                return plan_units(files, cut_of(self._job), progress.epoch, progress.unit, day)
            except FileNotFoundError:
                if self._plan is None or self._job.data.on_missing == "fail":
                    raise

    def units_path(self, epoch: int) -> Path:
        """Where the units of a pass are written down."""
        return self._run.units / f"epoch-{epoch:05d}.jsonl"

    def go_on_without(self, units: Sequence[Unit], progress: Progress, error: Exception) -> tuple[list[Unit], Progress]:
        """The units that are left when one could not be read, or that error if no data is gone."""
        left = [unit for unit in units if unit.id >= progress.unit]
        if progress.batches and left and left[0].id == progress.unit and any(map(is_lost, left[1:])):
            # units are loaded before they are cut: what was at its end when the next one could not be read is whole
            left = left[1:]
        found, after = self.without_lost(left, progress)
        if self._job.data.on_missing == "fail" or len(found) == len(left):
            raise error
        return found, after

    def without_lost(self, units: Sequence[Unit], progress: Progress) -> tuple[list[Unit], Progress]:
        """The units whose data is there; the others are named."""
        kept: list[Unit] = []
        missing = list(progress.missing)
        for unit in units:
            if not is_lost(unit):
                kept.append(unit)
                continue
            num_batches = progress.batches if unit.id == progress.unit else 0
            size = unit.end - unit.start
            missing.append({"unit": unit.id, "path": unit.path, "bytes": size, "batches": num_batches})
            if self._job.data.on_missing == "skip":
                some = f", of which {num_batches} batches were trained" if num_batches else ""
                self._say(
                    f"unit {unit.id} is lost, {size:,} bytes from {unit.start:,} on{some} (data.on_missing): "
                    f"{unit.path}: is gone or changed"
                )
        return kept, replace(progress, missing=tuple(missing))

    def refuse_empty(self, progress: Progress, num_rows: int) -> None:
        """A pass without a sample is none, unless it is of an hour."""
        source = self._job.source
        if not progress.batches:
            if self._plan is not None:
                return
            raise SampleError(f"{source}: data.train: expected samples, got {len(self.files)} file(s) without any")
        if self._job.data.slots and not num_rows:
            raise SampleError(f"{source}: data.slots: expected signs in these slots, the data has none")
