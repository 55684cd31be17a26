"""The job file: the one place where a training, its data and its serving are described.

Reads `job.yaml` and `--set` into frozen objects, or into one `ConfigError` that lists every problem.
"""

from elasticrec.config.files import match_files
from elasticrec.config.fingerprint import decisive, differences, fingerprint, meaning, structure
from elasticrec.config.job import Job, Serve, job_schema
from elasticrec.config.load import load_job, load_serve, parse_job
from elasticrec.config.secret import Secret

__all__ = [
    "Job",
    "Secret",
    "Serve",
    "decisive",
    "differences",
    "fingerprint",
    "job_schema",
    "load_job",
    "load_serve",
    "match_files",
    "meaning",
    "parse_job",
    "structure",
]
