"""The journal: decisions of a coordinator, synced to the disk before any member learns of them.

runs/<name>/coordinator/lock             held by the coordinator of the run
runs/<name>/coordinator/term-00000003    created exclusively; the process with the highest term is the coordinator
runs/<name>/coordinator/journal.jsonl    one entry per line: {"check":"<16 digits>","entry":{"n":7,"term":3,"kind":...}}
"""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Self

from elasticrec.durable import hold, sync_directory
from elasticrec.errors import ModelError, UnavailableError

Entry = dict[str, Any]

_NAME = "journal.jsonl"
_TERM = "term-"
# The text around an entry; the check is a digest of the entry's bytes.
_HEAD, _MIDDLE, _TAIL = b'{"check":"', b'","entry":', b"}\n"
_DIGITS = 16


class Journal:
    """The journal of a run, open in one process at a time. Append an entry before acting on it."""

    def __init__(self, directory: Path, term: int, entries: list[Entry], descriptor: int, held: contextlib.ExitStack):
        self.path = directory / _NAME
        self.term = term
        self.entries = entries
        """The entries at the time of opening."""
        self._num_entries = len(entries)
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size
        self._held = held
        self._failure: str | None = None

    @classmethod
    def open(cls, directory: Path, after_term: int = 0) -> "Journal":
        """Lock the run and take a new term above `after_term`; refuse if another coordinator holds the lock."""
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            refusal = f"{directory.parent}: another coordinator holds the lock of this run"
            stack.enter_context(hold(directory / "lock", refusal))
            path = directory / _NAME
            entries, good_bytes = _read(path)
            term = _take_term(directory, 1 + max((after_term, *(entry["term"] for entry in entries))))
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            stack.callback(os.close, descriptor)
            if os.fstat(descriptor).st_size > good_bytes:
                # No member has learned of an incomplete entry.
                os.ftruncate(descriptor, good_bytes)
                os.fsync(descriptor)
            sync_directory(directory)
            return cls(directory, term, entries, descriptor, stack.pop_all())

    def append(self, *entries: Entry) -> None:
        """Append entries; they are durable when this returns."""
        self.check_term()
        lines = b"".join(
            _line({"n": self._num_entries + at, "term": self.term, **entry}) for at, entry in enumerate(entries)
        )
        try:
            _write_all(self._descriptor, lines)
        except OSError as error:
            self._truncate(error)
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            # It is unknown which bytes are on the disk, until a restart reads the file again.
            self._failure = f"{self.path}: cannot be synced to the disk: {error.strerror}"
            raise UnavailableError(self._failure) from None
        self._size += len(lines)
        self._num_entries += len(entries)

    def _truncate(self, error: OSError) -> None:
        """Remove an incomplete line, so that the next entry starts a new line."""
        try:
            os.ftruncate(self._descriptor, self._size)
        except OSError:
            self._failure = f"{self.path}: ends with an incomplete line: {error.strerror}"

    def check_term(self) -> None:
        """Raise if this coordinator was replaced, or can no longer write."""
        own, next_one = (_term_path(self.path.parent, self.term + more) for more in (0, 1))
        if self._failure is None and (next_one.exists() or not own.exists()):
            # The lock prevents this except across machines.
            self._failure = f"{self.path.parent.parent}: another coordinator has taken over this run"
        if self._failure is not None:
            raise UnavailableError(self._failure)

    def close(self) -> None:
        """Release the run."""
        self._failure = f"{self.path}: closed"
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_entries(directory: Path) -> list[Entry]:
    """Read the entries of a journal without locking the run."""
    return _read(directory / _NAME)[0]


def _line(entry: Entry) -> bytes:
    body = json.dumps(entry, separators=(",", ":")).encode()
    return _HEAD + _check(body) + _MIDDLE + body + _TAIL


def _check(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:_DIGITS].encode()


def _read(path: Path) -> tuple[list[Entry], int]:
    """Return the entries of a journal and their size in bytes, without an incomplete last line."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    entries: list[Entry] = []
    good_bytes = 0
    for number, line in enumerate(_split(content), 1):
        entry = _parse(line)
        if entry is None or entry.get("n") != len(entries):
            # After a power failure, a block that was not written reads as zeros.
            if good_bytes + len(line) == len(content) and (not line.endswith(b"\n") or b"\0" in line):
                break
            raise ModelError(f"{path}:{number}: damaged line, or not the next entry; the journal cannot be used")
        entries.append(entry)
        good_bytes += len(line)
    return entries, good_bytes


def _split(content: bytes) -> list[bytes]:
    """Split into lines at `\\n` only, unlike `bytes.splitlines`; lines keep their ends."""
    lines = [line + b"\n" for line in content.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    return [line for line in lines if line]


def _parse(line: bytes) -> Entry | None:
    start = len(_HEAD) + _DIGITS + len(_MIDDLE)
    digits, body = line[len(_HEAD) : len(_HEAD) + _DIGITS], line[start : -len(_TAIL)]
    if line != _HEAD + digits + _MIDDLE + body + _TAIL or digits != _check(body):
        return None
    entry = json.loads(body)
    return entry if isinstance(entry, dict) else None


def _take_term(directory: Path, least: int) -> int:
    """Take a term that no other coordinator has or had."""
    taken = [path for path in directory.glob(f"{_TERM}*") if path.name.removeprefix(_TERM).isdigit()]
    term = max(least, 1 + max((int(path.name.removeprefix(_TERM)) for path in taken), default=0))
    while True:
        try:
            with open(_term_path(directory, term), "x") as file:
                file.write(f"{os.getpid()}\n")
                file.flush()
                os.fsync(file.fileno())
            break
        except FileExistsError:
            term += 1
    for path in taken:
        path.unlink(missing_ok=True)
    return term


def _term_path(directory: Path, term: int) -> Path:
    return directory / f"{_TERM}{term:08d}"


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]
