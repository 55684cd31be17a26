"""Durable writes: after a crash a file is complete or absent. Used for checkpoints, versions and runs."""

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from elasticrec.errors import ConfigError


def write_atomically(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Replace a file atomically: readers find the old content or the new one."""
    with _name_file_in_errors(path):
        _replace(path, content, mode)
    sync_directory(path.parent)


@contextlib.contextmanager
def _name_file_in_errors(path: Path) -> Iterator[None]:
    """Add the file name to errors of a write."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def _replace(path: Path, content: bytes, mode: int) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def write_synced(path: Path, content: bytes) -> tuple[int, str]:
    """Write a new file and sync it to the disk; return its size and sha-256."""
    with _name_file_in_errors(path), open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return len(content), hashlib.sha256(content).hexdigest()


@contextlib.contextmanager
def hold(path: Path, refusal: str) -> Iterator[None]:
    """Hold a lock file; raise `ConfigError(refusal)` if another process holds it. The lock ends with the process."""
    with open(path, "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(refusal) from None
        yield


def sync_directory(path: Path) -> None:
    """Sync a directory, so that the names of new files are durable."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
