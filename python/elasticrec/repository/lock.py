"""One writer of a model: a lock on the disk, or a lease in a store; a second writer is told who holds it.

Who has the disk and who comes to it over HTTP exclude each other: the first look for a lease in the file that they
lock, and the file server touches no lock that the kernel has given to somebody.
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

# A holder in a store says so often that it lives; one that was silent for so long is dead.
LEASE_S = 30.0
_PAUSE_S = 0.05
_SETTLE_S = 0.5

# Files that are locks: of who publishes, and of who changes what is served.
WRITER, STATE = ".lock", ".state.lock"

Check = Callable[[], None]


@contextlib.contextmanager
def held(store: Storage, name: str, doing: str, *, wait_s: float = 0.0) -> Iterator[Check]:
    """Hold a lock while the block runs, or refuse by naming who has it.

    Yields a check that raises once the lock is lost, to be called right before something is committed.
    """
    path = store.path_of(name)
    holding = _hold_file(path, doing, wait_s) if path is not None else _hold_lease(store, name, doing, wait_s)
    with holding as check:
        yield check


@contextlib.contextmanager
def _hold_file(path: Path, doing: str, wait_s: float) -> Iterator[Check]:
    """The kernel lets go of it when the process ends, in any way; a lease in it is that of one who came over HTTP."""
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + wait_s
    while True:
        with _locked_file(path) as file:
            if file is not None and not _lives(_parse(file.read())):
                # who it is helps the next one; a disk that is full does not forbid to hold it
                with contextlib.suppress(OSError):
                    os.ftruncate(file.fileno(), 0)
                    os.write(file.fileno(), json.dumps({"owner": _me()}).encode())

                def check(file: BinaryIO = file) -> None:
                    if not _is_at(file, path):
                        raise UnavailableError(f"{path}: the lock was lost, its file was removed")

                yield check
                return
        if time.monotonic() >= deadline:
            raise _refusal(str(path.parent), doing, _owner_of(path))
        time.sleep(_PAUSE_S)


@contextlib.contextmanager
def _locked_file(path: Path) -> Iterator[BinaryIO | None]:
    """The file at a path, from its start, with the lock of the kernel; none if another one has that."""
    while True:
        with open(path, "a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            # it may have been replaced before it was locked
            if _is_at(file, path):
                file.seek(0)
                yield file
                return


@contextlib.contextmanager
def nobody_holding(path: Path) -> Iterator[None]:
    """Nobody on this machine takes or has the lock of a file while the block runs; `FileExistsError` if one has.

    For the file server: those over HTTP know of leases only.
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
def _hold_lease(store: Storage, name: str, doing: str, wait_s: float) -> Iterator[Check]:
    lease = _Lease(store, name)
    deadline = time.monotonic() + wait_s
    while not lease.take():
        if time.monotonic() >= deadline:
            raise _refusal(store.location, doing, lease.holder())
        time.sleep(_PAUSE_S)
    keeper = threading.Thread(target=lease.keep, name=f"lease {name}", daemon=True)
    keeper.start()
    try:
        yield lease.check
    finally:
        lease.stop()
        keeper.join()
        lease.give_back()


class _Lease:
    """An object that is renewed while its holder lives. Clocks of holders are compared: they may differ by seconds."""

    def __init__(self, store: Storage, name: str) -> None:
        self._store, self._name = store, name
        self._id = uuid.uuid4().hex
        self._ended = threading.Event()
        self._renewed_s = time.monotonic()

    def take(self) -> bool:
        """Whether nobody has it, or somebody who is dead."""
        with contextlib.suppress(FileExistsError):
            self._store.create(self._name, self._content())
            return self._is_mine()
        if _lives(self._read()):
            return False
        # of several who find a dead one, the last who wrote has it, which shows when all of them have
        with contextlib.suppress(FileExistsError):
            self._store.delete(self._name)
            self._store.create(self._name, self._content())
            time.sleep(_SETTLE_S)
        return self._is_mine()

    def holder(self) -> str:
        """Who has it, in words."""
        return str((self._read() or {}).get("owner", "unknown"))

    def keep(self) -> None:
        """Renew it until the end."""
        while not self._ended.wait(LEASE_S / 5):
            with contextlib.suppress(OSError, UnavailableError):
                # after so long it may have been another's meanwhile
                if time.monotonic() - self._renewed_s > LEASE_S or not self._is_mine():
                    return
                self._store.write(self._name, self._content())
                self._renewed_s = time.monotonic()

    def check(self) -> None:
        """Refuse to go on without it."""
        if time.monotonic() - self._renewed_s > LEASE_S * 0.8 or not self._is_mine():
            raise UnavailableError(f"{self._store.location}/{self._name}: the lock was lost, to {self.holder()}")

    def stop(self) -> None:
        """No longer renew it."""
        self._ended.set()

    def give_back(self) -> None:
        """Let the next one have it."""
        with contextlib.suppress(OSError, UnavailableError):
            if self._is_mine():
                self._store.delete(self._name)

    def _content(self) -> bytes:
        return json.dumps({"owner": _me(), "id": self._id, "until": round(time.time() + LEASE_S, 1)}).encode()

    def _is_mine(self) -> bool:
        return (self._read() or {}).get("id") == self._id

    def _read(self) -> dict[str, Any] | None:
        try:
            return _parse(self._store.read(self._name))
        except FileNotFoundError:
            return None


def _refusal(place: str, doing: str, owner: str) -> ConfigError:
    return ConfigError(f"{place}: another process is {doing} it: {owner}")


def _me() -> str:
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


def _lives(found: dict[str, Any] | None) -> bool:
    """Whether it is a lease whose holder was there lately."""
    until = (found or {}).get("until", 0)
    return isinstance(until, int | float) and time.time() < until
