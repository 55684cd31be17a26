"""`elasticrec logs`: reads and follows the logs of a run's processes, one file for each in `runs/<name>/logs`."""

import io
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from elasticrec.errors import ConfigError
from elasticrec.net.logs import STAMP
from elasticrec.run import Run

_POLL_S = 0.2


def log_path(run: Run, name: str) -> Path:
    """Return the log file of a process such as `ps-1`."""
    return run.path / "logs" / f"{name}.log"


def find_logs(run: Run, role: str) -> list[Path]:
    """Return the log of one process, or the logs of all processes of a role."""
    paths = sorted((run.path / "logs").glob("*.log"), key=_order)
    if not paths:
        raise ConfigError(f"{run.path}: no logs: only the processes of `train.mode: ps` write logs")
    found = [path for path in paths if role in (path.stem, path.stem.rpartition("-")[0])]
    if not found:
        names = ", ".join(f"`{path.stem}`" for path in paths)
        raise ConfigError(f"{role}: no such role in {run.path}: expected one of {names}, or `ps` or `trainer` for all")
    return found


def _order(path: Path) -> tuple[str, int]:
    kind, _, number = path.stem.rpartition("-")
    return (kind, int(number)) if number.isdigit() else (path.stem, 0)


class LogReader:
    """Reads the lines of several logs in the order of time, then new lines as they are written."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._offsets = dict.fromkeys(paths, 0)
        self._partial_lines = dict.fromkeys(paths, b"")

    def lines(self, tail: int | None) -> list[str]:
        """Return the lines so far, or only the last `tail` of them."""
        found = self._read_new()
        return found if tail is None else list(deque(found, maxlen=tail))

    def follow(self) -> Iterator[str]:
        """Yield new lines forever."""
        while True:
            yield from self._read_new()
            time.sleep(_POLL_S)

    def _read_new(self) -> list[str]:
        entries: list[tuple[str, str]] = []
        for path in self._paths:
            prefix = f"{path.stem}: " if len(self._paths) > 1 else ""
            last = ""
            for line in self._complete_lines(path):
                # A line without a time stamp belongs to the line before it.
                match = STAMP.match(line)
                last = match[0] if match else last
                entries.append((last, prefix + line))
        if len(self._paths) > 1:
            entries.sort(key=lambda entry: entry[0])
        return [line for _, line in entries]

    def _complete_lines(self, path: Path) -> list[str]:
        with path.open("rb") as file:
            if file.seek(0, io.SEEK_END) < self._offsets[path]:
                # The run was started again with `--fresh`.
                self._offsets[path], self._partial_lines[path] = 0, b""
            file.seek(self._offsets[path])
            content = self._partial_lines[path] + file.read()
            self._offsets[path] = file.tell()
        *lines, self._partial_lines[path] = content.split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines]


def print_logs(run: Run, role: str, *, tail: int | None, follow: bool) -> None:
    """Print the logs of a role."""
    reader = LogReader(find_logs(run, role))
    for line in reader.lines(tail):
        print(line)
    sys.stdout.flush()
    if follow:
        for line in reader.follow():
            print(line, flush=True)
