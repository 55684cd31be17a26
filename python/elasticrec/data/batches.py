"""Batches of units: chooses the reader for a format."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.data.reader import LineReader
from elasticrec.data.units import Unit
from elasticrec.errors import SampleError


class Batches(Protocol):
    """An iterator over batches that reads ahead with its own threads or processes."""

    def __iter__(self) -> Iterator[_core.Batch]: ...
    def __next__(self) -> _core.Batch: ...
    def times(self) -> tuple[float, float]:
        """Return the mean seconds that a thread or process spent reading, and the seconds that all spent parsing."""

    def close(self) -> None:
        """Stop the threads or processes."""


def prepare(job: Job) -> None:
    """Do slow imports of the reader now, so that they do not count as waiting for data later."""
    if job.data.format == "parquet":
        from elasticrec.data.parquet import warm_up

        warm_up()


def open_batches(
    job: Job, parser: _core.Parser, units: list[Unit], *, shuffle: bool, held_out: bool = False, skip_batches: int = 0
) -> Batches:
    """Open the batches of units in order, read ahead; skip the first `skip_batches` of the first unit.

    `held_out` selects the samples held out for evaluation when they are a part of the training data.
    """
    if job.data.format == "parquet":
        from elasticrec.data.parquet import ParquetReader

        return ParquetReader(job, parser, units, shuffle=shuffle, skip=skip_batches, held_out=held_out, labels=True)
    options: dict[str, Any] = {
        "batch_size": job.train.batch_size,
        "shuffle": shuffle,
        "seed": job.train.seed,
        "skip_batches": skip_batches,
        "piece_bytes": job.data.unit_bytes,
        "select": job.data.select(held_out=held_out),
    }
    if job.data.format == "reader":
        from elasticrec.data.reader_processes import ReaderProcesses

        return ReaderProcesses(job, parser, units, options, labels=True)
    return _core.BatchReader(
        parser, [unit.core() for unit in units], _core.BatchOptions(**options), labels=True, workers=job.data.workers
    )


def line_parser(job: Job, parser: _core.Parser, *, labels: bool = False) -> Callable[[bytes], _core.Batch]:
    """Return a function that parses lines into a batch, for predictions."""
    if job.data.format == "parquet":

        def refuse(_: bytes) -> _core.Batch:
            raise SampleError("format `parquet` has no lines, expected a Parquet file")

        return refuse
    if job.data.reader is not None:
        return LineReader(job.data.reader, job.reader_source(), parser, labels=labels).parse
    return lambda text: parser.parse(text, labels=labels)


def refuse_bad_records(job: Job, records: int, bad: int, key: str) -> None:
    """Raise an error if there are more bad records than the job allows."""
    limit = job.data.max_bad_ratio
    if bad > limit * records:
        raise SampleError(
            f"{job.source}: {key}: {bad:,} of {records:,} records are bad ({bad / records:.2%}), "
            f"expected at most {limit:.2%} (data.max_bad_ratio)"
        )
