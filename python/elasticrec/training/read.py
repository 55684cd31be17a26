"""Reading settings shared by training and evaluation: splitting of files, limit of bad records."""

from elasticrec.config import Job, fingerprint
from elasticrec.data.units import UnitSplit
from elasticrec.errors import SampleError


def unit_split(job: Job) -> UnitSplit:
    """Return how files are split into units and batches."""
    return UnitSplit(job.data.unit_bytes, job.data.shuffle, job.train.seed, fingerprint(job)[:16], job.data.format)


def refuse_bad(job: Job, records: int, bad: int, key: str) -> None:
    """Raise an error if there are more bad records than the job allows."""
    limit = job.data.max_bad_ratio
    if bad > limit * records:
        raise SampleError(
            f"{job.source}: {key}: {bad:,} of {records:,} records are bad ({bad / records:.2%}), "
            f"expected at most {limit:.2%} (data.max_bad_ratio)"
        )
