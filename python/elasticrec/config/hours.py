"""`data.hours`: training data that arrives hour by hour in directories `YYYYMMDD/HH`, each completed by a done file."""

import os
import re
from datetime import UTC, date, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from zoneinfo import ZoneInfo

from pydantic import BeforeValidator, Field, field_validator, model_validator

from elasticrec.config.fields import Seconds, Section, expected, problem
from elasticrec.config.sparse import MAX_SEEN

HOUR = timedelta(hours=1)

_HOUR_FORMS = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d)(?::00)?|(\d{4})(\d\d)(\d\d)/?(\d\d)")
_FIELD = re.compile(r"\{([^{}]*)\}")


def show_hour(hour: datetime) -> str:
    """Return an hour as text such as `2026-01-01T05`."""
    return hour.strftime("%Y-%m-%dT%H")


def parse_hour(text: str) -> datetime:
    """Parse an hour of the local time in `timezone`."""
    match = _HOUR_FORMS.fullmatch(text)
    if match is None:
        raise ValueError(text)
    year, month, day, hour = (int(part) for part in match.groups() if part is not None)
    return datetime(year, month, day, hour)


def _zone(name: str) -> tzinfo:
    # UTC works on machines without a time zone database.
    return UTC if name == "UTC" else ZoneInfo(name)


def _hour_text(value: Any) -> Any:
    # 2026010100 is a number in YAML; a bool is an int in Python.
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(value, datetime) and (value.minute, value.second, value.tzinfo) == (0, 0, None):
        # YAML parses `2026-01-01 00:00:00` as a datetime.
        return show_hour(value)
    try:
        return show_hour(parse_hour(text))
    except (ValueError, TypeError):
        raise expected("an hour such as `2026-01-01T00`, `20260101/00` or 2026010100") from None


_Hour = Annotated[str, BeforeValidator(_hour_text, json_schema_input_type=str | int)]


class Hours(Section):
    """Hours of training data, one pass each, in order. Training waits for the done file of an hour."""

    start: _Hour = Field(
        description="First hour, such as `2026-01-01T00`, `20260101/00` or 2026010100: directory `20260101/00` below "
        "`data.train`."
    )
    end: _Hour | None = Field(default=None, description="Last hour; null to keep waiting for new hours.")
    done: str = Field(
        default="_SUCCESS",
        min_length=1,
        description="File that marks an hour as complete, relative to its directory. `{day}` and `{hour}` stand for "
        "the names of the directories, as in `../{hour}.done`.",
    )
    poll_s: Seconds = Field(default=10.0, description="Seconds between two checks for the next hour.")
    late_s: Seconds = Field(
        default=3600.0,
        description="Seconds to wait for an incomplete hour once a later hour is complete; then the later hour is "
        "trained first.",
    )
    late: Literal["skip", "train"] = Field(
        default="skip",
        description="When an hour arrives after later hours were trained: `skip` it, or `train` on it in a pass of its "
        "own.",
    )
    changed: Literal["skip", "train"] = Field(
        default="skip",
        description="When the files of an hour change after its pass began: `skip` the change, or `train` on the "
        "whole hour again.",
    )
    timezone: str = Field(
        default="UTC",
        description="Time zone of the directory names, such as `Asia/Shanghai`. Training does not "
        "wait for hours that daylight saving skips.",
    )
    day_end_hour: int = Field(
        default=0,
        ge=0,
        le=23,
        description="Hour at which a new day begins; decay and eviction run at the end of the hour before it.",
    )

    @field_validator("timezone")
    @classmethod
    def _check_timezone(cls, value: str) -> str:
        try:
            _zone(value)
        except (ValueError, OSError, LookupError):
            raise expected("a time zone such as `UTC` or `Asia/Shanghai`") from None
        return value

    @field_validator("done")
    @classmethod
    def _check_done(cls, value: str) -> str:
        names = {match[1] for match in _FIELD.finditer(value)}
        rest = _FIELD.sub("", value)
        if not value.isprintable() or "{" in rest or "}" in rest or not names <= {"day", "hour"}:
            raise expected("a path such as `_SUCCESS` or `../{hour}.done`")
        return value

    @model_validator(mode="after")
    def _check_span(self) -> Self:
        if not self.exists(self.first):
            raise problem(f"`start`: {self.start} does not exist in `{self.timezone}`, daylight saving skips it")
        if self.last is not None:
            if self.last < self.first:
                raise problem(f"`end`: expected {self.start} or later, got {self.end}")
            days = (self._date(self.last) - self._date(self.first)).days
            if days > MAX_SEEN:
                raise problem(f"`end`: expected at most {MAX_SEEN} days after `start`, got {days}")
        return self

    @property
    def first(self) -> datetime:
        """The hour of `start`."""
        return parse_hour(self.start)

    @property
    def last(self) -> datetime | None:
        """The hour of `end`."""
        return None if self.end is None else parse_hour(self.end)

    def exists(self, hour: datetime) -> bool:
        """Whether this hour exists in local time; daylight saving skips one."""
        zone = _zone(self.timezone)
        shown = hour.replace(tzinfo=zone).astimezone(UTC).astimezone(zone)
        return shown.replace(tzinfo=None) == hour

    def next_hour(self, hour: datetime) -> datetime:
        """Return the next hour. An hour that daylight saving repeats is one directory."""
        following = hour + HOUR
        while not self.exists(following):
            following += HOUR
        return following

    def day_of(self, hour: datetime) -> int:
        """Return the data time of an hour: days since the day of `start`, from 0 to `MAX_SEEN`."""
        days = (self._date(hour) - self._date(self.first)).days
        return min(max(days, 0), MAX_SEEN)

    def ends_day(self, hour: datetime) -> bool:
        """Whether this hour is the last of its day."""
        return self._date(self.next_hour(hour)) != self._date(hour)

    def _date(self, hour: datetime) -> date:
        return (hour - self.day_end_hour * HOUR).date()

    def directory(self, root: Path, hour: datetime) -> Path:
        """Return the directory of an hour."""
        return root / hour.strftime("%Y%m%d") / hour.strftime("%H")

    def done_file(self, root: Path, hour: datetime) -> Path:
        """Return the file that marks an hour as complete."""
        day, name = hour.strftime("%Y%m%d"), hour.strftime("%H")
        # Resolve `..` in the text only: the directory may not exist yet.
        relative = self.done.replace("{day}", day).replace("{hour}", name)
        return Path(os.path.normpath(self.directory(root, hour) / relative))

    def is_done(self, root: Path, hour: datetime) -> bool:
        """Whether an hour is complete."""
        return self.done_file(root, hour).exists()

    def complete_hours(self, root: Path, start: datetime) -> list[datetime]:
        """Return the complete hours from `start` on, in order."""
        hours = []
        for day in sorted(_matching_names(root, r"\d{8}")):
            if day >= start.strftime("%Y%m%d"):
                hours += [
                    hour for name in _matching_names(root / day, r"\d\d") if (hour := _hour_of(day, name)) is not None
                ]
        last = self.last or datetime.max
        return sorted(hour for hour in hours if start <= hour <= last and self.is_done(root, hour))


def _matching_names(directory: Path, pattern: str) -> list[str]:
    try:
        return [name for name in os.listdir(directory) if re.fullmatch(pattern, name)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _hour_of(day: str, name: str) -> datetime | None:
    try:
        return parse_hour(day + name)
    except ValueError:
        return None
