"""Counts of the signs in a file, in any format."""

import contextlib
import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

from elasticrec.audit.counts import Tally
from elasticrec.audit.csv_format import CsvFormat
from elasticrec.audit.line_formats import CriteoFormat, LineFormat, PaddleRecFormat, SlotTextFormat
from elasticrec.audit.signs import Features, in_share, xxh3
from elasticrec.audit.user_reader import UserReader
from elasticrec.audit.values import BadRecordError, OddError
from elasticrec.config import Job
from elasticrec.errors import SampleError

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_LINES_AT_ONCE = 50_000
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass
class OddRecords:
    """Records that the audit may read differently from the trainer."""

    counts: dict[str, int] = field(default_factory=dict)
    """Number of records for each oddity."""

    def add(self, what: str) -> None:
        """Count a record."""
        # The report lists at most five oddities.
        if what in self.counts or len(self.counts) < 5:
            self.counts[what] = self.counts.get(what, 0) + 1

    def lines(self) -> list[str]:
        """Return notes for the report."""
        return [f"not certain: {count:,} records have {what}" for what, count in self.counts.items()]


class FileCounter:
    """Counts the files of a job."""

    def __init__(self, job: Job) -> None:
        self.odd = OddRecords()
        self._job = job
        self._select = job.data.select(held_out=False)
        self.features = Features(job.data)
        self._format = None if job.data.format == "parquet" else self._line_format(job)

    def count(self, path: Path, tally: Tally) -> None:
        """Add all training samples of a file."""
        if self._format is None:
            from elasticrec.audit.parquet import ParquetCounter

            ParquetCounter(self._job, self.features, self.odd).count(path, tally)
        else:
            self._count_lines(path, self._format, tally)

    @property
    def num_edges(self) -> int:
        """Number of dense values at the edge of a bucket, where the last bit of a logarithm decides."""
        return sum(column.num_edges for column in self.features.dense)

    def _line_format(self, job: Job) -> LineFormat:
        data = job.data
        if data.format == "reader":
            return UserReader(self.features, job)
        if data.format == "csv":
            assert data.columns is not None
            return CsvFormat(self.features, data.columns)
        if data.format == "criteo":
            return CriteoFormat(self.features)
        return SlotTextFormat(self.features) if data.format == "slots" else PaddleRecFormat(self.features)

    def _count_lines(self, path: Path, format: LineFormat, tally: Tally) -> None:
        lines = lines_of(path)
        while some := list(islice(lines, _LINES_AT_ONCE)):
            counts = format.count(some) if isinstance(format, SlotTextFormat) and self._select is None else None
            if counts is not None:
                tally.add_counts(len(some), counts)
            else:
                self._count_singly(some, format, tally)

    def _count_singly(self, lines: list[bytes], format: LineFormat, tally: Tally) -> None:
        signs_of = self.features.signs_of
        for line in lines:
            try:
                if not format.is_record(line) or self._is_held_out(format, line):
                    continue
                sample = format.parse(line)
            except OddError as error:
                self.odd.add(str(error))
            except BadRecordError:
                pass
            else:
                if sample is not None:
                    tally.add(sample[0], sample[1], signs_of(sample[2]))

    def _is_held_out(self, format: LineFormat, line: bytes) -> bool:
        if self._select is None:
            return False
        kind, value, _ = self._select
        if kind == "ratio":
            return in_share(xxh3(line), value)
        time = format.time_of(line)
        return time is not None and time >= value


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, plain or compressed, without line ends."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("rb"))
        start = file.read(4)
        file.seek(0)
        stream: Any = file
        if start.startswith(_GZIP):
            stream = stack.enter_context(gzip.open(file))
        elif start.startswith(_ZSTD):
            stream = stack.enter_context(_open_zstd(file))
        is_first = True
        try:
            for line in stream:
                if is_first:
                    line, is_first = line.removeprefix(_BYTE_ORDER_MARK), False
                yield line.removesuffix(b"\n").removesuffix(b"\r")
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise SampleError(f"{path}: damaged or truncated: {error}") from None
        except OSError as error:
            # Errors of pyarrow about damaged files have no number and no file name.
            if error.errno is not None:
                raise
            raise SampleError(f"{path}: damaged or truncated: {error}") from None


def _open_zstd(file: IO[bytes]) -> IO[bytes]:
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd"), 2**20)


def with_names(job: Job, first: Path) -> Job:
    """Return the job with CSV column names from the first file, if the job does not list them."""
    columns = job.data.columns
    if job.data.format != "csv" or columns is None or columns.names:
        return job
    line = next(lines_of(first), b"")
    names = next(csv.reader([line.decode("utf-8", "replace")], delimiter=columns.delimiter), [])
    return job.with_columns(columns.model_copy(update={"names": tuple(names)}))
