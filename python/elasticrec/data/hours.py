"""Hours of training data: which one is trained next, which is waited for, which comes too late or changes.

What is decided is told as entries, plain dictionaries; who replays them decides the same from there on.
"""

import contextlib
import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from elasticrec.config.files import hour_files
from elasticrec.config.hours import Hours, parse_hour, show_hour

Entry = dict[str, Any]

# Of so many hours, the newest that were trained, the files are looked at again.
_WATCHED = 48

Why = Literal["next", "late", "changed", "day_end"]


@dataclass(frozen=True)
class HourPass:
    """What a pass is of. It is written down before the first lease."""

    hour: str | None
    """Such as `2026-01-01T05`; none for a pass without data, which only ends a day."""
    why: Why
    """`next` in order, one that came `late` or was `changed`; or `day_end`."""
    day: int
    """Data time: days since that of the first hour."""
    ends_day: bool
    """Whether counts decay and rows are evicted behind it."""
    digest: str
    """Of the names, sizes and times of the files."""
    passed_over: tuple[str, ...] = ()
    """Hours that were waited for long enough: this one goes first."""

    def entry(self) -> Entry:
        """For JSON."""
        return {**asdict(self), "passed_over": list(self.passed_over)}


@dataclass(frozen=True)
class World:
    """What a plan sees and tells."""

    clock: Callable[[], float] = time.monotonic
    say: Callable[[str], None] = print
    write: Callable[[Entry], None] = lambda _: None
    """Hears of hours that are left out, before anybody else does."""


class HourPlan:
    """Says pass by pass which hour comes."""

    def __init__(self, hours: Hours, root: Path, world: World) -> None:
        self.hours = hours
        self._root = root
        self._world = world
        self._next = hours.first
        # The last day that was ended, and the day of the hours that came in order.
        self._ended_day = -1
        self._open_day: int | None = None
        # Hours that were passed over and have not come; digests of those that were trained, the newest last.
        self._late: list[datetime] = []
        self._digests: dict[datetime, str] = {}
        # Since when a later hour waits for the next one.
        self._late_since: float | None = None
        self._look_at: float | None = None
        self.waiting: str | None = None
        """What it waits for, in words."""

    def replay(self, entry: Entry) -> None:
        """Take in what was decided before: an entry of a pass, or one that was given to `write`."""
        if entry.get("skipped") is not None:
            hour = parse_hour(entry["skipped"])
            self._late = [one for one in self._late if one != hour]
            self._remember(hour, entry["digest"])
            return
        self._take(HourPass(**{**entry, "passed_over": tuple(entry["passed_over"])}))

    def _take(self, found: HourPass) -> None:
        """It is decided: the next look finds what comes behind it."""
        self._look_at = self._late_since = self.waiting = None
        if found.ends_day:
            self._ended_day = max(self._ended_day, found.day)
        if found.hour is None:
            return
        hour = parse_hour(found.hour)
        self._late += [parse_hour(late) for late in found.passed_over]
        if found.why == "next":
            self._next = self.hours.after(hour)
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
        """Whether all hours up to the last one had their turn; one that is late and may come is not waited for."""
        return self.hours.last is not None and self._next > self.hours.last

    def files(self, found: HourPass) -> list[Path]:
        """The files of a pass, as they are now."""
        return [] if found.hour is None else self._files(parse_hour(found.hour))

    def _files(self, hour: datetime) -> list[Path]:
        return hour_files(self.hours.directory(self._root, hour).absolute())

    def look(self) -> HourPass | None:
        """The next pass, or none yet: `waiting` says for what. It counts once it is given to `replay`."""
        now = self._world.clock()
        if self._look_at is not None and now < self._look_at:
            return None
        found = self._in_order(now) or self._out_of_order()
        self._look_at = None if found else now + self.hours.poll_s
        if found is None and not self.is_over:
            self._wait()
        return found

    def _wait(self) -> None:
        wanted = self.hours.done_file(self._root, self._next)
        text = f"waiting for hour {show_hour(self._next)}: {wanted}"
        if self.waiting != text:
            self.waiting = text
            self._world.say(text)

    def _in_order(self, now: float) -> HourPass | None:
        if self.is_over:
            return None
        if self.hours.is_done(self._root, self._next):
            return self._of_next(self._next, ())
        later = [hour for hour in self.hours.found(self._root, self._next) if self.hours.exists(hour)]
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
            hour = self.hours.after(hour)
        return self._of_next(later[0], tuple(missing))

    def _of_next(self, hour: datetime, missing: tuple[str, ...]) -> HourPass:
        day = self.hours.day_of(hour)
        if self._open_day is not None and self._ended_day < self._open_day < day:
            # the hour that would have ended the day did not come
            return HourPass(None, "day_end", self._open_day, True, "")
        if missing:
            self._world.say(
                f"hour {missing[0]}{f' and {len(missing) - 1} more' if missing[1:] else ''} did not come in "
                f"{self.hours.late_s:g} s: hour {show_hour(hour)} goes first"
            )
        ends = self.hours.ends_day(hour) and day > self._ended_day
        return HourPass(show_hour(hour), "next", day, ends, self._digest(hour), missing)

    def _out_of_order(self) -> HourPass | None:
        """An hour that came late, or changed."""
        hours = self.hours
        for hour in [one for one in self._late if hours.is_done(self._root, one)]:
            if hours.late == "train":
                self._world.say(f"hour {show_hour(hour)} came late: it is trained now")
                return HourPass(show_hour(hour), "late", hours.day_of(hour), False, self._digest(hour))
            self._skip(hour, self._digest(hour), "came late: it is skipped (data.hours.late)")
        for hour, known in list(self._digests.items()):
            if not hours.is_done(self._root, hour) or not self._files(hour):
                # what was removed after it was trained is nothing new
                continue
            digest = self._digest(hour)
            if digest == known:
                continue
            if hours.changed == "train":
                self._world.say(f"hour {show_hour(hour)} changed: all of it is trained again")
                return HourPass(show_hour(hour), "changed", hours.day_of(hour), False, digest)
            self._skip(hour, digest, "changed after its pass began: that is skipped (data.hours.changed)")
        return None

    def _skip(self, hour: datetime, digest: str, text: str) -> None:
        entry = {"skipped": show_hour(hour), "digest": digest, "why": "late" if hour in self._late else "changed"}
        self._world.write(entry)
        self.replay(entry)
        self._world.say(f"hour {show_hour(hour)} {text}")

    def _digest(self, hour: datetime) -> str:
        """Of what the files of an hour look like from outside."""
        found = hashlib.sha256()
        for path in self._files(hour):
            # one that is removed meanwhile is not there
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                found.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        return found.hexdigest()[:16]
