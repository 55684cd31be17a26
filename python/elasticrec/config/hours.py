"""`data.hours`: training data that comes hour by hour, in directories `YYYYMMDD/HH`, each whole with its done file."""

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

_FORMS = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d)(?::00)?|(\d{4})(\d\d)(\d\d)/?(\d\d)")
_FIELD = re.compile(r"\{([^{}]*)\}")


def show_hour(hour: datetime) -> str:
    """Such as `2026-01-01T05`."""
    return hour.strftime("%Y-%m-%dT%H")


def parse_hour(text: str) -> datetime:
    """An hour as the clock of `timezone` shows it."""
    match = _FORMS.fullmatch(text)
    if match is None:
        raise ValueError(text)
    year, month, day, hour = (int(part) for part in match.groups() if part is not None)
    return datetime(year, month, day, hour)


def _zone(name: str) -> tzinfo:
    # a machine without a database of time zones knows this one
    return UTC if name == "UTC" else ZoneInfo(name)


def _hour_text(value: Any) -> Any:
    # 2026010100 is a number in YAML; so is `true`, in Python
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(value, datetime) and (value.minute, value.second, value.tzinfo) == (0, 0, None):
        # YAML knows `2026-01-01 00:00:00`
        return show_hour(value)
    try:
        return show_hour(parse_hour(text))
    except (ValueError, TypeError):
        raise expected("an hour such as `2026-01-01T00`, `20260101/00` or 2026010100") from None


_Hour = Annotated[str, BeforeValidator(_hour_text, json_schema_input_type=str | int)]


class Hours(Section):
    """Hours of training data, each a pass, in order. An hour is waited for until its done file is there."""

    start: _Hour = Field(
        description="The first hour, such as `2026-01-01T00`, `20260101/00` or 2026010100: directory `20260101/00` of "
        "`data.train`."
    )
    end: _Hour | None = Field(default=None, description="The last hour; null to wait for the next one for ever.")
    done: str = Field(
        default="_SUCCESS",
        min_length=1,
        description="File that says that an hour is whole, from its directory; `{day}` and `{hour}` stand for the "
        "names of its directories, as in `../{hour}.done`.",
    )
    poll_s: Seconds = Field(default=10.0, description="Seconds between two looks for an hour that is waited for.")
    late_s: Seconds = Field(
        default=3600.0,
        description="Seconds that a later hour which is done waits for one that is not; then it goes first.",
    )
    late: Literal["skip", "train"] = Field(
        default="skip", description="What is done with such an hour when it comes: nothing, or a pass of its own."
    )
    changed: Literal["skip", "train"] = Field(
        default="skip",
        description="What is done when the files of an hour change after its pass began: nothing, or a new pass of all "
        "of it.",
    )
    timezone: str = Field(
        default="UTC",
        description="Time zone of the names of the directories, such as `Asia/Shanghai`: hours that a change of the "
        "clock leaves out are not waited for.",
    )
    day_end_hour: int = Field(
        default=0,
        ge=0,
        le=23,
        description="The hour that begins a new day; decay and eviction come at the end of the last hour before it.",
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
            raise problem(f"`start`: there is no hour {self.start} in `{self.timezone}`, its clock is set forward")
        if self.last is not None:
            if self.last < self.first:
                raise problem(f"`end`: expected {self.start} or later, got {self.end}")
            days = (self._date(self.last) - self._date(self.first)).days
            if days > MAX_SEEN:
                raise problem(f"`end`: expected at most {MAX_SEEN} days behind `start`, got {days}")
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
        """Whether the clock shows this hour: where it is set forward one is left out."""
        zone = _zone(self.timezone)
        shown = hour.replace(tzinfo=zone).astimezone(UTC).astimezone(zone)
        return shown.replace(tzinfo=None) == hour

    def after(self, hour: datetime) -> datetime:
        """The next hour. One that the clock shows twice is one directory."""
        following = hour + HOUR
        while not self.exists(following):
            following += HOUR
        return following

    def day_of(self, hour: datetime) -> int:
        """Data time: days since that of `start`, 0 and up, at most what a row can tell from later ones."""
        days = (self._date(hour) - self._date(self.first)).days
        return min(max(days, 0), MAX_SEEN)

    def ends_day(self, hour: datetime) -> bool:
        """Whether it is the last hour of a day."""
        return self._date(self.after(hour)) != self._date(hour)

    def _date(self, hour: datetime) -> date:
        return (hour - self.day_end_hour * HOUR).date()

    def directory(self, root: Path, hour: datetime) -> Path:
        """Where the files of an hour are."""
        return root / hour.strftime("%Y%m%d") / hour.strftime("%H")

    def done_file(self, root: Path, hour: datetime) -> Path:
        """The file that says that an hour is whole."""
        day, name = hour.strftime("%Y%m%d"), hour.strftime("%H")
        # `..` is of the path as it is written: the directory itself may not be there yet
        relative = self.done.replace("{day}", day).replace("{hour}", name)
        return Path(os.path.normpath(self.directory(root, hour) / relative))

    def is_done(self, root: Path, hour: datetime) -> bool:
        """Whether all of an hour is there."""
        return self.done_file(root, hour).exists()

    def found(self, root: Path, start: datetime) -> list[datetime]:
        """Hours from `start` on that are done, in order."""
        hours = []
        for day in sorted(_names(root, r"\d{8}")):
            if day >= start.strftime("%Y%m%d"):
                hours += [hour for name in _names(root / day, r"\d\d") if (hour := _hour_of(day, name)) is not None]
        last = self.last or datetime.max
        return sorted(hour for hour in hours if start <= hour <= last and self.is_done(root, hour))


def _names(directory: Path, pattern: str) -> list[str]:
    try:
        return [name for name in os.listdir(directory) if re.fullmatch(pattern, name)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _hour_of(day: str, name: str) -> datetime | None:
    try:
        return parse_hour(day + name)
    except ValueError:
        return None
