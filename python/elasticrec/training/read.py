"""Units to batches: the reader of a job, for training and for evaluation, and the share of bad records it may meet."""

from typing import Protocol

from elasticrec import _core
from elasticrec.config import Job, fingerprint
from elasticrec.data.units import Cut, Unit
from elasticrec.errors import SampleError


class ReadBatches(Protocol):
    """Opens a reader; the trainer's own in a training."""

    def __call__(self, units: list[Unit], *, shuffle: bool, skip_batches: int) -> _core.BatchReader: ...


def cut_of(job: Job) -> Cut:
    """How the job's files become units, and units batches."""
    return Cut(job.data.unit_bytes, job.data.shuffle, job.train.seed, fingerprint(job)[:16])


def open_reader(
    job: Job, parser: _core.Parser, units: list[Unit], *, shuffle: bool, skip_batches: int
) -> _core.BatchReader:
    """Start the threads that read and parse `units` ahead."""
    return _core.BatchReader(
        parser,
        [unit.core() for unit in units],
        batch_size=job.train.batch_size,
        shuffle=shuffle,
        seed=job.train.seed,
        labels=True,
        workers=job.data.workers,
        skip_batches=skip_batches,
    )


def thread_seconds(reader: _core.BatchReader) -> tuple[float, float] | None:
    """Seconds that the reader's threads spent reading and parsing; none from a reader that does not count them."""
    times = getattr(reader, "times", None)
    if times is None:
        return None
    read_s, parse_s = times()
    return float(read_s), float(parse_s)


def refuse_bad(job: Job, records: int, bad: int, key: str) -> None:
    """Fail a job whose data has more bad records than it allows."""
    limit = job.data.max_bad_ratio
    if bad > limit * records:
        raise SampleError(
            f"{job.source}: {key}: {bad:,} of {records:,} records are bad ({bad / records:.2%}), "
            f"expected at most {limit:.2%} (data.max_bad_ratio)"
        )
