"""Hours arrive while trainers and servers work and die; the audit recounts them, with decay at the end of the day."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.cluster import TIMEOUT_S, Training, wait_for_end
from support.harness import succeed
from support.small import sample_lines

SETTINGS = ("train.servers=2", "train.trainers=2", "train.ps.lease_s=2", "train.ps.heartbeat_s=0.3")


class HourlyRun:
    """A run over hours, and the directory in which they appear."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.started = directory, list[Training]()
        job: dict[str, Any] = {
            "name": "online",
            "data": {
                "format": "slots",
                "train": "logs",
                "eval": "eval.txt",
                "slots": "0-2",
                "unit_bytes": 16384,
                "on_missing": "skip",
                "hours": {"start": 2026010122, "end": 2026010201, "poll_s": 0.1},
            },
            "model": {"kind": "wide_deep", "dim": 4, "hidden": [8]},
            "sparse": {"partitions": 8, "decay": {"show_click": 0.7}, "evict": {"min_score": 0.3, "max_age": 1}},
            "train": {"mode": "ps", "threads": 1, "batch_size": 32, "print_every_s": 0.2},
        }
        (directory / "job.yaml").write_text(yaml.safe_dump(job))
        (directory / "eval.txt").write_text("".join(f"{line}\n" for line in sample_lines(300, 7)))

    def write(self, hour: str, files: int = 4) -> Path:
        directory = self.directory / "logs" / hour[:8] / hour[8:]
        directory.mkdir(parents=True)
        for number in range(files):
            lines = sample_lines(2000, int(hour) + number)
            (directory / f"part-{number}.txt").write_text("".join(f"{line}\n" for line in lines))
        (directory / "_SUCCESS").touch()
        return directory

    def start(self, *settings: str) -> Training:
        training = Training.start(self.directory, *SETTINGS, *settings)
        self.started.append(training)
        return training


@pytest.fixture
def online(tmp_path: Path) -> Iterator[HourlyRun]:
    run = HourlyRun(tmp_path)
    yield run
    for training in run.started:
        training.stop()


def kill(training: Training, role: str) -> None:
    (process, _), *_ = training.roles(role)
    training.send(process, signal.SIGKILL)


@pytest.mark.slow
def test_every_hour_is_trained_once_despite_kills(online: HourlyRun) -> None:
    online.write("2026010122")
    training = online.start()
    training.wait_for("waiting for hour 2026-01-01T23: ")
    kill(training, "coordinator")
    online.write("2026010123", files=12)
    # The day ends with this hour; a server is restored in the middle of it.
    training.wait_for(r"pass 2 2026-01-01T23 +[1-9].*units (9|[1-9]\d) of")
    kill(training, "ps")
    training.wait_for("waiting for hour 2026-01-02T00: ")
    # A file is removed before a trainer can read it.
    trainers = [process for process, _ in training.roles("trainer")]
    for process in trainers:
        training.send(process, signal.SIGSTOP)
    gone = online.write("2026010200") / "part-3.txt"
    training.wait_for("pass 3 2026-01-02T00")
    gone.unlink()
    for process in trainers:
        training.send(process, signal.SIGCONT)
    training.wait_for("waiting for hour 2026-01-02T01: ")
    assert f" bytes from 0 on (data.on_missing): {gone}: no such file or directory\n" in training.output()
    # Kill all processes, then run the same command again.
    roles = [process for process, _ in training.roles()]
    training.process.kill()
    training.process.wait()
    wait_for_end(roles)
    online.write("2026010201")
    output = online.start().finish()
    assert "trained runs/online: 46,000 samples" in output
    audit = succeed("audit", "online", cwd=online.directory)
    assert re.search(r" 4 passes, 46,000 samples, \d+ signs: nothing differs\n$", audit), audit
    assert "were lost before they were read and are not counted" in audit
    run = online.directory / "runs/online"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    passes = [(one["pass"], one["hour"], one["records"]) for one in records if one["event"] == "pass"]
    assert [one[:2] for one in passes] == [
        (1, "2026-01-01T22"),
        (2, "2026-01-01T23"),
        (3, "2026-01-02T00"),
        (4, "2026-01-02T01"),
    ]
    assert [one[2] for one in passes] == [8000, 24000, 6000, 8000]
    # Evaluations run beside the training, with the checkpoint of a pass.
    evaluated = [one for one in records if one["event"] == "evaluation" and "pass" in one]
    assert evaluated and all(one["eval"][0]["samples"] == 300 and one["hour"] for one in evaluated)
    manifest = json.loads((max(run.glob("checkpoints/ps-*")) / "manifest.json").read_text())
    assert [one["hour"]["hour"] for one in manifest["passes"]] == [one[1] for one in passes]
    assert [boundary["decay"] for boundary in manifest["boundaries"]] == [None, 0.7, None, None]
    assert {entry["path"] for entry in manifest["missing"]} == {str(gone)}


@pytest.mark.slow
def test_a_file_that_vanishes_ends_the_run_with_one_error_line(online: HourlyRun) -> None:
    training = online.start("data.on_missing=fail", "data.hours.end=2026010122", "train.trainers=1", "train.servers=1")
    training.wait_for("trainers 1/1, servers 1/1")
    (process, _), *_ = training.roles("trainer")
    training.send(process, signal.SIGSTOP)
    gone = online.write("2026010122", files=1) / "part-0.txt"
    training.wait_for("pass 1 2026-01-01T22")
    gone.unlink()
    training.send(process, signal.SIGCONT)
    assert training.process.wait(TIMEOUT_S) == 2, training.output()
    last = training.output().strip().splitlines()[-1]
    assert last == f"error: {gone}: no such file or directory"
