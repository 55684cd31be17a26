"""Training on hours in one process: hours arrive during the run, runs resume, files vanish; the audit is exact."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from elasticrec.audit.audit import Audit, audit_run
from elasticrec.config import Job
from elasticrec.errors import SampleError
from elasticrec.run import Run
from elasticrec.training import loop
from elasticrec.training.checkpoint import latest
from elasticrec.training.event import Event
from elasticrec.training.loop import train_job
from support.small import MakeJob, sample_lines

HOURS = ("2026010122", "2026010123", "2026010200", "2026010201")


def write_hour(root: Path, hour: str, count: int = 300) -> Path:
    directory = root / "logs" / hour[:8] / hour[8:]
    directory.mkdir(parents=True, exist_ok=True)
    for at, name in enumerate(("a.txt", "b.txt")):
        (directory / name).write_text("".join(f"{line}\n" for line in sample_lines(count, int(hour) + at)))
    (directory / "_SUCCESS").touch()
    return directory


@pytest.fixture
def hourly(make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def make(name: str = "small", on_missing: str = "fail", **hours: Any) -> Job:
        settings = {"start": HOURS[0], "end": HOURS[-1], "poll_s": 0.01, **hours}
        return make_job(
            name=name,
            data={"train": "logs", "hours": settings, "on_missing": on_missing, "unit_bytes": 4096},
            sparse={"decay": {"show_click": 0.7}, "evict": {"min_score": 0.3, "max_age": 1}},
            train={"print_every_s": 1e-6},
        )

    return make


def audited(name: str = "small") -> Audit:
    found = audit_run(Run(Path("runs") / name))
    assert not found.differs, found.lines()
    return found


def test_hours_that_arrive_during_the_training(hourly: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_hour(tmp_path, HOURS[0])
    hours = []

    def write_the_next(event: Event) -> None:
        if event.kind == "pass":
            hours.append(event.values["hour"])
            if len(hours) < len(HOURS):
                write_hour(tmp_path, HOURS[len(hours)])

    summary = train_job(hourly(), callback=write_the_next)
    assert summary.progress.samples == 2400 and summary.progress.finished
    assert hours == ["2026-01-01T22", "2026-01-01T23", "2026-01-02T00", "2026-01-02T01"]
    records = [json.loads(line) for line in Path("runs/small/metrics.jsonl").read_text().splitlines()]
    passes = [record for record in records if record["event"] == "pass"]
    assert [(one["pass"], one["hour"]) for one in passes] == list(enumerate(hours, 1))
    assert all(one["train"][0]["samples"] == 600 and one["train"][0]["auc"] > 0.4 for one in passes)
    assert "pass 2 2026-01-01T23 click: train loss" in capsys.readouterr().err
    found = audited()
    assert (found.num_passes, found.num_samples) == (4, 2400)
    checkpoint = latest(Run(Path("runs/small")))
    assert checkpoint is not None
    found_hours = [(one["hour"], one["day"], one["ends_day"]) for one in checkpoint.manifest["hours"]]
    assert found_hours == [(hours[0], 0, False), (hours[1], 0, True), (hours[2], 1, False), (hours[3], 1, False)]
    # a finished run trains nothing; a later `end` continues it
    assert train_job(hourly()).progress.samples == 2400
    write_hour(tmp_path, "2026010202")
    assert train_job(hourly(end="2026010202")).progress.samples == 3000
    audited()


def test_hours_resume_at_the_same_position(hourly: Any, tmp_path: Path) -> None:
    """Stops inside a pass, between passes and while waiting for an hour do not change the final bits."""
    for hour in HOURS[:3]:
        write_hour(tmp_path, hour)
    events = 0

    def stop_every_ninth(event: Event) -> bool:
        nonlocal events
        events += 1
        return events % 9 != 0

    num_starts = 0
    progress = None
    while progress is None or progress.epoch < 3:
        num_starts += 1
        progress = train_job(hourly(end=HOURS[2]), callback=stop_every_ninth).progress
        assert num_starts < 50
    assert num_starts > 4
    train_job(hourly("whole", end=HOURS[2]))
    tables = [latest(Run(Path("runs") / name)) for name in ("small", "whole")]
    contents = [(one.path / "table/part-00000").read_bytes() for one in tables if one is not None]
    assert contents[0] == contents[1]
    audited()


def test_a_pass_stopped_before_its_first_batch_is_repeated(hourly: Any, tmp_path: Path) -> None:
    for hour in HOURS[:3]:
        write_hour(tmp_path, hour)
    job = hourly(end=HOURS[2])
    epochs = [train_job(job, callback=lambda event: event.kind != "pass").progress.epoch for _ in range(3)]
    assert epochs == [1, 2, 3]
    assert train_job(job).progress.samples == 1800
    assert audited().num_passes == 3


@pytest.mark.parametrize("changed", ["skip", "train"])
def test_an_hour_that_gets_another_file(hourly: Any, tmp_path: Path, changed: str) -> None:
    first = write_hour(tmp_path, HOURS[0])

    def add_a_file(event: Event) -> None:
        if event.kind == "pass" and event.values["hour"] == "2026-01-01T22" and not (first / "c.txt").exists():
            shutil.copy(first / "a.txt", first / "c.txt")
            write_hour(tmp_path, HOURS[1])

    job = hourly(end=HOURS[1], changed=changed)
    summary = train_job(job, callback=add_a_file)
    # with `train`, the whole hour is trained once more
    assert summary.progress.samples == (1200 if changed == "skip" else 2100)
    assert audited().num_samples == summary.progress.samples


def vanish(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Remove a file after its units are recorded and before they are read."""
    read = loop.open_batches

    def open_batches(job: Any, parser: Any, units: Any, **more: Any) -> Any:
        if any(unit.path == str(path) for unit in units):
            path.unlink(missing_ok=True)
        return read(job, parser, units, **more)

    monkeypatch.setattr(loop, "open_batches", open_batches)


def test_vanished_files_end_the_training(hourly: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for hour in HOURS:
        path = write_hour(tmp_path, hour)
    vanish(monkeypatch, path / "b.txt")
    content = (path / "b.txt").read_bytes()
    with pytest.raises((FileNotFoundError, SampleError), match=r"20260102/01/b.txt"):
        train_job(hourly())
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    (path / "b.txt").write_bytes(content)
    assert train_job(hourly()).progress.samples == 2400
    audited()


def test_vanished_files_are_skipped_and_named(
    hourly: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = next(write_hour(tmp_path, hour) for hour in HOURS)
    for hour in HOURS[1:]:
        write_hour(tmp_path, hour)
    vanish(monkeypatch, path / "b.txt")
    summary = train_job(hourly(on_missing="skip"))
    assert summary.progress.samples == 2100
    lost = [line for line in capsys.readouterr().err.splitlines() if "is lost" in line]
    assert len(lost) == len(summary.progress.missing) > 1
    assert re.match(rf"unit \d+ is lost, [\d,]+ bytes from [\d,]+ on \(data.on_missing\): {path}/b.txt", lost[0])
    found = audited()
    assert found.num_samples == 2100
    assert any("were lost before they were read and are not counted" in note for note in found.notes)
