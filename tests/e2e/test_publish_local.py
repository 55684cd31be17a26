"""A training in one process that publishes: the online rows equal the trained ones, also after kills and restarts."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from elasticrec import _core
from elasticrec.repository.repository import Repository
from elasticrec.run import Run
from elasticrec.training.checkpoint import list_checkpoints
from support.harness import elasticrec, succeed
from support.online import check_version, rows_of_version
from support.store import Process, free_port

DEADLINE_S = 600
# A day and some hours.
NUM_HOURS = 27
HOURS = {"start": "2026-01-01T00", "end": "2026-01-02T02", "poll_s": 0.05}

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_job(publish: dict[str, Any], samples: int, hours: int, data: dict[str, Any], **train: Any) -> None:
    """Write a job on demo data; half of the rows that were shown once are evicted at the end of an epoch or day."""
    _core.write_demo(
        "data", samples=samples, slots=8, hours=hours, seed=1, format="slots", overwrite=True, threads=1, progress=None
    )
    for directory in Path("data").glob("*/*"):
        (directory / "_SUCCESS").touch()
    job = {
        "name": "tiny",
        "data": {"format": "slots", "slots": ["0-7"], **data},
        "model": {"kind": "wide_deep", "dim": 4, "hidden": [16, 8]},
        "sparse": {"partitions": 16, "decay": {"show_click": 0.5}, "evict": {"min_score": 0.1}},
        "train": {"batch_size": 128, "threads": 1, **train},
        "publish": {"gate": {"max_row_loss": 1}, "keep": 99, **publish},
    }
    Path("job.yaml").write_text(yaml.safe_dump(job))


def hourly(**checkpoint: Any) -> None:
    data = {"train": "data", "hours": HOURS}
    write_job({"every": "hour"}, samples=NUM_HOURS * 300, hours=NUM_HOURS, data=data, checkpoint=checkpoint)


def mark_complete(hours: int) -> None:
    """Mark the first hours as complete, and the others as incomplete."""
    for number, directory in enumerate(sorted(Path("data").glob("*/*"))):
        if number < hours:
            (directory / "_SUCCESS").touch()
        else:
            (directory / "_SUCCESS").unlink(missing_ok=True)


def local() -> Repository:
    return Repository.open("models", "tiny")


def run() -> Run:
    return Run(Path("runs/tiny"))


def kinds() -> str:
    """Return `B` for each base and `d` for each delta, oldest first."""
    return "".join("d" if local().version(number).is_delta else "B" for number in local().versions())


def epoch_of(number: int) -> int:
    epoch: int = local().version(number).manifest["data"]["epoch"]
    return epoch


def tables_of_deltas() -> list[dict[str, Any]]:
    found = [local().version(number) for number in local().versions()]
    return [version.manifest["table"] for version in found if version.is_delta]


def test_online_rows_equal_the_trained_rows(tmp_path: Path) -> None:
    write_job({"every": 0.5, "base_every": 2}, 240_000, 2, {"train": ["data/20260101/00"]}, epochs=4)
    succeed("train", "job.yaml", cwd=tmp_path)
    last = max(local().versions())
    check_version(local(), last, run())
    assert local().current() == last >= 2
    assert kinds() == ("Bdd" * last)[:last]
    assert any(0 < table["changed"] < table["rows"] for table in tables_of_deltas())
    for number in local().versions():
        rows_of_version(local(), number)
    Path("few.txt").write_bytes(b"".join(Path("data/20260101/01/part-00000.txt").read_bytes().splitlines(True)[:2000]))
    outputs = [
        succeed("predict", "few.txt", *source, cwd=tmp_path)
        for source in (("--model", "models/tiny"), ("--checkpoint", "tiny"))
    ]
    served, learned = ([float(line) for line in text.splitlines()] for text in outputs)
    assert len(served) == 2000 and np.std(served) > 0.01
    np.testing.assert_allclose(served, learned, atol=1e-5)


# Fail points: the process dies at each, at these counts of publishes since its start.
POINTS = {"version": (2, 1, 3), "version-written": (1, 2)}


def test_a_training_may_die_at_any_point_of_a_publish(tmp_path: Path) -> None:
    """Before and after the manifest, of bases and of deltas."""
    hourly(keep_epochs=True)
    points = tmp_path / "points"
    points.mkdir()
    for name, counts in POINTS.items():
        for at, count in enumerate(counts):
            (points / f"{name}.{at}").write_text(str(count))
    for _ in range(5):
        died = elasticrec("train", "job.yaml", cwd=tmp_path, env={"ELASTICREC_FAIL_POINTS": str(points)})
        assert died.returncode == -signal.SIGKILL, died.stderr
    assert not list(points.iterdir()), "the training died at each point"
    succeed("train", "job.yaml", cwd=tmp_path)
    # The first process left no version, the others all but the one that died before its manifest.
    assert kinds() == "B" + "B" + "Bd" + "Bd" + "B" + "d" * (NUM_HOURS - 10)
    checkpoints = {one.progress.epoch: one for one in list_checkpoints(run()) if not one.progress.batches}
    online = [check_version(local(), number, run(), checkpoints[epoch_of(number)]) for number in local().versions()]
    assert sum(table["removed"] for table in tables_of_deltas()) > 20, "rows were evicted at the end of the day"
    assert set(online[-5]) - set(online[-1])
    assert (local().current(), epoch_of(max(local().versions()))) == (max(local().versions()), NUM_HOURS)


def test_kill_9_and_resume_from_an_older_checkpoint(tmp_path: Path) -> None:
    """The online version has rows that the resumed training lacks: the next version must not have them."""
    hourly(every_epochs=6, keep=2)
    last = 0
    for _ in range(2):
        # Two hours after the next checkpoint; the training waits there for the kill.
        wanted = last // 6 * 6 + 8
        mark_complete(wanted + 1)
        command = [sys.executable, "-m", "elasticrec.cli", "train", "job.yaml"]
        with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
            deadline = time.monotonic() + DEADLINE_S
            while not (versions := local().versions()) or epoch_of(versions[-1]) < wanted:
                assert process.poll() is None, process.stderr.read() if process.stderr else ""
                assert time.monotonic() < deadline
                time.sleep(0.002)
            process.kill()
        last = epoch_of(max(local().versions()))
    mark_complete(NUM_HOURS)
    result = elasticrec("train", "job.yaml", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert kinds().count("B") == 3
    by_epoch: dict[int, Any] = {}
    before = 0
    for number in local().versions():
        epoch, rows = epoch_of(number), rows_of_version(local(), number)
        assert by_epoch.setdefault(epoch, rows) == rows, "the same hours produce the same rows"
        assert local().version(number).is_delta == (epoch == before + 1) or number == 1
        before = epoch
    assert len(local().versions()) > len(by_epoch) == NUM_HOURS, "some hours were trained and published twice"
    check_version(local(), max(local().versions()), run())


def train() -> str:
    """Train, and return the progress lines."""
    result = elasticrec("train", "job.yaml", cwd=Path())
    assert result.returncode == 0, result.stderr
    return str(result.stderr)


def test_versions_reach_the_store_of_the_job() -> None:
    port = free_port()
    write_job({"every": "epoch"}, samples=3000, hours=1, data={"train": "data/*/*/part-*"}, epochs=3)
    job = yaml.safe_load(Path("job.yaml").read_text())
    job["cube"] = {"addresses": [[f"127.0.0.1:{port}"]], "poll_s": 0.1}
    Path("job.yaml").write_text(yaml.safe_dump(job))
    node = Process(["cube", "serve", "job.yaml", "--port", str(port), "--http-port", "0"], Path(), Path("node.log"))
    try:
        output = train()
        assert local().versions() == [1, 2, 3] and local().current() == 3, output
        assert "not offered: the store must load it first" in output and "store: switched to 3" in output
        client = _core.CubeClient("tiny", [[f"127.0.0.1:{port}"]], token="", deadline_s=60.0)
        expected = rows_of_version(local(), 3)
        rows, is_there = client.get(3, np.array(list(expected), np.uint64))
        assert is_there.all() and [row.tobytes() for row in rows] == list(expected.values())
    finally:
        node.kill()


def test_an_unreachable_store_does_not_block_the_training() -> None:
    write_job({"every": "epoch"}, samples=1000, hours=1, data={"train": "data/*/*/part-*"}, epochs=1)
    job = yaml.safe_load(Path("job.yaml").read_text())
    job["cube"] = {"addresses": [[f"127.0.0.1:{free_port()}"]]}
    Path("job.yaml").write_text(yaml.safe_dump(job))
    started = time.monotonic()
    output = train()
    assert "store: the last version is not offered yet: `elasticrec deliver` continues the rollout" in output
    assert local().versions() == [1] and local().current() is None
    assert time.monotonic() - started < 120
