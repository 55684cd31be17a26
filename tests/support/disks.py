"""Small file systems, for tests of full disks."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_file_system(path: Path, size: str) -> Iterator[Path]:
    """Mount a file system of this size; skip the test if that is not possible."""
    path.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("a small file system needs `mount` and root")
    done = subprocess.run([mount, "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small file system: {done.stderr.decode().strip()}")
    try:
        yield path
    finally:
        # A killed process may still have a file open there.
        subprocess.run(["umount", "--lazy", path], check=True)


def fill(path: Path, leave: int) -> None:
    """Fill a file system until only `leave` bytes are free; other processes may write to it meanwhile."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(2**20))
    os.truncate(path, max(path.stat().st_size - leave, 0))
