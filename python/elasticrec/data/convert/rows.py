"""Raw values of samples, before hashing: chunks of columns, and the reader for each format."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from elasticrec.config import Job
from elasticrec.config.columns import DenseColumn, Slot
from elasticrec.data.convert.input_data import InputData
from elasticrec.data.reader import SHOWN_BAD
from elasticrec.errors import ConfigError, SampleError

CHUNK_ROWS = 8192

# For each column one value per row: a text, a number, a list of texts, or None.
Chunk = dict[str, list[Any]]


@dataclass
class Schema:
    """The columns of chunks."""

    labels: list[str]
    slots: list[Slot]
    dense: list[DenseColumn]
    weight: str | None = None
    time: str | None = None
    lists: set[str] = field(default_factory=set)
    """Slot columns with lists of values."""
    others: list[str] = field(default_factory=list)
    """Columns that the job does not use."""
    types: dict[str, Any] = field(default_factory=dict)
    """Arrow types of the other columns, for Parquet."""

    @staticmethod
    def of(job: Job) -> "Schema":
        """Return the labels, slots and dense columns of a job."""
        return Schema(list(job.data.labels), list(job.data.slots), list(job.data.dense))

    def columns(self) -> list[str]:
        """Return the names of all columns, each once."""
        names = [*self.labels, *(name for name in (self.weight, self.time) if name)]
        names += [column_of(item) for item in self.features()]
        return list(dict.fromkeys([*names, *self.others]))

    def features(self) -> list[Slot | DenseColumn]:
        """Return slots and dense columns."""
        return [*self.slots, *self.dense]

    def check(self, where: str) -> None:
        """Refuse a column with two roles, because a converted column has one type."""
        names = [column_of(item) for item in self.features()]
        names += [*self.labels, *(name for name in (self.weight, self.time) if name)]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"{where}: data.columns: column `{name}` has two roles, expected one in a conversion")


def column_of(item: Slot | DenseColumn) -> str:
    """Return the column that a slot or dense value is read from."""
    return item.column or item.name


@dataclass
class BadRecords:
    """Count of records that cannot be parsed, with a description of the first few."""

    num_records: int = 0
    num_bad: int = 0
    shown: list[str] = field(default_factory=list)

    def add(self, num_records: int, bad: list[str]) -> None:
        """Count the records of a chunk."""
        self.num_records += num_records
        self.num_bad += len(bad)
        self.shown += bad[: SHOWN_BAD - len(self.shown)]

    def check(self, job: Job) -> None:
        """Raise `SampleError` if more records are bad than the job allows."""
        most = job.data.max_bad_ratio
        if self.num_bad > most * max(self.num_records, 1):
            lines = [f"{self.num_bad:,} of {self.num_records:,} records are bad, data.max_bad_ratio is {most:g}"]
            raise SampleError("\n".join([*lines, *self.shown]))


class RowReader(Protocol):
    """Reads files of one format as chunks."""

    schema: Schema
    bad: BadRecords

    def read(self, path: Path) -> Iterator[Chunk]:
        """Yield the samples of a file."""


def open_rows(data: InputData) -> RowReader:
    """Open the reader for the format of the data."""
    from elasticrec.data.convert.rows_objects import JsonRows, ReaderRows
    from elasticrec.data.convert.rows_text import CriteoRows, CsvRows, PaddleRecRows, SlotTextRows

    text_readers: dict[str, Callable[[InputData], RowReader]] = {
        "slots": SlotTextRows,
        "paddlerec": PaddleRecRows,
        "criteo": CriteoRows,
        "csv": CsvRows,
    }
    reader: RowReader
    if data.is_json:
        reader = JsonRows(data)
    elif data.job.data.reader is not None:
        reader = ReaderRows(data, data.job.data.reader)
    elif data.job.data.format == "parquet":
        from elasticrec.data.convert.rows_parquet import ParquetRows

        reader = ParquetRows(data)
    else:
        reader = text_readers[data.job.data.format](data)
    reader.schema.check(data.job.source)
    return reader


def split_text(text: str, separator: str) -> list[str]:
    """Return the values in a text, without empty ones."""
    return [piece for piece in text.split(separator) if piece]
