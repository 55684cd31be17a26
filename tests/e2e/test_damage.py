"""Damage that disks do to a run: one clear line, exit 2, and the checkpoint before is still good."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import elasticrec, succeed, write_job

pytestmark = pytest.mark.slow


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("a full disk needs a file system of its own: mount and root")
    done = subprocess.run([mount, "-t", "tmpfs", "-o", "size=4m", "tmpfs", path], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"a full disk needs a file system of its own: {done.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def newest(directory: Path) -> Path:
    return sorted((directory / "runs/tiny/checkpoints").glob("step-*/manifest.json"))[-1].parent


def state(directory: Path) -> dict[str, bytes]:
    return {name: (newest(directory) / name).read_bytes() for name in ("table/part-00000", "dense.bin")}


def error_of(result: Any) -> str:
    """The one line of a failed command."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert errors == result.stderr.splitlines()[-1:], result.stderr
    return str(errors[0].removeprefix("error: "))


def fill(disk: Path, leave: int) -> Path:
    """A file that takes all room but `leave` bytes."""
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

    # room for the job and the units, but not for another table
    filler = fill(small_disk, leave=size // 2)
    result = elasticrec("train", "job.yaml", "--set", "train.epochs=2", cwd=small_disk)
    assert error_of(result).endswith("no space left on device")
    assert error_of(result).startswith("runs/tiny/checkpoints/step-")
    assert sorted(path.name for path in before.parent.iterdir()) == names

    # not even for the job
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
        # the data lies elsewhere, but its bytes, and so every batch, are the same
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
    assert "version 2 of tiny" in succeed("publish", "tiny", cwd=small_disk)


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
            f"; without {path.relative_to(tmp_path)} the one before is used, there are 1"
        )
        (path / name).write_bytes(content)
    for name, message in (("metrics.npz", "expected "), ("manifest.json", "not JSON, the file is damaged: ")):
        os.truncate(path / name, 200)
        error = error_of(elasticrec(*train, cwd=tmp_path))
        assert error.startswith(f"{path.relative_to(tmp_path)}/{name}: {message}")
    assert newest(tmp_path) == path
    assert not (tmp_path / "models").exists()
