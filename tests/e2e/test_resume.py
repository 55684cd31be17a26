"""A training that is killed at any moment resumes and ends with the same bits as an undisturbed one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.harness import elasticrec, succeed, write_job

DEADLINE_S = 600
# About 250 batches with frequent checkpoints, so that a kill may come a little late.
TRAIN = {"train__epochs": 8, "train__batch_size": 64, "train__checkpoint": {"every_steps": 5, "keep": 3}}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the data, the job, and an undisturbed run."""
    directory = tmp_path_factory.mktemp("whole")
    write_job(directory, format="slots", kind="wide_deep", **TRAIN)
    succeed("train", "job.yaml", cwd=directory)
    return directory


@pytest.fixture
def unfinished(whole: Path) -> Path:
    """Return the job file of a second run over the same data."""
    name = f"other{len(list(whole.glob('other*.yaml')))}"
    path = whole / f"{name}.yaml"
    path.write_text((whole / "job.yaml").read_text().replace("name: tiny", f"name: {name}"))
    return path


def checkpoints(job: Path) -> Path:
    return job.parent / "runs" / (job.stem if job.stem != "job" else "tiny") / "checkpoints"


def complete(job: Path) -> list[str]:
    return sorted(path.parent.name for path in checkpoints(job).glob("step-*/manifest.json"))


def incomplete(job: Path) -> list[str]:
    return sorted(path.name for path in checkpoints(job).glob("step-*") if not (path / "manifest.json").exists())


def steps_of(name: str) -> int:
    """Return the step of a name: 120 for `step-000000000120` and `step-000000000120.1`."""
    return int(name.removeprefix("step-").partition(".")[0])


def final_state(job: Path) -> dict[str, bytes]:
    path = checkpoints(job) / complete(job)[-1]
    return {name: (path / name).read_bytes() for name in ("table/part-00000", "dense.bin", "metrics.npz")}


def start(job: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "elasticrec.cli", "train", job.name],
        cwd=job.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def kill_when(process: subprocess.Popen[str], number: signal.Signals, moment: Callable[[], bool]) -> tuple[str, str]:
    """Send the signal to the running process when a condition holds; return its output."""
    deadline = time.monotonic() + DEADLINE_S
    with process:
        while not moment():
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            assert time.monotonic() < deadline
            time.sleep(0.001)
        os.kill(process.pid, number)
        return process.communicate(timeout=DEADLINE_S)


def more_than(job: Path, last: str, count: int) -> Callable[[], bool]:
    """Return the condition that a run has written `count` more checkpoints of 5 steps."""
    steps = steps_of(last) if last else 0
    return lambda: bool(names := complete(job)) and steps_of(names[-1]) >= steps + 5 * count


def finish(job: Path) -> None:
    before = complete(job)[-1]
    result = elasticrec("train", job.name, cwd=job.parent)
    assert result.returncode == 0, result.stderr
    assert f"resuming runs/{job.stem} from {before}: " in result.stderr
    # Unfinished files of the kills are removed.
    assert incomplete(job) == []
    assert len(complete(job)) == 3


def test_kill_9_at_any_moment(whole: Path, unfinished: Path) -> None:
    for count in (1, 4, 2):
        last = complete(unfinished)[-1] if complete(unfinished) else ""
        process = start(unfinished)
        kill_when(process, signal.SIGKILL, more_than(unfinished, last, count))
        assert process.returncode == -signal.SIGKILL
        assert complete(unfinished)[-1] != last
    finish(unfinished)
    assert final_state(unfinished) == final_state(whole / "job.yaml")


def test_kill_9_while_a_checkpoint_is_written(whole: Path, unfinished: Path) -> None:
    def writing() -> bool:
        return len(complete(unfinished)) >= 2 and bool(incomplete(unfinished))

    for _ in range(20):
        kill_when(start(unfinished), signal.SIGKILL, writing)
        # The manifest may have been written between the check and the kill.
        if incomplete(unfinished):
            break
    assert incomplete(unfinished)
    finish(unfinished)
    assert final_state(unfinished) == final_state(whole / "job.yaml")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_prints_how_to_resume(whole: Path, unfinished: Path, number: signal.Signals) -> None:
    process = start(unfinished)
    output, errors = kill_when(process, number, more_than(unfinished, "", 2))
    assert process.returncode == 130
    assert output == ""
    assert "Traceback" not in errors
    steps = steps_of(complete(unfinished)[-1])
    assert errors.splitlines()[-1] == f"stopped and saved; run the same command to continue from step {steps}"
    finish(unfinished)
    assert final_state(unfinished) == final_state(whole / "job.yaml")


def test_kill_9_before_the_first_checkpoint(whole: Path, unfinished: Path) -> None:
    process = start(unfinished)
    units = checkpoints(unfinished).parent / "units"
    kill_when(process, signal.SIGKILL, lambda: units.is_dir())
    succeed("train", unfinished.name, cwd=whole)
    assert final_state(unfinished) == final_state(whole / "job.yaml")


def test_a_second_signal_ends_the_training_immediately(unfinished: Path) -> None:
    process = start(unfinished)

    def interrupt_first() -> bool:
        if not more_than(unfinished, "", 1)():
            return False
        os.kill(process.pid, signal.SIGINT)
        return True

    _, errors = kill_when(process, signal.SIGINT, interrupt_first)
    assert process.returncode == 130
    assert "Traceback" not in errors
