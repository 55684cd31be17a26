"""The logs of the roles: lines with a time stamp, one file a role in the run's directory, read back and followed."""

import io
import re
import sys
import time
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TextIO

from elasticrec.errors import ConfigError
from elasticrec.run import Run

_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} ")
_POLL_S = 0.2


def stamp() -> str:
    """Now, as it stands before a line."""
    return datetime.now().isoformat(timespec="milliseconds")


def without_stamp(line: str) -> str:
    """A line as it was said."""
    return _STAMP.sub("", line, count=1)


class Stamped(io.TextIOBase):
    """A stream whose lines begin with the time, whoever writes them."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._at_start = True

    def write(self, text: str) -> int:
        """Whole lines go out in one piece, so that those of two threads do not mix."""
        if not isinstance(text, str):
            # whoever asks in this way whether the stream takes bytes
            raise TypeError(f"expected text, got {type(text).__name__}")
        parts = []
        for line in text.splitlines(keepends=True):
            parts.append(f"{stamp()} {line}" if self._at_start else line)
            self._at_start = line.endswith("\n")
        self._stream.write("".join(parts))
        return len(text)

    def flush(self) -> None:
        """Of the stream below."""
        self._stream.flush()

    def fileno(self) -> int:
        """Of the stream below."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Of the stream below."""
        return self._stream.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Of the stream below."""
        return self._stream.encoding


def log_path(run: Run, name: str) -> Path:
    """The log of a role such as `ps-1`."""
    return run.path / "logs" / f"{name}.log"


def find_logs(run: Run, role: str) -> list[Path]:
    """The log of one role, or of all of a kind."""
    paths = sorted((run.path / "logs").glob("*.log"), key=_in_order)
    if not paths:
        raise ConfigError(f"{run.path}: has no logs: roles of `train.mode: ps` write them")
    found = [path for path in paths if role in (path.stem, path.stem.rpartition("-")[0])]
    if not found:
        names = ", ".join(f"`{path.stem}`" for path in paths)
        raise ConfigError(f"{role}: no such role in {run.path}, expected one of {names}, or `ps` or `trainer` for all")
    return found


def _in_order(path: Path) -> tuple[str, int]:
    kind, _, number = path.stem.rpartition("-")
    return (kind, int(number)) if number.isdigit() else (path.stem, 0)


class LogReader:
    """Lines of some logs, in the order of time, and then those that come."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._places = dict.fromkeys(paths, 0)
        self._rests = dict.fromkeys(paths, b"")

    def lines(self, tail: int | None) -> list[str]:
        """What is there: all of it, or the last so many lines."""
        found = self._news()
        return found if tail is None else list(deque(found, maxlen=tail))

    def follow(self) -> Iterator[str]:
        """What comes, for ever."""
        while True:
            yield from self._news()
            time.sleep(_POLL_S)

    def _news(self) -> list[str]:
        entries: list[tuple[str, str]] = []
        for path in self._paths:
            prefix = f"{path.stem}: " if len(self._paths) > 1 else ""
            last = ""
            for line in self._whole_lines(path):
                # a line without a time belongs to the one before it
                match = _STAMP.match(line)
                last = match[0] if match else last
                entries.append((last, prefix + line))
        if len(self._paths) > 1:
            entries.sort(key=lambda entry: entry[0])
        return [line for _, line in entries]

    def _whole_lines(self, path: Path) -> list[str]:
        with path.open("rb") as file:
            if file.seek(0, io.SEEK_END) < self._places[path]:
                # the run was begun afresh
                self._places[path], self._rests[path] = 0, b""
            file.seek(self._places[path])
            content = self._rests[path] + file.read()
            self._places[path] = file.tell()
        *lines, self._rests[path] = content.split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines]


def print_logs(run: Run, role: str, *, tail: int | None, follow: bool) -> None:
    """`elasticrec logs`."""
    reader = LogReader(find_logs(run, role))
    for line in reader.lines(tail):
        print(line)
    sys.stdout.flush()
    if follow:
        for line in reader.follow():
            print(line, flush=True)
