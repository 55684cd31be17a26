"""Paths, globs and directories of a job to the files that units are cut from."""

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from elasticrec.config.fields import show
from elasticrec.config.job import Job
from elasticrec.errors import ConfigError

# A path is only of use whole.
_MAX_PATH = 4096


def match_files(job: Job, key: Literal["train", "eval"]) -> list[Path]:
    """The files of `data.train` or `data.eval`: patterns in their order, sorted inside one, each file once.

    A pattern without a file is an error: training on less than was asked for must not go unseen.
    """
    patterns = job.data.train if key == "train" else job.data.eval
    files: dict[str, Path] = {}
    empty: list[str] = []
    for pattern in patterns:
        matched = sorted(_files_of(pattern))
        if not matched:
            empty.append(f"{job.source}: data.{key}: no file matches {show(pattern, _MAX_PATH)}")
        for path in matched:
            files.setdefault(os.path.realpath(path), Path(path))
    if empty:
        raise ConfigError("\n".join(empty))
    return list(files.values())


def _files_of(pattern: str) -> Iterator[str]:
    # A path that exists is taken as it stands, even if its name has `[` or `*` in it.
    paths = [pattern] if os.path.lexists(pattern) else glob.glob(pattern, recursive=True)
    for path in paths:
        if os.path.isdir(path):
            yield from _files_below(path)
        else:
            yield path


def _files_below(directory: str) -> Iterator[str]:
    """All files of the tree but those that storage leaves beside data (`.crc`, `_SUCCESS`, `_temporary/`)."""
    for parent, directories, names in os.walk(directory, onerror=_raise):
        directories[:] = [name for name in directories if not name.startswith((".", "_"))]
        for name in names:
            if not name.startswith((".", "_")):
                yield os.path.join(parent, name)


def _raise(error: OSError) -> None:
    """Without it `os.walk` passes over a directory that it may not read."""
    raise error
