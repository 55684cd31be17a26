"""Full and damaged disks: one error line, exit code 2, and the previous checkpoint stays valid."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticrec import api, cli
from support.disks import small_file_system
from support.harness import elasticrec, succeed, write_job

pytestmark = pytest.mark.slow


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 4 MB."""
    with small_file_system(tmp_path / "disk", "4m") as path:
        yield path


def newest(directory: Path) -> Path:
    return sorted((directory / "runs/tiny/checkpoints").glob("step-*/manifest.json"))[-1].parent


def state(directory: Path) -> dict[str, bytes]:
    return {name: (newest(directory) / name).read_bytes() for name in ("table/part-00000", "dense.bin")}


def error_of(result: Any) -> str:
    """Return the error line of a failed command."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert errors == result.stderr.splitlines()[-1:], result.stderr
    return str(errors[0].removeprefix("error: "))


def fill(disk: Path, leave: int) -> Path:
    """Write a file that leaves only `leave` bytes free."""
    path = disk / "filler"
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    path.write_bytes(bytes(free - leave))
    return path


def test_a_full_disk(tmp_path: Path, small_disk: Path) -> None:
    for directory in (tmp_path, small_disk):
        write_job(directory, format="slots", kind="dnn", samples=2000)
    succeed("train", "job.yaml", "--set", "train.epochs=2", cwd=tmp_path)
    succeed("train", "job.yaml", cwd=small_disk)
    before = newest(small_disk)
    size = sum(file.stat().st_size for file in before.rglob("*") if file.is_file())

    names = sorted(path.name for path in before.parent.iterdir())

    # Space for the job and the units, but not for another table.
    filler = fill(small_disk, leave=size // 2)
    result = elasticrec("train", "job.yaml", "--set", "train.epochs=2", cwd=small_disk)
    assert error_of(result).endswith("no space left on device")
    assert error_of(result).startswith("runs/tiny/checkpoints/step-")
    assert sorted(path.name for path in before.parent.iterdir()) == names

    # Not even space for the job.
    filler.unlink()
    filler = fill(small_disk, leave=0)
    result = elasticrec("train", "job.yaml", "--set", "train.epochs=2", cwd=small_disk)
    assert error_of(result).endswith("no space left on device")
    assert succeed("predict", "--help", cwd=small_disk)

    filler.unlink()
    result = elasticrec("train", "job.yaml", "--set", "train.epochs=2", cwd=small_disk)
    assert result.returncode == 0, result.stderr
    assert f"resuming runs/tiny from {before.name}: " in result.stderr
    for name, content in state(tmp_path).items():
        # The data is in another directory, but its bytes, and so every batch, are the same.
        assert state(small_disk)[name] == content, name


def test_a_full_disk_while_publishing(small_disk: Path) -> None:
    write_job(small_disk, format="slots", kind="dnn", samples=2000)
    succeed("train", "job.yaml", cwd=small_disk)
    succeed("publish", "tiny", cwd=small_disk)
    version = small_disk / "models/tiny/1"
    size = sum(file.stat().st_size for file in version.rglob("*") if file.is_file())
    filler = fill(small_disk, leave=size // 2)
    result = elasticrec("publish", "tiny", cwd=small_disk)
    assert error_of(result).endswith("no space left on device")
    assert (small_disk / "models/tiny/CURRENT").read_text() == '{"version": 1, "generation": 1}'
    filler.unlink()
    # The number of the failed version is not used again, unless it could not even be recorded.
    assert re.search("version [23] of tiny", succeed("publish", "tiny", cwd=small_disk))


def test_a_damaged_checkpoint_is_refused_by_every_command(tmp_path: Path) -> None:
    write_job(tmp_path, format="slots", kind="wide_deep", samples=1000)
    succeed("train", "job.yaml", cwd=tmp_path)
    path = newest(tmp_path)
    train, publish = ("train", "job.yaml", "--set", "train.epochs=2"), ("publish", "tiny")
    for name, command in (("table/part-00000", train), ("dense.bin", publish)):
        content = (path / name).read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 0x10
        (path / name).write_bytes(flipped)
        expected = "sha-256 differs from the manifest, the file is damaged"
        error = error_of(elasticrec(*command, cwd=tmp_path))
        assert error.startswith(f"{path.relative_to(tmp_path)}/{name}: {expected}")
        assert command is publish or error.endswith(
            f"; remove {path.relative_to(tmp_path)} to use the one before it (1 left)"
        )
        (path / name).write_bytes(content)
    for name, message in (("metrics.npz", "expected "), ("manifest.json", "not JSON, the file is damaged: ")):
        os.truncate(path / name, 200)
        error = error_of(elasticrec(*train, cwd=tmp_path))
        assert error.startswith(f"{path.relative_to(tmp_path)}/{name}: {message}")
    assert newest(tmp_path) == path
    assert not (tmp_path / "models").exists()


class InProcessCommands:
    """Runs commands in this process, which has loaded torch; the code from arguments to exit code is the same."""

    def __init__(self, capsys: pytest.CaptureFixture[str], directory: Path) -> None:
        self._capsys = capsys
        self._directory = directory

    def succeed(self, *arguments: str) -> str:
        self._capsys.readouterr()
        with contextlib.chdir(self._directory):
            assert cli.main(arguments) == 0
        return self._capsys.readouterr().out

    def fail(self, *arguments: str) -> str:
        """Return the error line of a command."""
        self._capsys.readouterr()
        with contextlib.chdir(self._directory):
            assert cli.main(arguments) == 2
        *_, error = self._capsys.readouterr().err.splitlines()
        assert error.startswith("error: ")
        return error.removeprefix("error: ")


def test_a_full_disk_keeps_the_best_checkpoint_and_the_snapshots(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(small_disk, format="slots", kind="dnn", samples=2000)
    commands = InProcessCommands(capsys, small_disk)
    keep = "train.checkpoint={keep: 1, keep_epochs: true, keep_best: auc}"
    train = ("train", "job.yaml", "--set", keep, "--set")
    commands.succeed(*train, "train.epochs=2")
    directory = small_disk / "runs/tiny/checkpoints"
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    best = commands.succeed("eval", "tiny", "--best", "--json")

    size = sum(file.stat().st_size for file in newest(small_disk).rglob("*") if file.is_file())
    filler = fill(small_disk, leave=size // 2)
    assert commands.fail(*train, "train.epochs=4").endswith("no space left on device")
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before
    filler.unlink()
    assert commands.succeed("eval", "tiny", "--best", "--json") == best
    commands.succeed(*train, "train.epochs=4")
    assert len(commands.succeed("eval", "tiny", "--range", "0:4", "--json").splitlines()) == 4


def test_a_full_disk_while_an_interrupted_training_saves(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C without space for a checkpoint reports the disk error; training resumes from the previous checkpoint."""
    write_job(small_disk, format="slots", kind="dnn", samples=2000, train__checkpoint={"every_steps": 4})

    def fill_and_stop(event: Any) -> None:
        if event.steps == 6:
            fill(small_disk, leave=0)
            signal.raise_signal(signal.SIGINT)

    with contextlib.chdir(small_disk), pytest.raises(OSError, match="No space left on device"):
        api.train(api.load_job("job.yaml", set={"train.print_every_s": 1e-9}), fill_and_stop, quiet=True)
    assert newest(small_disk).name == "step-000000000004"
    (small_disk / "filler").unlink()
    with contextlib.chdir(small_disk):
        assert cli.main(["train", "job.yaml"]) == 0
    assert "resuming runs/tiny from step-000000000004: " in capsys.readouterr().err


def test_a_full_disk_while_the_metrics_are_written(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_job(small_disk, format="slots", kind="dnn", samples=2000, train__batch_size=16)
    commands = InProcessCommands(capsys, small_disk)
    commands.succeed("train", "job.yaml")
    before = state(small_disk)
    # There is space for the job, and for lines of metrics until the last block of their file is full.
    filler = fill(small_disk, leave=8192)
    error = commands.fail("train", "job.yaml", "--set", "train.epochs=9", "--set", "train.print_every_s=0.000001")
    assert error == "runs/tiny/metrics.jsonl: no space left on device"
    assert state(small_disk) == before
    filler.unlink()
    commands.succeed("train", "job.yaml", "--set", "train.epochs=2")


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train `tiny`, and `wide` with another network."""
    directory = tmp_path_factory.mktemp("two")
    job = write_job(directory, format="slots", kind="wide_deep", samples=1000)
    with contextlib.chdir(directory):
        api.train(job, quiet=True)
        api.train(api.load_job(job, set={"name": "wide", "model.hidden": [12]}), quiet=True)
    return directory


COMMANDS = {
    "train": ("train", "job.yaml", "--set", "train.epochs=2"),
    "warm start": ("train", "job.yaml", "--set", "name=warm", "--set", "train.warm_start=tiny"),
    "eval": ("eval", "tiny"),
    "explain": ("explain", "1 0 5:0", "--checkpoint", "tiny"),
    "predict": ("predict", "--best", "--checkpoint", "tiny", "data/20260101/01/part-00000.txt"),
    "publish": ("publish", "tiny"),
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_every_command_refuses_damage_with_one_line(
    two_runs: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    commands = InProcessCommands(capsys, two_runs)
    path = newest(two_runs)
    for name in ("table/part-00000", "dense.bin", "metrics.npz"):
        content = (path / name).read_bytes()
        for damaged in (content[:-1], content[:100] + bytes([content[100] ^ 4]) + content[101:]):
            (path / name).write_bytes(damaged)
            try:
                error = commands.fail(*command)
            finally:
                (path / name).write_bytes(content)
            path_in_run = f"{path.relative_to(two_runs)}/{name}"
            assert (
                f"{path_in_run}: expected {len(content)} bytes" in error or f"{path_in_run}: sha-256 differs" in error
            )
        assert (newest(two_runs) / name).read_bytes() == content
    assert not (two_runs / "models").exists()


@pytest.mark.parametrize("command", [COMMANDS["train"], COMMANDS["eval"], COMMANDS["publish"]], ids=lambda c: c[0])
def test_a_checkpoint_of_another_model_is_refused(
    two_runs: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    commands = InProcessCommands(capsys, two_runs)
    other = sorted((two_runs / "runs/wide/checkpoints").glob("step-*"))[-1]
    foreign = two_runs / "runs/tiny/checkpoints/step-999999999999"
    shutil.copytree(other, foreign)
    try:
        error = commands.fail(*command)
    finally:
        shutil.rmtree(foreign)
    expected = f"{foreign.relative_to(two_runs)}: belongs to another job, which differs in `model.hidden`"
    assert error.startswith(expected)
    # After its removal the run works again.
    assert "click" in commands.succeed("eval", "tiny")


_WITHOUT_MEMORY = """
import resource, sys
import elasticrec.training.loop
from elasticrec import cli
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), resource.RLIM_INFINITY))
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("trained", [False, True])
def test_a_table_without_memory_is_one_line(tmp_path: Path, trained: bool) -> None:
    """The first push of a new run and the load of a checkpoint need more memory than the process may allocate."""
    write_job(tmp_path, format="slots", kind="dnn")
    if trained:
        succeed("train", "job.yaml", cwd=tmp_path)
        before = state(tmp_path)
    command = [sys.executable, "-c", _WITHOUT_MEMORY, "train", "job.yaml", "--set", "train.epochs=2"]
    error = error_of(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False))
    assert re.fullmatch(r"table: cannot allocate \d+ bytes: .*", error), error
    if trained:
        assert state(tmp_path) == before
    succeed("train", "job.yaml", "--set", "train.epochs=2", cwd=tmp_path)
