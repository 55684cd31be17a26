"""Files that are whole or absent, also after a crash: what checkpoints, versions and runs are written with."""

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """A reader finds the old file or the new one, never a part of one."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_directory(path.parent)


def write_synced(path: Path, content: bytes) -> tuple[int, str]:
    """Write a new file through to the disk; returns its size and sha-256."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return len(content), hashlib.sha256(content).hexdigest()


def sync_directory(path: Path) -> None:
    """Make the names in a directory as durable as the files behind them."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
