"""Plan of hourly training data: which hour is trained next, and how late or changed hours are handled.

Decisions are recorded as entries, plain dictionaries. Replaying them brings a new plan to the same state.
"""

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from elasticrec.config.files import hour_files
from elasticrec.config.hours import Hours, parse_hour, show_hour

Entry = dict[str, Any]

logger = logging.getLogger(__name__)

# Number of newest trained hours whose files are checked for changes.
_WATCHED = 48

PassReason = Literal["next", "late", "changed", "day_end"]


@dataclass(frozen=True)
class HourPass:
    """One pass over an hour of data, recorded before its first unit is leased."""

    hour: str | None
    """The hour, such as `2026-01-01T05`; None for a pass without data, which only ends a day."""
    why: PassReason
    """`next` in order, `late`, `changed`, or `day_end`."""
    day: int
    """Data time: days since the first hour."""
    ends_day: bool
    """Whether counts decay and rows are evicted after the pass."""
    digest: str
    """Digest of the names, sizes and modification times of the files."""
    passed_over: tuple[str, ...] = ()
    """Missing hours that were given up before this one."""

    def entry(self) -> Entry:
        """Return the pass as an entry for JSON."""
        return {**asdict(self), "passed_over": list(self.passed_over)}


@dataclass(frozen=True)
class PlanCallbacks:
    """How a plan reads the clock, reports to the user and records decisions."""

    clock: Callable[[], float] = time.monotonic
    note: Callable[[str], None] = logger.info
    """Tells the user about an hour; a coordinator also shows it in its status."""
    write: Callable[[Entry], None] = lambda _: None
    """Records that an hour is skipped, before the plan acts on it."""


class HourPlan:
    """Decides which hour each pass trains."""

    def __init__(self, hours: Hours, root: Path, callbacks: PlanCallbacks) -> None:
        self.hours = hours
        self._root = root
        self._callbacks = callbacks
        self._next = hours.first
        # The last day that has ended, and the day of the newest hour trained in order.
        self._ended_day = -1
        self._open_day: int | None = None
        # Missing hours that were given up; digests of trained hours, oldest first.
        self._late: list[datetime] = []
        self._digests: dict[datetime, str] = {}
        # The time when a later hour was first seen while the next one was missing.
        self._late_since: float | None = None
        self._next_check: float | None = None
        self.waiting: str | None = None
        """The message about the hour that the plan waits for, or None."""

    def replay(self, entry: Entry) -> None:
        """Apply an earlier decision: the entry of a pass, or an entry given to `write`."""
        if entry.get("skipped") is not None:
            hour = parse_hour(entry["skipped"])
            self._late = [one for one in self._late if one != hour]
            self._remember(hour, entry["digest"])
            return
        self._apply(HourPass(**{**entry, "passed_over": tuple(entry["passed_over"])}))

    def _apply(self, found: HourPass) -> None:
        """Apply the decision for a pass, so that the next one follows it."""
        self._next_check = self._late_since = self.waiting = None
        if found.ends_day:
            self._ended_day = max(self._ended_day, found.day)
        if found.hour is None:
            return
        hour = parse_hour(found.hour)
        self._late += [parse_hour(late) for late in found.passed_over]
        if found.why == "next":
            self._next = self.hours.next_hour(hour)
            self._open_day = found.day
        self._late = [one for one in self._late if one != hour]
        self._remember(hour, found.digest)

    def _remember(self, hour: datetime, digest: str) -> None:
        self._digests.pop(hour, None)
        self._digests[hour] = digest
        for old in list(self._digests)[:-_WATCHED]:
            del self._digests[old]

    @property
    def is_over(self) -> bool:
        """Whether the plan is past the last hour; it does not wait for late hours."""
        return self.hours.last is not None and self._next > self.hours.last

    def files(self, found: HourPass) -> list[Path]:
        """Return the current files of a pass."""
        return [] if found.hour is None else self._files(parse_hour(found.hour))

    def _files(self, hour: datetime) -> list[Path]:
        return hour_files(self.hours.directory(self._root, hour).absolute())

    def next_pass(self) -> HourPass | None:
        """Return the next pass, or None while waiting; the pass takes effect when it is given to `replay`."""
        now = self._callbacks.clock()
        if self._next_check is not None and now < self._next_check:
            return None
        found = self._next_in_order(now) or self._next_out_of_order()
        self._next_check = None if found else now + self.hours.poll_s
        if found is None and not self.is_over:
            self._wait()
        return found

    def _wait(self) -> None:
        wanted = self.hours.done_file(self._root, self._next)
        text = f"waiting for hour {show_hour(self._next)}: {wanted}"
        if self.waiting != text:
            self.waiting = text
            self._callbacks.note(text)

    def _next_in_order(self, now: float) -> HourPass | None:
        if self.is_over:
            return None
        if self.hours.is_done(self._root, self._next):
            return self._make_pass(self._next, ())
        later = [hour for hour in self.hours.complete_hours(self._root, self._next) if self.hours.exists(hour)]
        if not later:
            self._late_since = None
            return None
        if self._late_since is None:
            self._late_since = now
        if now - self._late_since < self.hours.late_s:
            return None
        missing = []
        hour = self._next
        while hour < later[0]:
            missing.append(show_hour(hour))
            hour = self.hours.next_hour(hour)
        return self._make_pass(later[0], tuple(missing))

    def _make_pass(self, hour: datetime, missing: tuple[str, ...]) -> HourPass:
        day = self.hours.day_of(hour)
        if self._open_day is not None and self._ended_day < self._open_day < day:
            # The hour that would have ended the day is missing.
            return HourPass(None, "day_end", self._open_day, True, "")
        if missing:
            self._callbacks.note(
                f"hour {missing[0]}{f' and {len(missing) - 1} more' if missing[1:] else ''} did not arrive "
                f"within {self.hours.late_s:g} s: training hour {show_hour(hour)} first"
            )
        ends = self.hours.ends_day(hour) and day > self._ended_day
        return HourPass(show_hour(hour), "next", day, ends, self._digest(hour), missing)

    def _next_out_of_order(self) -> HourPass | None:
        """Return a pass over an hour that came late or changed, or None."""
        hours = self.hours
        for hour in [one for one in self._late if hours.is_done(self._root, one)]:
            if hours.late == "train":
                self._callbacks.note(f"hour {show_hour(hour)} came late: training it now")
                return HourPass(show_hour(hour), "late", hours.day_of(hour), False, self._digest(hour))
            self._skip(hour, self._digest(hour), "came late and is skipped (data.hours.late)")
        for hour, known in list(self._digests.items()):
            if not hours.is_done(self._root, hour) or not self._files(hour):
                # Files removed after training are not a change.
                continue
            digest = self._digest(hour)
            if digest == known:
                continue
            if hours.changed == "train":
                self._callbacks.note(f"hour {show_hour(hour)} changed: training all of it again")
                return HourPass(show_hour(hour), "changed", hours.day_of(hour), False, digest)
            self._skip(hour, digest, "changed after its pass began; the change is skipped (data.hours.changed)")
        return None

    def _skip(self, hour: datetime, digest: str, text: str) -> None:
        entry = {"skipped": show_hour(hour), "digest": digest, "why": "late" if hour in self._late else "changed"}
        self._callbacks.write(entry)
        self.replay(entry)
        self._callbacks.note(f"hour {show_hour(hour)} {text}")

    def _digest(self, hour: datetime) -> str:
        """Return a digest of the names, sizes and modification times of an hour's files."""
        found = hashlib.sha256()
        for path in self._files(hour):
            # A file may be removed in the meantime; it does not count then.
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                found.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        return found.hexdigest()[:16]
