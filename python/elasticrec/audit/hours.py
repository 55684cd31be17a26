"""The passes of a run over hours: checks that hours are trained as the job says, and that days end correctly."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from elasticrec.audit.units import PassUnits
from elasticrec.config import Job
from elasticrec.config.sparse import MAX_SEEN
from elasticrec.errors import ModelError

_HOUR = timedelta(hours=1)
_FORM = "%Y-%m-%dT%H"


@dataclass(frozen=True)
class PassTime:
    """The data time of a pass."""

    seen: int
    """The value that its rows store as last seen."""
    ends: bool
    """Whether counts decay and rows are evicted after it."""


def epoch_times(num_passes: int) -> list[PassTime]:
    """Return the times of passes over the same files; each pass ends with decay and eviction."""
    return [PassTime(min(number, MAX_SEEN), True) for number in range(num_passes)]


@dataclass(frozen=True)
class HourDecisions:
    """The decisions of a run about its hours."""

    passes: list[dict[str, Any]]
    """The entry of each pass."""
    skipped: list[dict[str, Any]]
    """Entries of hours that were skipped because they came late or changed."""


class _HourChecker:
    """Follows the passes and collects differences from the job."""

    def __init__(self, job: Job) -> None:
        assert job.data.hours is not None
        self._settings = job.data.hours
        self._zone = UTC if self._settings.timezone == "UTC" else ZoneInfo(self._settings.timezone)
        self._next = self._first = datetime.strptime(self._settings.start, _FORM)
        self._passed_over: set[datetime] = set()
        self._trained: set[datetime] = set()
        self._day: date | None = None
        self._ended: date | None = None
        self.problems: list[str] = []

    def add(self, number: int, entry: dict[str, Any]) -> PassTime:
        """Check the next pass and return its time."""
        where = f"pass {number}"
        if entry["why"] == "day_end":
            time = self._add_day_end(where)
        else:
            hour = datetime.strptime(entry["hour"], _FORM)
            over = [datetime.strptime(one, _FORM) for one in entry["passed_over"]]
            time = self._add_hour(f"{where}: hour {entry['hour']}", hour, entry["why"], over)
        if (entry["day"], entry["ends_day"]) != (time.seen, time.ends):
            self.problems.append(
                f"{where}: expected day {time.seen}, {_day_end_text(time.ends)}, "
                f"got day {entry['day']}, {_day_end_text(entry['ends_day'])}"
            )
        return time

    def _add_day_end(self, where: str) -> PassTime:
        if self._day is None or self._ended == self._day:
            self.problems.append(f"{where}: ends a day that has no hours or has already ended")
        self._ended = self._day
        return PassTime(0 if self._day is None else self._number(self._day), True)

    def _add_hour(self, where: str, hour: datetime, why: str, over: list[datetime]) -> PassTime:
        day = self._date(hour)
        ends = False
        if why == "next":
            missing = []
            while self._next < hour:
                missing.append(self._next)
                self._next = self._after(self._next)
            if missing != over or self._next != hour:
                text = ", ".join(one.strftime(_FORM) for one in missing) or "none"
                self.problems.append(f"{where}: expected these hours to be given up before it, in order: {text}")
            if self._day is not None and self._day < day and self._ended != self._day:
                self.problems.append(f"{where}: expected the end of day {self._number(self._day)} before it")
            self._passed_over.update(over)
            self._next, self._day = self._after(hour), day
            ends = self._date(self._next) != day and self._ended != day
            self._ended = day if ends else self._ended
        elif why == "late" and hour in self._passed_over:
            self._passed_over.discard(hour)
        elif why != "changed" or hour not in self._trained:
            self.problems.append(f"{where}: is trained as `{why}`, which does not match the passes before it")
        self._trained.add(hour)
        return PassTime(self._number(day), ends)

    def _number(self, day: date) -> int:
        return min((day - self._date(self._first)).days, MAX_SEEN)

    def _date(self, hour: datetime) -> date:
        return (hour - self._settings.day_end_hour * _HOUR).date()

    def _after(self, hour: datetime) -> datetime:
        hour += _HOUR
        while hour.replace(tzinfo=self._zone).astimezone(UTC).astimezone(self._zone).replace(tzinfo=None) != hour:
            hour += _HOUR
        return hour


def _day_end_text(ends_day: bool) -> str:
    return "ended by this pass" if ends_day else "not ended by this pass"


def check_hours(job: Job, decisions: HourDecisions) -> tuple[list[PassTime], list[str]]:
    """Return the data time of each pass, and the problems of the passes."""
    checker = _HourChecker(job)
    return [checker.add(number, entry) for number, entry in enumerate(decisions.passes)], checker.problems


def files_of(job: Job, decisions: HourDecisions, passes: Sequence[PassUnits], lost: set[Path]) -> list[list[Path]]:
    """Return the expected files of each pass: all files of its hour, or its own files if the hour changed later."""
    root = Path(job.data.train[0]).absolute()
    last = {entry["hour"]: number for number, entry in enumerate(decisions.passes)}
    changed = {entry["skipped"] for entry in decisions.skipped if entry["why"] == "changed"}
    files: list[list[Path]] = []
    for one, entry in zip(passes, decisions.passes, strict=True):
        if entry["hour"] is None:
            files.append([])
            continue
        hour = datetime.strptime(entry["hour"], _FORM)
        directory = root / hour.strftime("%Y%m%d") / hour.strftime("%H")
        strange = [path for path in one.files if not path.is_relative_to(directory)]
        if strange:
            raise ModelError(f"pass {one.number}: {strange[0]}: expected files of hour {entry['hour']}")
        is_latest = last[entry["hour"]] == one.number and entry["hour"] not in changed
        files.append(_data_files_in(directory, lost) if is_latest else [path for path in one.files if path not in lost])
    return files


def _data_files_in(directory: Path, lost: set[Path]) -> list[Path]:
    """Return the files of a directory, without the hidden and marker files of storage systems."""

    def is_data(path: Path) -> bool:
        parts = path.relative_to(directory).parts
        return path.is_file() and not any(part.startswith((".", "_")) for part in parts)

    return sorted(path for path in directory.rglob("*") if is_data(path) and path not in lost)
