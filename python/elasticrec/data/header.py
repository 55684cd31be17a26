"""The header of CSV files: the names and the order of their columns."""

import csv
from collections.abc import Iterable
from pathlib import Path

from elasticrec import _core
from elasticrec.config import Job, match_files
from elasticrec.config.fields import show, show_names
from elasticrec.errors import ConfigError, SampleError


def with_names(job: Job) -> Job:
    """Return the job with CSV column names filled in from its first file, if the job does not list them."""
    columns = job.data.columns
    if job.data.format != "csv" or columns is None or columns.names:
        return job
    path = match_files(job, "train")[0]
    names = _header_of(path, columns.delimiter)
    missing = [name for name in _used_columns(job) if name not in names]
    if missing:
        shown = ", ".join(map(show, missing))
        raise ConfigError(f"{job.source}: data.columns: {path}: expected column {shown}, got {show_names(names)}")
    return job.with_columns(columns.model_copy(update={"names": tuple(names)}))


def check_headers(job: Job, files: Iterable[Path]) -> None:
    """Check that every CSV file has the header of the first, so that columns mean the same in all of them."""
    columns = job.data.columns
    if job.data.format != "csv" or columns is None or not columns.header:
        return
    for path in files:
        names = _header_of(path, columns.delimiter)
        if tuple(names) != columns.names:
            raise SampleError(
                f"{path}:1: expected the header {show(','.join(columns.names), 200)}, got {show(','.join(names), 200)}"
            )


def _used_columns(job: Job) -> list[str]:
    data = job.data
    assert data.columns is not None
    names = [slot.column or slot.name for slot in data.slots]
    names += [column.column or column.name for column in data.dense]
    return [*data.labels, *names, *(name for name in (data.columns.weight, data.columns.time) if name)]


def _header_of(path: Path, delimiter: str) -> list[str]:
    line = _core.first_line(str(path))
    if not line:
        raise SampleError(f"{path}:1: expected a header with the names of the columns, got nothing")
    try:
        names = next(csv.reader([line.decode("utf-8", "replace")], delimiter=delimiter))
    except csv.Error as error:
        raise SampleError(f"{path}:1: expected a header with the names of the columns: {error}") from None
    if len(set(names)) != len(names):
        raise SampleError(f"{path}:1: expected each column once, got a repeated name in {show(','.join(names), 200)}")
    return names
