"""Units to batches, whatever the format: the one place that knows which reader a job needs."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.data.reader import LineReader
from elasticrec.data.units import Unit
from elasticrec.errors import SampleError


class Batches(Protocol):
    """An iterator over batches that has threads or processes of its own."""

    def __iter__(self) -> Iterator[_core.Batch]: ...
    def __next__(self) -> _core.Batch: ...
    def times(self) -> tuple[float, float]:
        """Seconds that a thread or process spent reading, and that all of them spent parsing, so far."""

    def close(self) -> None:
        """End them."""


def prepare(job: Job) -> None:
    """Import what reading needs: later it would look like waiting for data."""
    if job.data.format == "parquet":
        from elasticrec.data.parquet import warm_up

        warm_up()


def open_batches(
    job: Job, parser: _core.Parser, units: list[Unit], *, shuffle: bool, held_out: bool = False, skip_batches: int = 0
) -> Batches:
    """The batches of units in their order, read ahead; `skip_batches` of the first unit were done before.

    `held_out` takes the samples that are kept for evaluation where those are a part of the training data.
    """
    if job.data.format == "parquet":
        from elasticrec.data.parquet import ParquetReader

        return ParquetReader(job, parser, units, shuffle=shuffle, skip=skip_batches, held_out=held_out, labels=True)
    cut: dict[str, Any] = {
        "batch_size": job.train.batch_size,
        "shuffle": shuffle,
        "seed": job.train.seed,
        "skip_batches": skip_batches,
        "piece_bytes": job.data.unit_bytes,
        "select": job.data.select(held_out=held_out),
    }
    if job.data.format == "reader":
        from elasticrec.data.pool import ReaderPool

        return ReaderPool(job, parser, units, cut, labels=True)
    return _core.BatchReader(
        parser, [unit.core() for unit in units], _core.Cut(**cut), labels=True, workers=job.data.workers
    )


def line_parser(job: Job, parser: _core.Parser, *, labels: bool = False) -> Callable[[bytes], _core.Batch]:
    """What turns lines into a batch, for predictions without their labels."""
    if job.data.format == "parquet":

        def refuse(_: bytes) -> _core.Batch:
            raise SampleError("format `parquet` has no lines, expected a Parquet file")

        return refuse
    if job.data.reader is not None:
        return LineReader(job.data.reader, job.reader_source(), parser, labels=labels).parse
    return lambda text: parser.parse(text, labels=labels)
