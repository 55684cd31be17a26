"""The reports of a training: log lines, the progress line and the summary."""

import io
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from elasticrec.run import Run
from elasticrec.training.checkpoint import Progress
from elasticrec.training.clock import StageClock
from elasticrec.training.metrics import Metrics
from elasticrec.training.report import Reporter, Summary, describe, summary_lines
from support.small import MakeJob

GOOD = Metrics(samples=10, auc=0.79041, log_loss=0.43119, copc=1.0149)
NONE = Metrics(samples=0, auc=None, log_loss=None, copc=None)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_description_of_metrics() -> None:
    assert describe(GOOD) == "loss 0.4312 auc 0.7904 copc 1.01"
    assert describe(NONE) == "loss - auc - copc -"
    assert describe(replace(GOOD, own={"mse": 0.25})) == "loss 0.4312 auc 0.7904 copc 1.01 mse 0.2500"


def test_a_log_has_one_line_per_report(tmp_path: Path) -> None:
    stream, path = io.StringIO(), tmp_path / "metrics.jsonl"
    for number in (1, 2):
        reporter = Reporter(path, every_s=1.0, stream=stream)
        reporter.progress("10%", {"steps": 1})
        reporter.say("epoch done")
        reporter.record({"epoch": number})
        reporter.close()
    assert stream.getvalue() == "10%\nepoch done\n" * 2
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record.get("epoch") for record in records] == [None, 1, None, 2]
    assert all(record["time"] > 1e9 for record in records)


def test_a_terminal_shows_one_line_that_is_overwritten(tmp_path: Path) -> None:
    stream = Terminal()
    reporter = Reporter(None, every_s=1.0, stream=stream)
    reporter.progress("10%", {})
    reporter.progress("20%", {})
    reporter.say("epoch done")
    reporter.progress("30%", {})
    reporter.close()
    assert stream.getvalue() == "\r\x1b[2K10%\r\x1b[2K20%\nepoch done\n\r\x1b[2K30%\n"


def test_a_line_of_another_thread_does_not_land_in_a_progress_line() -> None:
    thread = threading.Thread(target=lambda: reporter.say("log line"))

    class BusyTerminal(Terminal):
        def write(self, text: str) -> int:
            length = super().write(text)
            if "10%" in text:
                # the thread would write now if the reporter did not make it wait
                thread.start()
                thread.join(0.1)
            return length

    stream = BusyTerminal()
    reporter = Reporter(None, every_s=1.0, stream=stream)
    reporter.progress("10%", {})
    thread.join()
    assert stream.getvalue() == "\r\x1b[2K10%\nlog line\n"


def test_lines_are_cut_to_the_width_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    reporter = Reporter(None, every_s=1.0, stream=stream)
    reporter.progress("0123456789" * 5, {})
    assert stream.getvalue() == "\r\x1b[2K0123456789012345678"


def test_a_record_after_a_truncated_line_starts_a_new_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"steps": 1}\n{"st')
    reporter = Reporter(path, every_s=1.0, stream=io.StringIO())
    reporter.record({"steps": 2})
    reporter.close()
    lines = path.read_text().splitlines()
    assert lines[:2] == ['{"steps": 1}', '{"st']
    assert json.loads(lines[2])["steps"] == 2


def test_a_progress_line_is_due_after_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("elasticrec.training.report.time.monotonic", lambda: now)
    reporter = Reporter(None, every_s=2.0, stream=io.StringIO())
    assert not reporter.is_due()
    now = 102.0
    assert reporter.is_due()
    reporter.progress("", {})
    assert not reporter.is_due()


def test_the_summary(make_job: MakeJob) -> None:
    progress = Progress(epoch=1, unit=4, batches=0, steps=20, samples=12345, records=12350, bad_records=5, non_finite=2)
    summary = Summary(
        run=Run.of(make_job()),
        progress=progress,
        train={"click": GOOD, "buy": NONE},
        evaluation={"click": GOOD, "buy": NONE},
        rows=6789,
        samples_per_s=1234.5,
        shares={"pull": 0.25, "wait": 0.5, "save": 0.001},
        read=0.1,
        parse=0.8,
        bottleneck="waiting for data 50 %: raise `data.workers` (1 for 2 cores)",
    )
    assert summary_lines(summary) == [
        "trained runs/small: 12,345 samples, 6,789 rows, 1,234 samples/s",
        f"  click: train {describe(GOOD)} | eval {describe(GOOD)}",
        f"  buy: train {describe(NONE)} | eval {describe(NONE)}",
        "  bad records: 5 of 12,350",
        "  batches with a non-finite gradient, counted but not applied: 2",
        "  time: wait 50%, pull 25%; reader threads: read 10%, parse 80%",
        "  waiting for data 50 %: raise `data.workers` (1 for 2 cores)",
    ]


def test_the_clock_sums_stages_including_failed_ones() -> None:
    clock = StageClock()
    for _ in range(2):
        with clock.stage("pull"):
            pass
    with pytest.raises(KeyError), clock.stage("push"):
        raise KeyError
    assert set(clock.seconds) == {"pull", "push"}
    assert 0 < sum(clock.seconds.values()) <= clock.elapsed
    assert all(0 < share < 1 for share in clock.shares().values())


def test_a_lap_covers_the_time_since_the_previous_lap(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("elasticrec.training.clock.time.perf_counter", lambda: now)
    clock = StageClock()
    with clock.stage("pull"):
        now = 1.0
    now = 4.0
    assert clock.lap() == {"pull": 0.25}
    with clock.stage("push"):
        now = 6.0
    assert clock.lap() == {"pull": 0.0, "push": 1.0}
    assert clock.shares() == {"pull": 1 / 6, "push": 2 / 6}
