"""The passes of a training in one process: epochs over the same files, or hours as they arrive."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from elasticrec.config import Job, match_files
from elasticrec.data.header import check_headers
from elasticrec.data.hours import HourPass, HourPlan, PlanCallbacks
from elasticrec.data.units import Unit, UnitSplit, check_unchanged, is_lost, plan_units, read_units, write_units
from elasticrec.errors import SampleError
from elasticrec.run import Run
from elasticrec.training.checkpoint import Progress

# Interval of checking for a stop request while waiting for an hour.
_PAUSE_S = 0.1

logger = logging.getLogger(__name__)


class LocalPasses:
    """Decides which pass comes next, and plans its units."""

    def __init__(self, job: Job, run: Run) -> None:
        self._job, self._run = job, run
        self.files = [] if job.data.hours else match_files(job, "train")
        """Files of an epoch; empty with hours."""
        check_headers(job, self.files)
        self._skipped: list[dict[str, Any]] = []
        self._hour: HourPass | None = None
        callbacks = PlanCallbacks(write=self._skipped.append)
        self._plan = HourPlan(job.data.hours, Path(job.data.train[0]), callbacks) if job.data.hours else None

    @property
    def has_hours(self) -> bool:
        """Whether passes are hours."""
        return self._plan is not None

    @property
    def hour(self) -> str | None:
        """The current hour, or None."""
        return self._hour.hour if self._hour else None

    @property
    def ends_day(self) -> bool:
        """Whether counts decay and rows are evicted at the end of the current pass."""
        return self._hour is None or self._hour.ends_day

    def data_time(self, progress: Progress) -> int:
        """Return the data time: the day of an hour, else the epoch."""
        return self._hour.day if self._hour else progress.epoch

    def name(self, number: int) -> str:
        """Return the name of the current pass for progress lines; `number` counts from 1."""
        if self._plan is None:
            return f"epoch {number}/{self._job.train.epochs}"
        return f"pass {number} {self.hour or 'day end'}"

    def is_over(self, progress: Progress) -> bool:
        """Return whether nothing is left to train."""
        if self._plan is None:
            return progress.epoch >= self._job.train.epochs
        return progress.finished and self._plan.is_over

    def restore(self, progress: Progress) -> Progress:
        """Continue from a checkpoint; a pass without a batch in the checkpoint begins again."""
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
        """Wait for the next pass, or continue the current one. Return None after the last pass."""
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
        progress = self.with_skipped_hours(progress)
        return replace(progress, hours=(*progress.hours, found.entry()))

    def with_skipped_hours(self, progress: Progress) -> Progress:
        """Return the progress with the hours that were skipped since the last call."""
        skipped, self._skipped[:] = list(self._skipped), []
        return replace(progress, hours=(*progress.hours, *skipped))

    def open_units(self, progress: Progress) -> tuple[list[Unit], Progress]:
        """Return the remaining units of the current pass, without lost ones if `data.on_missing` allows that."""
        path = self.units_path(progress.epoch)
        if progress.batches:
            lost = {entry["unit"] for entry in progress.missing}
            units = [unit for unit in read_units(path) if unit.id >= progress.unit and unit.id not in lost]
            if self._job.data.on_missing == "skip":
                return self.without_lost(units, progress)
            check_unchanged(units)
            return units, progress
        # Plan again: units from before a crash are in no checkpoint, and job or data may have changed.
        units = self._plan_units(progress)
        write_units(path, units)
        return units, progress

    def _plan_units(self, progress: Progress) -> list[Unit]:
        day = self._hour.day if self._hour else None
        while True:
            files = self.files if self._plan is None or self._hour is None else self._plan.files(self._hour)
            try:
                return plan_units(files, UnitSplit.of(self._job), progress.epoch, progress.unit, day)
            except FileNotFoundError:
                if self._plan is None or self._job.data.on_missing == "fail":
                    raise

    def units_path(self, epoch: int) -> Path:
        """Return the file that records the units of a pass."""
        return self._run.units / f"epoch-{epoch:05d}.jsonl"

    def skip_lost(self, units: Sequence[Unit], progress: Progress, error: Exception) -> tuple[list[Unit], Progress]:
        """Return the remaining units after a read error. Raise the error unless data was lost and may be skipped."""
        left = [unit for unit in units if unit.id >= progress.unit]
        if progress.batches and left and left[0].id == progress.unit and any(map(is_lost, left[1:])):
            # The next unit could not be read, so this one was read completely.
            left = left[1:]
        found, after = self.without_lost(left, progress)
        if self._job.data.on_missing == "fail" or len(found) == len(left):
            raise error
        return found, after

    def without_lost(self, units: Sequence[Unit], progress: Progress) -> tuple[list[Unit], Progress]:
        """Return the units whose data still exists; record and report the others."""
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
                trained = f", of which {num_batches} batches were trained" if num_batches else ""
                logger.warning(
                    f"unit {unit.id} is lost, {size:,} bytes from {unit.start:,} on{trained} (data.on_missing): "
                    f"{unit.path}: removed or changed"
                )
        return kept, replace(progress, missing=tuple(missing))

    def refuse_empty(self, progress: Progress, num_rows: int) -> None:
        """Raise an error for an epoch without samples or without signs; an hour may be empty."""
        source = self._job.source
        if not progress.batches:
            if self._plan is not None:
                return
            raise SampleError(f"{source}: data.train: expected samples, got {len(self.files)} file(s) without any")
        if self._job.data.slots and not num_rows:
            raise SampleError(f"{source}: data.slots: expected signs in these slots, the data has none")
