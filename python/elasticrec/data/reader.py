"""A custom reader: a class in the user's file that turns a line into named values."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.errors import ConfigError, SampleError
from elasticrec.user_code import error_line, load_class, locate_errors

# Number of bad records that are shown in full; the rest are only counted.
SHOWN_BAD = 5


class Reader(Protocol):
    """The interface of a reader. Other methods and any state are the user's own."""

    def parse(self, line: str) -> Mapping[str, Any] | None:
        """Return values of slots, dense columns and labels by name, or None to skip the line."""


class LineReader:
    """Makes batches from lines with a user's reader."""

    def __init__(self, spec: str, source: bytes | None, parser: _core.Parser, *, labels: bool) -> None:
        self._path = Path(spec.rpartition(":")[0])
        reader_class = load_class(spec, source)
        with locate_errors(self._path):
            self._reader: Reader = reader_class()
        if not callable(getattr(self._reader, "parse", None)):
            raise ConfigError(
                f"{self._path}: `{reader_class.__name__}`: expected a method `parse(self, line)`, got none"
            )
        self._maker = _core.BatchMaker(parser, labels=labels)
        self._num_shown = 0

    def batch(self, records: _core.RecordBatch) -> _core.Batch:
        """Return a batch of records; bad ones are counted, and the first few are described in file order."""
        num_bad = num_records = 0
        bad: list[tuple[int, int, str]] = []
        for index in range(len(records)):
            try:
                num_records += self._add(records[index])
            except SampleError as error:
                num_records += 1
                num_bad += 1
                if self._num_shown < SHOWN_BAD:
                    bad.append((records.offset(index), index, str(error)))
        # Batches are shuffled; errors in file order are easier to look up.
        shown = sorted(bad)[: SHOWN_BAD - self._num_shown]
        self._num_shown += len(shown)
        return self._maker.finish(
            unit=records.unit,
            index=records.index,
            num_records=num_records,
            bad=[f"{records.location_of(index)}: {error}" for _, index, error in shown],
            num_bad=num_bad,
            location=records.location,
        )

    def parse(self, text: bytes) -> _core.Batch:
        """Return a batch of lines in memory; raise `SampleError` at the first bad line."""
        num_records = 0
        for number, line in enumerate(text.split(b"\n"), 1):
            if line.strip():
                try:
                    num_records += self._add(line.removesuffix(b"\r"))
                except SampleError as error:
                    self._maker.finish(unit=0, index=0, num_records=0, bad=[], num_bad=0, location="")
                    raise SampleError(f"line {number}: {error}") from None
        return self._maker.finish(unit=0, index=0, num_records=num_records, bad=[], num_bad=0, location="")

    def _add(self, line: bytes) -> bool:
        """Add the sample of a line; return false if the reader skips the line."""
        parse: Callable[[str], Any] = self._reader.parse
        try:
            sample = parse(line.decode("utf-8"))
        except UnicodeDecodeError:
            raise SampleError("expected UTF-8 text") from None
        except Exception as error:
            raise SampleError(error_line(error, self._path)) from None
        if sample is None:
            return False
        if not isinstance(sample, Mapping):
            raise SampleError(f"{self._path}: parse: expected a mapping or None, got {type(sample).__name__}")
        self._maker.add(sample if isinstance(sample, dict) else dict(sample))
        return True


def check_reader(job: Job) -> None:
    """Load the reader of a job and create an instance, as the reader processes will."""
    assert job.data.reader is not None
    LineReader(job.data.reader, job.reader_source(), _core.Parser(json.dumps(job.features())), labels=True)
