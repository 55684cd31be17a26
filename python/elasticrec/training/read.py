"""What training and evaluation share of reading: how files are cut, how much may be bad."""

from elasticrec.config import Job, fingerprint
from elasticrec.data.units import UnitSplit
from elasticrec.errors import SampleError


def cut_of(job: Job) -> UnitSplit:
    """How the job's files become units, and units batches."""
    return UnitSplit(job.data.unit_bytes, job.data.shuffle, job.train.seed, fingerprint(job)[:16], job.data.format)


def refuse_bad(job: Job, records: int, bad: int, key: str) -> None:
    """Fail a job whose data has more bad records than it allows."""
    limit = job.data.max_bad_ratio
    if bad > limit * records:
        raise SampleError(
            f"{job.source}: {key}: {bad:,} of {records:,} records are bad ({bad / records:.2%}), "
            f"expected at most {limit:.2%} (data.max_bad_ratio)"
        )
