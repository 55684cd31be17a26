"""Resolves the paths, globs and directories of a job to data files."""

import glob
import os
import re
import stat
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Literal

from elasticrec.config.data import Holdout, seconds_of
from elasticrec.config.fields import show
from elasticrec.config.hours import Hours
from elasticrec.config.job import Job
from elasticrec.errors import ConfigError

# Paths in messages are not shortened.
_MAX_PATH = 4096


def match_files(job: Job, key: Literal["train", "eval"]) -> list[Path]:
    """Return the files of `data.train` or `data.eval`: patterns in order, sorted within a pattern, each file once.

    A pattern without a file is an error, because training on less data than requested must not go unnoticed. With a
    holdout, training and evaluation use the same files, unless the directories of the files carry the time.
    """
    data = job.data
    if key == "train" and data.hours is not None:
        return _match_hours(job, data.hours)
    if isinstance(data.eval, Holdout):
        files = _match(job, "train", data.train)
        return files if data.select(held_out=True) else _select_by_hour(job, files, data.eval, held_out=key == "eval")
    return _match(job, key, data.train if key == "train" else data.eval)


def _match_hours(job: Job, hours: Hours) -> list[Path]:
    """Return the files of the hours that are complete so far."""
    root = Path(job.data.train[0])
    found = [
        path for hour in hours.complete_hours(root, hours.first) for path in hour_files(hours.directory(root, hour))
    ]
    if not found:
        wanted = hours.done_file(root, hours.first)
        raise ConfigError(f"{job.source}: data.hours: no hour from {hours.start} on is complete yet, expected {wanted}")
    return found


def hour_files(directory: Path) -> list[Path]:
    """Return the files of an hour; empty if its directory does not exist."""
    if not directory.is_dir():
        return []
    found = sorted(files_of(str(directory)))
    for path in found:
        refuse_irregular(path)
    return [Path(path) for path in found]


def _match(job: Job, key: str, patterns: tuple[str, ...]) -> list[Path]:
    files: dict[str, Path] = {}
    empty: list[str] = []
    for pattern in patterns:
        matched = sorted(files_of(pattern))
        if not matched:
            empty.append(f"{job.source}: data.{key}: no file matches {show(pattern, _MAX_PATH)}")
        for path in matched:
            refuse_irregular(path, f"{job.source}: data.{key}: ")
            files.setdefault(os.path.realpath(path), Path(path))
    if empty:
        raise ConfigError("\n".join(empty))
    return list(files.values())


def refuse_irregular(path: str | Path, where: str = "") -> None:
    """Raise an error for anything but a regular file: opening a pipe without a writer blocks forever."""
    if not os.path.isfile(path) and os.path.exists(path):
        mode = os.stat(path).st_mode
        kinds = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISDIR, "a directory"))
        kind = next((name for is_kind, name in kinds if is_kind(mode)), "a device")
        raise ConfigError(f"{where}{show(str(path), _MAX_PATH)}: expected a regular file, got {kind}")


def _select_by_hour(job: Job, files: list[Path], holdout: Holdout, *, held_out: bool) -> list[Path]:
    """Return the files of the hours from the given time on (`held_out`), or before it."""
    assert holdout.time is not None
    start = seconds_of(holdout.time)
    chosen = []
    for path in files:
        hour = hour_of(path)
        if hour is None:
            # Only formats with columns can hold the time of a sample.
            column = "`data.columns.time`, or " if job.data.columns is not None else ""
            raise ConfigError(
                f"{job.source}: data.eval.time: expected {column}files in directories YYYYMMDD/HH, "
                f"got {show(str(path), _MAX_PATH)}"
            )
        if (hour >= start) == held_out:
            chosen.append(path)
    if not chosen:
        side = "from" if held_out else "before"
        raise ConfigError(f"{job.source}: data.eval.time: expected files {side} {holdout.time}, got none")
    return chosen


def hour_of(path: Path) -> float | None:
    """Return the start of the hour of a file in a directory `YYYYMMDD/HH`, in UTC; None for other files."""
    match = re.search(r"/(\d{8})/([01]\d|2[0-3])/[^/]*$", str(path.absolute()))
    if match is None:
        return None
    try:
        return datetime.strptime(f"{match[1]} {match[2]} +0000", "%Y%m%d %H %z").timestamp()
    except ValueError:
        return None


def files_of(pattern: str) -> Iterator[str]:
    """Yield the files that a path, a glob or a directory stands for."""
    # An existing path is used literally, even if its name contains `[` or `*`.
    paths = [pattern] if os.path.lexists(pattern) else glob.glob(pattern, recursive=True)
    for path in paths:
        if os.path.isdir(path):
            yield from _files_below(path)
        else:
            yield path


def _files_below(directory: str) -> Iterator[str]:
    """Yield all files of a tree except those that storage systems add (`.crc`, `_SUCCESS`, `_temporary/`)."""
    for parent, directories, names in os.walk(directory, onerror=_raise):
        directories[:] = [name for name in directories if not name.startswith((".", "_"))]
        for name in names:
            if not name.startswith((".", "_")):
                yield os.path.join(parent, name)


def _raise(error: OSError) -> None:
    """Raise the error of `os.walk`, which skips unreadable directories by default."""
    raise error
