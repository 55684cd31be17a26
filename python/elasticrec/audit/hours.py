"""The passes of a run over hours: is each hour there as often as it should be, and do the days end where they do?"""

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
class Place:
    """Where a pass stands in the time of the data."""

    seen: int
    """What its rows say when they were last seen."""
    ends: bool
    """Whether counts decay and rows go behind it."""


def epochs(num_passes: int) -> list[Place]:
    """Passes over the same files, each of which ends."""
    return [Place(min(number, MAX_SEEN), True) for number in range(num_passes)]


@dataclass(frozen=True)
class Decided:
    """What a run says of its hours."""

    passes: list[dict[str, Any]]
    """What each pass is of."""
    skipped: list[dict[str, Any]]
    """Hours that were left out when they came late or changed."""


class _Walk:
    """Goes through the passes and finds what is not as the job says."""

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

    def add(self, number: int, told: dict[str, Any]) -> Place:
        """The next pass."""
        where = f"pass {number}"
        if told["why"] == "day_end":
            place = self._add_day_end(where)
        else:
            hour = datetime.strptime(told["hour"], _FORM)
            over = [datetime.strptime(one, _FORM) for one in told["passed_over"]]
            place = self._add_hour(f"{where}: hour {told['hour']}", hour, told["why"], over)
        if (told["day"], told["ends_day"]) != (place.seen, place.ends):
            self.problems.append(
                f"{where}: expected day {place.seen}, {'ended' if place.ends else 'not ended'} by it, got day "
                f"{told['day']}, {'ended' if told['ends_day'] else 'not ended'}"
            )
        return place

    def _add_day_end(self, where: str) -> Place:
        if self._day is None or self._ended == self._day:
            self.problems.append(f"{where}: ends a day that has no hours, or was ended before")
        self._ended = self._day
        return Place(0 if self._day is None else self._number(self._day), True)

    def _add_hour(self, where: str, hour: datetime, why: str, over: list[datetime]) -> Place:
        day = self._date(hour)
        ends = False
        if why == "next":
            missing = []
            while self._next < hour:
                missing.append(self._next)
                self._next = self._after(self._next)
            if missing != over or self._next != hour:
                text = ", ".join(one.strftime(_FORM) for one in missing) or "none"
                self.problems.append(f"{where}: expected {text} to be passed over for it, each in order and once")
            if self._day is not None and self._day < day and self._ended != self._day:
                self.problems.append(f"{where}: expected the end of day {self._number(self._day)} before it")
            self._passed_over.update(over)
            self._next, self._day = self._after(hour), day
            ends = self._date(self._next) != day and self._ended != day
            self._ended = day if ends else self._ended
        elif why == "late" and hour in self._passed_over:
            self._passed_over.discard(hour)
        elif why != "changed" or hour not in self._trained:
            self.problems.append(f"{where}: is trained as `{why}`, which it was not")
        self._trained.add(hour)
        return Place(self._number(day), ends)

    def _number(self, day: date) -> int:
        return min((day - self._date(self._first)).days, MAX_SEEN)

    def _date(self, hour: datetime) -> date:
        return (hour - self._settings.day_end_hour * _HOUR).date()

    def _after(self, hour: datetime) -> datetime:
        hour += _HOUR
        while hour.replace(tzinfo=self._zone).astimezone(UTC).astimezone(self._zone).replace(tzinfo=None) != hour:
            hour += _HOUR
        return hour


def walk(job: Job, decided: Decided) -> tuple[list[Place], list[str]]:
    """The place of each pass in time, and what is wrong with the passes."""
    found = _Walk(job)
    return [found.add(number, told) for number, told in enumerate(decided.passes)], found.problems


def files_of(job: Job, decided: Decided, passes: Sequence[PassUnits], lost: set[Path]) -> list[list[Path]]:
    """The files that each pass must have: all of the directory, unless it has changed since, as was told."""
    root = Path(job.data.train[0]).absolute()
    last = {told["hour"]: number for number, told in enumerate(decided.passes)}
    changed = {entry["skipped"] for entry in decided.skipped if entry["why"] == "changed"}
    found: list[list[Path]] = []
    for one, told in zip(passes, decided.passes, strict=True):
        if told["hour"] is None:
            found.append([])
            continue
        hour = datetime.strptime(told["hour"], _FORM)
        directory = root / hour.strftime("%Y%m%d") / hour.strftime("%H")
        strange = [path for path in one.files if not path.is_relative_to(directory)]
        if strange:
            raise ModelError(f"pass {one.number}: {strange[0]}: expected files of hour {told['hour']}")
        is_latest = last[told["hour"]] == one.number and told["hour"] not in changed
        found.append(_below(directory, lost) if is_latest else [path for path in one.files if path not in lost])
    return found


def _below(directory: Path, lost: set[Path]) -> list[Path]:
    """The files of a directory but those that storage leaves beside data."""

    def is_data(path: Path) -> bool:
        parts = path.relative_to(directory).parts
        return path.is_file() and not any(part.startswith((".", "_")) for part in parts)

    return sorted(path for path in directory.rglob("*") if is_data(path) and path not in lost)
