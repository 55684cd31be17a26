"""Directories that all pytest-xdist workers share; one worker fills each of them."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a directory that all workers of this test run share; the first worker to ask fills it with `make`.

    The others wait. If `make` fails, the next worker to ask tries again in an empty directory.
    """
    base = factory.getbasetemp()
    # The parent belongs to this test run only when xdist made a directory for each worker in it.
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    directory, complete = shared / f"shared-{name}", shared / f"shared-{name}.complete"
    with (shared / f"shared-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            if directory.exists():
                directory.rename(factory.mktemp(f"{name}-failed") / name)
            directory.mkdir()
            make(directory)
            complete.touch()
    return directory
