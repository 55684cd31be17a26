"""Slots and columns of the data that the job does not use, perhaps by mistake."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticrec.config import Job, match_files
from elasticrec.config.data import CRITEO_DENSE, CRITEO_SLOTS
from elasticrec.data.raw_lines import some_lines, spread
from elasticrec.user_code import load_class

_NUM_FILES = 4
_NUM_LINES = 5000
_NUM_BYTES = 4 * 2**20


@dataclass(frozen=True)
class UnusedColumn:
    """A slot or column that the job does not use."""

    name: str
    share: float | None
    """Share of the inspected samples that have it; None if only the name is known."""


def find_unused(job: Job) -> list[UnusedColumn]:
    """Return slots and columns of the training data that the job does not use, most frequent first."""
    files = spread(match_files(job, "train"), _NUM_FILES)
    known = _used_names(job)
    if job.data.format == "parquet":
        import pyarrow.parquet as pq

        names: Iterable[str] = pq.ParquetFile(files[0]).schema_arrow.names
    elif job.data.columns is not None:
        names = job.data.columns.names
    elif job.data.format == "criteo":
        names = [*CRITEO_DENSE, *CRITEO_SLOTS]
    else:
        return _count_unused(job, files, known)
    return [UnusedColumn(name, None) for name in names if name not in known]


def _used_names(job: Job) -> set[str]:
    data = job.data
    known = {name for slot in data.slots for name in (slot.name, slot.column) if name}
    for column in data.dense:
        known |= {column.name, column.column or column.name}
        if data.format == "paddlerec":
            known.add(column.name.rpartition(".")[0] or column.name)
    if data.columns is not None:
        known |= {name for name in (data.columns.weight, data.columns.time) if name}
    return known | set(data.labels) | {"weight"}


def _count_unused(job: Job, files: Sequence[Path], known: set[str]) -> list[UnusedColumn]:
    names_of = _names_of(job)
    seen: Counter[str] = Counter()
    num_lines = 0
    for path in files:
        for line in some_lines(path, _NUM_LINES // len(files), _NUM_BYTES):
            num_lines += 1
            seen.update(names_of(line))
    return [UnusedColumn(name, count / num_lines) for name, count in seen.most_common() if name not in known]


def _names_of(job: Job) -> Callable[[bytes], set[str]]:
    """Return a function that lists the slots and columns in a line; a bad line has none."""
    if job.data.reader is not None:
        reader: Any = load_class(job.data.reader, job.reader_source())()

        def names(line: bytes) -> set[str]:
            try:
                return {name for name, value in (reader.parse(line.decode()) or {}).items() if value is not None}
            except Exception:
                return set()

        return names
    pattern = re.compile(rb":([^\s:]+)(?=\s|$)" if job.data.format == "slots" else rb"(?:^|\s)([^\s:]+):")
    return lambda line: {name.decode("utf-8", "replace") for name in pattern.findall(line)}
