"""Logging of commands and processes, and the time stamp in front of the lines of a log file."""

import contextlib
import io
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import datetime
from typing import TextIO

import typer

STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} ")

_STAMPED_FORMAT = logging.Formatter("%(asctime)s.%(msecs)03d %(message)s", "%Y-%m-%dT%H:%M:%S")
_root = logging.getLogger("elasticrec")


class _LineHandler(logging.Handler):
    """Passes every record to a function as one line of text."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        self._write(self.format(record))


class _StderrHandler(_LineHandler):
    """Writes to the current standard error, which commands and tests replace."""

    def __init__(self) -> None:
        super().__init__(lambda text: typer.echo(text, err=True))
        self.level_before = _root.level


def log_to_stderr(*, stamped: bool) -> None:
    """Set up logging for a command: lines go to standard error, with a time stamp unless the stream adds one."""
    end_logging()
    handler = _StderrHandler()
    if stamped:
        handler.setFormatter(_STAMPED_FORMAT)
    _root.addHandler(handler)
    _root.setLevel(logging.INFO)


def end_logging() -> None:
    """Undo `log_to_stderr`."""
    for handler in [handler for handler in _root.handlers if isinstance(handler, _StderrHandler)]:
        _root.removeHandler(handler)
        _root.setLevel(handler.level_before)


class _Forwarder(_LineHandler):
    """Passes on the lines of one block of `forward_logs`, and those of threads that belong to no open block."""

    is_open = True

    def emit(self, record: logging.LogRecord) -> None:
        block = _block.get()
        if block is None or block is self or not block.is_open:
            super().emit(record)


class _Forwarders:
    """The forwarders of all open blocks. While there are any, log lines do not reach the application's handlers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[_Forwarder] = []
        self._before = logging.NOTSET, True

    def add(self, forwarder: _Forwarder) -> None:
        """Install a forwarder."""
        with self._lock:
            if not self._open:
                self._before = _root.level, _root.propagate
                _root.setLevel(logging.INFO)
                # A handler of the application that writes to the terminal would show each line a second time.
                _root.propagate = False
            self._open.append(forwarder)
            _root.addHandler(forwarder)

    def remove(self, forwarder: _Forwarder) -> None:
        """Remove a forwarder; the last one restores the logger."""
        with self._lock:
            forwarder.is_open = False
            _root.removeHandler(forwarder)
            self._open.remove(forwarder)
            if not self._open:
                _root.setLevel(self._before[0])
                _root.propagate = self._before[1]


_block: ContextVar[_Forwarder | None] = ContextVar("block", default=None)
_forwarders = _Forwarders()


@contextlib.contextmanager
def forward_logs(write: Callable[[str], None]) -> Iterator[None]:
    """Pass log lines to `write` inside the block, for example to the reporter that owns the terminal.

    An inner block takes its lines from the outer one. A thread belongs to the block in which `copy_context().run`
    was bound to it, so that the lines of two servers in one process do not mix.
    """
    forwarder, outer = _Forwarder(write), _block.get()
    _forwarders.add(forwarder)
    _block.set(forwarder)
    try:
        yield
    finally:
        # Not `ContextVar.reset`: the block of a generator may end in another context, as in another notebook cell.
        if _block.get() is forwarder:
            _block.set(outer)
        _forwarders.remove(forwarder)


class RepeatFilter:
    """Writes a line unless it repeats the last one, as the problem of a retry does."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self.last: str | None = None

    def write(self, line: str) -> None:
        """Write a line unless it repeats the last one."""
        if line != self.last:
            self.last = line
            self._write(line)

    def clear(self) -> None:
        """Forget the last line: the problem is solved, and is written again if it returns."""
        self.last = None


def stamp() -> str:
    """Return the current time in the format of log lines."""
    return datetime.now().isoformat(timespec="milliseconds")


def without_stamp(line: str) -> str:
    """Remove the time stamp of a log line."""
    return STAMP.sub("", line, count=1)


class StampedStream(io.TextIOBase):
    """Adds a time stamp to every line: log lines, errors, and the output of libraries."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._at_start = True

    def write(self, text: str) -> int:
        """Write whole lines in one call, so that lines of two threads do not mix."""
        if not isinstance(text, str):
            # Some libraries write bytes to find out whether a stream is binary.
            raise TypeError(f"expected text, got {type(text).__name__}")
        parts = []
        for line in text.splitlines(keepends=True):
            parts.append(f"{stamp()} {line}" if self._at_start else line)
            self._at_start = line.endswith("\n")
        self._stream.write("".join(parts))
        return len(text)

    def flush(self) -> None:
        """Flush the wrapped stream."""
        self._stream.flush()

    def fileno(self) -> int:
        """Return the descriptor of the wrapped stream."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Whether the wrapped stream is a terminal."""
        return self._stream.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the wrapped stream."""
        return self._stream.encoding
