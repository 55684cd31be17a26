"""One writer per model: a file lock on a local disk, or a lease in remote storage. Errors name the current holder.

Local writers and writers over HTTP exclude each other: a local writer checks the locked file for a valid lease, and the
file server does not change a file that is locked by the kernel.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from elasticrec.errors import ConfigError, UnavailableError
from elasticrec.repository.storage import Storage

# Duration of a lease. A holder renews it several times within that time; after it the holder is considered dead.
LEASE_S = 30.0
_PAUSE_S = 0.05
_SETTLE_S = 0.5

# Lock files: for publishing, and for changes of CURRENT and PINS.
WRITER, STATE = ".lock", ".state.lock"

Check = Callable[[], None]


@contextlib.contextmanager
def hold_lock(storage: Storage, name: str, doing: str, *, wait_s: float = 0.0) -> Iterator[Check]:
    """Hold a lock while the block runs; raise `ConfigError` with the holder's name if it is taken.

    Yield a check that raises an error once the lock is lost; call it directly before a commit.
    """
    path = storage.path_of(name)
    holding = _hold_file(path, doing, wait_s) if path is not None else _hold_lease(storage, name, doing, wait_s)
    with holding as check:
        yield check


@contextlib.contextmanager
def _hold_file(path: Path, doing: str, wait_s: float) -> Iterator[Check]:
    """Hold a file lock, which the kernel releases with the process. A lease in the file belongs to an HTTP writer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + wait_s
    while True:
        with _locked_file(path) as file:
            if file is not None and not _is_valid_lease(_parse(file.read())):
                # The owner is written for error messages only, so a full disk is no error.
                with contextlib.suppress(OSError):
                    os.ftruncate(file.fileno(), 0)
                    os.write(file.fileno(), json.dumps({"owner": _process_name()}).encode())

                def check(file: BinaryIO = file) -> None:
                    if not _is_at(file, path):
                        raise UnavailableError(f"{path}: the lock was lost: its file was removed")

                yield check
                return
        if time.monotonic() >= deadline:
            raise _refusal(str(path.parent), doing, _owner_of(path))
        time.sleep(_PAUSE_S)


@contextlib.contextmanager
def _locked_file(path: Path) -> Iterator[BinaryIO | None]:
    """Yield the locked file, positioned at its start, or None if another process holds the lock."""
    while True:
        with open(path, "a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            # The file may have been replaced before it was locked.
            if _is_at(file, path):
                file.seek(0)
                yield file
                return


@contextlib.contextmanager
def exclude_local_holders(path: Path) -> Iterator[None]:
    """Exclude local lock holders while the block runs; raise `FileExistsError` if there is one.

    For the file server, because HTTP clients only see leases.
    """
    with _locked_file(path) as file:
        if file is None:
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        yield


def _is_at(file: BinaryIO, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    return False


@contextlib.contextmanager
def _hold_lease(storage: Storage, name: str, doing: str, wait_s: float) -> Iterator[Check]:
    lease = _Lease(storage, name)
    deadline = time.monotonic() + wait_s
    while not lease.take():
        if time.monotonic() >= deadline:
            raise _refusal(storage.location, doing, lease.holder())
        time.sleep(_PAUSE_S)
    keeper = threading.Thread(target=lease.keep, name=f"lease {name}", daemon=True)
    keeper.start()
    try:
        yield lease.check
    finally:
        lease.stop()
        keeper.join()
        lease.release()


class _Lease:
    """A lease file that its holder renews. It contains wall-clock times, so clocks may differ by a few seconds only."""

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage, self._name = storage, name
        self._id = uuid.uuid4().hex
        self._ended = threading.Event()
        self._renewed_s = time.monotonic()

    def take(self) -> bool:
        """Try to acquire the lease. Return False if another live holder has it."""
        with contextlib.suppress(FileExistsError):
            self._storage.create(self._name, self._content())
            return self._is_mine()
        if _is_valid_lease(self._read()):
            return False
        # Several processes may take over an expired lease; after a pause, the last writer holds it.
        with contextlib.suppress(FileExistsError):
            self._storage.delete(self._name)
            self._storage.create(self._name, self._content())
            time.sleep(_SETTLE_S)
        return self._is_mine()

    def holder(self) -> str:
        """Return the name of the holder."""
        return str((self._read() or {}).get("owner", "unknown"))

    def keep(self) -> None:
        """Renew the lease until `stop`."""
        while not self._ended.wait(LEASE_S / 5):
            with contextlib.suppress(OSError, UnavailableError):
                # An expired lease may belong to another process.
                if time.monotonic() - self._renewed_s > LEASE_S or not self._is_mine():
                    return
                self._storage.write(self._name, self._content())
                self._renewed_s = time.monotonic()

    def check(self) -> None:
        """Raise an error if the lease is lost or about to expire."""
        if time.monotonic() - self._renewed_s > LEASE_S * 0.8 or not self._is_mine():
            raise UnavailableError(f"{self._storage.location}/{self._name}: the lock was lost to {self.holder()}")

    def stop(self) -> None:
        """Stop renewing the lease."""
        self._ended.set()

    def release(self) -> None:
        """Release the lease."""
        with contextlib.suppress(OSError, UnavailableError):
            if self._is_mine():
                self._storage.delete(self._name)

    def _content(self) -> bytes:
        return json.dumps({"owner": _process_name(), "id": self._id, "until": round(time.time() + LEASE_S, 1)}).encode()

    def _is_mine(self) -> bool:
        return (self._read() or {}).get("id") == self._id

    def _read(self) -> dict[str, Any] | None:
        try:
            return _parse(self._storage.read(self._name))
        except FileNotFoundError:
            return None


def _refusal(location: str, doing: str, owner: str) -> ConfigError:
    return ConfigError(f"{location}: another process is {doing} it: {owner}")


def _process_name() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _owner_of(path: Path) -> str:
    with contextlib.suppress(OSError):
        return str((_parse(path.read_bytes()) or {}).get("owner", "unknown"))
    return "unknown"


def _parse(content: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(content)
        return found if isinstance(found, dict) else None
    return None


def _is_valid_lease(found: dict[str, Any] | None) -> bool:
    """Return whether the content is a lease that has not expired."""
    until = (found or {}).get("until", 0)
    return isinstance(until, int | float) and time.time() < until
