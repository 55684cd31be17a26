"""What a training says of itself."""

import io
import json
from pathlib import Path

import pytest

from elasticrec.run import Run
from elasticrec.training.checkpoint import Progress
from elasticrec.training.clock import StageClock
from elasticrec.training.metrics import Metrics
from elasticrec.training.report import Reporter, Summary, describe, summary_lines
from small import MakeJob

GOOD = Metrics(samples=10, auc=0.79041, log_loss=0.43119, copc=1.0149)
NONE = Metrics(samples=0, auc=None, log_loss=None, copc=None)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_metrics_in_words() -> None:
    assert describe(GOOD) == "loss 0.4312 auc 0.7904 copc 1.01"
    assert describe(NONE) == "loss - auc - copc -"


def test_a_log_has_a_line_a_report(tmp_path: Path) -> None:
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


def test_a_terminal_has_one_line_that_is_written_over(tmp_path: Path) -> None:
    stream = Terminal()
    reporter = Reporter(None, every_s=1.0, stream=stream)
    reporter.progress("10%", {})
    reporter.progress("20%", {})
    reporter.say("epoch done")
    reporter.progress("30%", {})
    reporter.close()
    assert stream.getvalue() == "\r\x1b[2K10%\r\x1b[2K20%\nepoch done\n\r\x1b[2K30%\n"


def test_a_line_is_due_after_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("elasticrec.training.report.time.monotonic", lambda: now)
    reporter = Reporter(None, every_s=2.0, stream=io.StringIO())
    assert not reporter.due()
    now = 102.0
    assert reporter.due()
    reporter.progress("", {})
    assert not reporter.due()


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
    )
    assert summary_lines(summary) == [
        "trained runs/small: 12,345 samples, 6,789 rows, 1,234 samples/s",
        f"  click: train {describe(GOOD)} | eval {describe(GOOD)}",
        f"  buy: train {describe(NONE)} | eval {describe(NONE)}",
        "  bad records: 5 of 12,350",
        "  batches with a gradient that was not finite, counted but not applied: 2",
        "  time: wait 50%, pull 25%",
    ]


def test_the_clock_adds_up_stages_also_those_that_fail() -> None:
    clock = StageClock()
    for _ in range(2):
        with clock.stage("pull"):
            pass
    with pytest.raises(KeyError), clock.stage("push"):
        raise KeyError
    assert set(clock.seconds) == {"pull", "push"}
    assert 0 < sum(clock.seconds.values()) <= clock.elapsed
    assert all(0 < share < 1 for share in clock.shares().values())
