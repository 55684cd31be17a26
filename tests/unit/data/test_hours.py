"""Hourly data: the order of passes, waiting, and late or changed hours."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticrec.config.hours import Hours, parse_hour, show_hour
from elasticrec.coordinator.passes import Passes, PassPlan, Upkeep
from elasticrec.data.hours import HourPass, HourPlan, PlanCallbacks
from elasticrec.data.units import UnitSplit, read_units
from elasticrec.errors import ConfigError
from elasticrec.journal import Entry
from support.fake_roles import Clock
from support.small import MakeJob


class HourlyData:
    """A directory of hours, with plans that replay the decisions made so far."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = Clock()
        self.messages: list[str] = []
        self.decided: list[Entry] = []

    def write(self, hour: str, *names: str, done: str | None = "_SUCCESS") -> Path:
        directory = self.root / hour[:8] / hour[8:]
        directory.mkdir(parents=True, exist_ok=True)
        for name in names or ("a.txt",):
            (directory / name).write_text(f"1 0 {hour}:0\n")
        if done:
            (directory / done).touch()
        return directory

    def plan(self, **settings: Any) -> HourPlan:
        hours = Hours.model_validate({"start": "2026010100", **settings})
        plan = HourPlan(hours, self.root, PlanCallbacks(self.clock, self.messages.append, self.decided.append))
        for entry in self.decided:
            plan.replay(entry)
        return plan

    def begin_next(self, plan: HourPlan) -> tuple[str | None, str, int, bool] | None:
        found = plan.next_pass()
        if found is None:
            return None
        self.decided.append(found.entry())
        plan.replay(found.entry())
        return found.hour, found.why, found.day, found.ends_day


@pytest.fixture
def hourly(tmp_path: Path) -> HourlyData:
    return HourlyData(tmp_path / "logs")


def test_hours_are_trained_in_order_when_complete(hourly: HourlyData) -> None:
    hourly.write("2026010101")
    hourly.write("2026010100", done=None)
    plan = hourly.plan(end="2026-01-01T02", poll_s=10)
    assert hourly.begin_next(plan) is None
    assert hourly.messages == [f"waiting for hour 2026-01-01T00: {hourly.root}/20260101/00/_SUCCESS"]
    assert plan.waiting == hourly.messages[0]
    hourly.write("2026010100")
    assert hourly.begin_next(plan) is None, "the next poll is due in ten seconds"
    hourly.clock.now += 10
    assert hourly.begin_next(plan) == ("2026-01-01T00", "next", 0, False)
    assert plan.waiting is None
    assert hourly.begin_next(plan) == ("2026-01-01T01", "next", 0, False)
    for _ in range(3):
        hourly.clock.now += 10
        assert hourly.begin_next(plan) is None
    assert hourly.messages[1:] == [f"waiting for hour 2026-01-01T02: {hourly.root}/20260101/02/_SUCCESS"], (
        "reported once"
    )
    assert not plan.is_over
    hourly.write("2026010102")
    hourly.write("2026010103")
    hourly.clock.now += 10
    assert hourly.begin_next(plan) == ("2026-01-01T02", "next", 0, False)
    assert plan.is_over and hourly.begin_next(plan) is None


@pytest.mark.parametrize(
    ("done", "path"), [("../{hour}.done", "20260101/05.done"), ("ok-{day}", "20260101/05/ok-20260101")]
)
def test_the_done_file_may_be_in_another_directory(hourly: HourlyData, done: str, path: str) -> None:
    hourly.write("2026010105", done=None)
    plan = hourly.plan(start="20260101/05", done=done, poll_s=1)
    assert hourly.begin_next(plan) is None
    (hourly.root / path).touch()
    hourly.clock.now += 1
    assert hourly.begin_next(plan) == ("2026-01-01T05", "next", 0, False)


@pytest.mark.parametrize("late", ["skip", "train"])
def test_a_late_hour(hourly: HourlyData, late: str) -> None:
    """A later hour waits, then is trained first; `late` decides whether the late hour is trained, and is reported."""
    hourly.write("2026010100")
    hourly.write("2026010103")
    settings: dict[str, Any] = {"late_s": 100, "poll_s": 1, "late": late}
    plan = hourly.plan(**settings)
    assert hourly.begin_next(plan) == ("2026-01-01T00", "next", 0, False)
    assert hourly.begin_next(plan) is None
    hourly.clock.now += 99
    assert hourly.begin_next(plan) is None
    hourly.clock.now += 1
    assert hourly.begin_next(plan) == ("2026-01-01T03", "next", 0, False)
    assert hourly.decided[-1]["passed_over"] == ["2026-01-01T01", "2026-01-01T02"]
    assert (
        hourly.messages[-1]
        == "hour 2026-01-01T01 and 1 more did not arrive within 100 s: training hour 2026-01-01T03 first"
    )
    hourly.write("2026010102")
    # After a crash, a new plan makes the same decision.
    plan = hourly.plan(**settings)
    if late == "train":
        assert hourly.begin_next(plan) == ("2026-01-01T02", "late", 0, False)
        assert hourly.messages[-1] == "hour 2026-01-01T02 came late: training it now"
    else:
        assert hourly.begin_next(plan) is None
        assert "hour 2026-01-01T02 came late and is skipped (data.hours.late)" in hourly.messages
        assert (hourly.decided[-1]["skipped"], hourly.decided[-1]["why"]) == ("2026-01-01T02", "late")
    num_messages = len(hourly.messages)
    for one in (plan, hourly.plan(**settings)):
        hourly.clock.now += 1
        assert hourly.begin_next(one) is None, "the late hour is already decided"
    assert not any("2026-01-01T02" in line for line in hourly.messages[num_messages:])
    hourly.write("2026010104")
    hourly.clock.now += 1
    assert hourly.begin_next(plan) == ("2026-01-01T04", "next", 0, False)


@pytest.mark.parametrize("changed", ["skip", "train"])
def test_a_changed_hour(hourly: HourlyData, changed: str) -> None:
    directory = hourly.write("2026010100")
    plan = hourly.plan(changed=changed, poll_s=1)
    assert hourly.begin_next(plan) == ("2026-01-01T00", "next", 0, False)
    assert hourly.begin_next(plan) is None
    hourly.write("2026010100", "b.txt")
    hourly.clock.now += 1
    if changed == "train":
        assert hourly.begin_next(plan) == ("2026-01-01T00", "changed", 0, False)
        assert [path.name for path in plan.files(HourPass("2026-01-01T00", "changed", 0, False, ""))] == [
            "a.txt",
            "b.txt",
        ]
    else:
        assert hourly.begin_next(plan) is None
        assert (
            hourly.messages[-1]
            == "hour 2026-01-01T00 changed after its pass began; the change is skipped (data.hours.changed)"
        )
    hourly.clock.now += 1
    assert hourly.begin_next(hourly.plan(changed=changed)) is None, "the current files are known"
    os.utime(directory / "a.txt", ns=(1, 1))
    (directory / "_SUCCESS").unlink()
    hourly.clock.now += 1
    assert hourly.begin_next(plan) is None and len(hourly.decided) == 2, "the hour is incomplete while it is written"
    for path in directory.iterdir():
        path.unlink()
    (directory / "_SUCCESS").touch()
    hourly.clock.now += 1
    assert hourly.begin_next(plan) is None and len(hourly.decided) == 2, "removed files are not a change"


def test_days_end_with_their_last_hour(hourly: HourlyData) -> None:
    for hour in ("2026010122", "2026010123", "2026010200"):
        hourly.write(hour)
    plan = hourly.plan(start="2026010122")
    assert [hourly.begin_next(plan) for _ in range(3)] == [
        ("2026-01-01T22", "next", 0, False),
        ("2026-01-01T23", "next", 0, True),
        ("2026-01-02T00", "next", 1, False),
    ]
    hourly.decided.clear()
    plan = hourly.plan(start="2026010122", day_end_hour=23)
    assert [hourly.begin_next(plan) for _ in range(3)] == [
        ("2026-01-01T22", "next", 0, True),
        ("2026-01-01T23", "next", 1, False),
        ("2026-01-02T00", "next", 1, False),
    ]


def test_a_day_ends_once_even_without_its_last_hour(hourly: HourlyData) -> None:
    hourly.write("2026010122")
    hourly.write("2026010200")
    settings: dict[str, Any] = {"start": "2026010122", "late_s": 5, "poll_s": 1, "late": "train"}
    plan = hourly.plan(**settings)
    assert hourly.begin_next(plan) == ("2026-01-01T22", "next", 0, False)
    assert hourly.begin_next(plan) is None
    hourly.clock.now += 5
    assert hourly.begin_next(plan) == (None, "day_end", 0, True)
    # A crash here: the missing hour may come now, although its day has ended.
    after_crash = HourlyData(hourly.root)
    after_crash.decided = list(hourly.decided)
    hourly.write("2026010123")
    restored = after_crash.plan(**settings)
    assert after_crash.begin_next(restored) == ("2026-01-01T23", "next", 0, False)
    assert after_crash.begin_next(restored) == ("2026-01-02T00", "next", 1, False)


def test_a_late_hour_of_an_ended_day(hourly: HourlyData) -> None:
    hourly.write("2026010122")
    hourly.write("2026010200")
    plan = hourly.plan(start="2026010122", end="2026010200", late_s=0.5, poll_s=1, late="train")
    assert hourly.begin_next(plan) == ("2026-01-01T22", "next", 0, False)
    assert hourly.begin_next(plan) is None
    hourly.clock.now += 1
    assert hourly.begin_next(plan) == (None, "day_end", 0, True)
    assert hourly.begin_next(plan) is None, "the wait starts again, which is harmless"
    hourly.clock.now += 1
    assert hourly.begin_next(plan) == ("2026-01-02T00", "next", 1, False)
    hourly.write("2026010123")
    assert hourly.begin_next(plan) == ("2026-01-01T23", "late", 0, False), "in its own day, which does not end again"
    assert plan.is_over and hourly.begin_next(plan) is None


def test_hours_skipped_by_daylight_saving_time(hourly: HourlyData) -> None:
    hours = Hours(start="2026-03-29T01", timezone="Europe/Berlin")
    assert show_hour(hours.next_hour(parse_hour("2026-03-29T01"))) == "2026-03-29T03"
    assert show_hour(hours.next_hour(parse_hour("2026-10-25T02"))) == "2026-10-25T03", (
        "a repeated hour has one directory"
    )
    for hour in ("2026032901", "2026032903"):
        hourly.write(hour)
    plan = hourly.plan(start="2026032901", timezone="Europe/Berlin")
    assert hourly.begin_next(plan) == ("2026-03-29T01", "next", 0, False)
    assert hourly.begin_next(plan) == ("2026-03-29T03", "next", 0, False)


@pytest.mark.parametrize(
    ("hours", "message"),
    [
        ({"start": "2026-01-01"}, "data.hours.start: expected an hour such as `2026-01-01T00`, "),
        ({"start": 2026010124}, "data.hours.start: expected an hour such as"),
        ({"start": 2026010100, "end": 2025123123}, "`end`: expected 2026-01-01T00 or later, got 2025-12-31T23"),
        ({"start": 2026010100, "end": 2099010100}, "`end`: expected at most 16383 days after `start`, got 26663"),
        ({"start": 2026010100, "timezone": "Mars"}, "data.hours.timezone: expected a time zone such as `UTC`"),
        ({"start": 2026010100, "done": "{minute}"}, "data.hours.done: expected a path such as"),
        ({"start": 2026032902, "timezone": "Europe/Berlin"}, "2026-03-29T02 does not exist in `Europe/Berlin`"),
        ({"start": 2026010100, "day_end_hour": 24}, "data.hours.day_end_hour"),
    ],
)  # fmt: skip
def test_invalid_hours_are_refused(make_job: MakeJob, hours: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_job(data={"train": "logs", "hours": hours})
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"train": ["a", "b"]}}, "`train`: with `hours` expected one directory"),
        ({"data": {"train": "logs/*"}}, "`train`: with `hours` expected one directory"),
        ({"data": {"eval": {"ratio": 0.1}}}, "`eval`: with `hours` expected files"),
        ({"train": {"epochs": 2}}, "`train.epochs`: with `data.hours` expected 1, as each hour is read once, got 2"),
    ],
)
def test_settings_that_conflict_with_hours(make_job: MakeJob, sections: dict[str, Any], message: str) -> None:
    sections["data"] = {"train": "logs", "hours": {"start": 2026010100}, **sections.get("data", {})}
    with pytest.raises(ConfigError, match=message.replace("*", r"\*")):
        make_job(**sections)


def passes_of(hourly: HourlyData, journal: list[Entry], **settings: Any) -> Passes:
    hours = Hours.model_validate({"start": "2026010122", "poll_s": 1, **settings})
    make: Callable[[PlanCallbacks], HourPlan] = lambda callbacks: HourPlan(hours, hourly.root, callbacks)  # noqa: E731
    plan = PassPlan(lambda _: [], UnitSplit(4096, False, 1, "d"), 1, Upkeep(decay=0.5, max_age=3), hours=make)
    passes = Passes(
        hourly.root.parent / "units", plan, journal.append, PlanCallbacks(hourly.clock, hourly.messages.append)
    )
    for entry in list(journal):
        full = {"n": 0, "term": 1, **entry}
        passes.replay(full) if entry["kind"] == "pass" else passes.replay_hour(full)
    return passes


def test_every_decision_is_in_the_journal(hourly: HourlyData) -> None:
    journal: list[Entry] = []
    passes = passes_of(hourly, journal)
    assert passes.begin_next() is None and journal == []
    hourly.write("2026010122", "a.txt", "b.txt")
    hourly.write("2026010123")
    hourly.write("2026010200", "_hidden")
    hourly.clock.now += 1
    first, second = passes.begin_next(), passes.begin_next()
    assert first is not None and second is not None
    assert (first.first_unit, first.end_unit, second.end_unit) == (0, 2, 3)
    assert [first.boundary[key] for key in ("decay", "max_age", "now")] == [None, None, 0]
    assert [second.boundary[key] for key in ("decay", "max_age", "now")] == [0.5, 3, 0]
    empty = passes.begin_next()
    assert empty is not None and (empty.first_unit, empty.end_unit) == (3, 3), "an hour without data is an empty pass"
    assert [boundary["now"] for boundary in passes.boundaries] == [0, 0, 1]
    assert {unit.seen for unit in read_units(hourly.root.parent / "units/epoch-00001.jsonl")} == {0}
    hourly.write("2026010122", "c.txt")
    assert passes.begin_next() is None
    assert [entry["kind"] for entry in journal] == ["pass", "pass", "pass", "hour"]
    restored = passes_of(hourly, journal)
    assert (restored.begun, restored.skipped) == (passes.begun, passes.skipped)
    assert restored.begin_next() is None and len(journal) == 4
    hourly.write("2026010201")
    hourly.clock.now += 1
    third = restored.begin_next()
    assert third is not None and (third.number, third.first_unit) == (3, 3)
    assert restored.unit(2).path.endswith("20260101/23/a.txt") and restored.unit(3).seen == 1
