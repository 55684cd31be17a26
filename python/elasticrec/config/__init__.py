"""The job file: the single description of a training, its data and its serving.

Reads `job.yaml` and `--set` into frozen objects, or raises one `ConfigError` that lists every problem.
"""

from elasticrec.config.files import match_files
from elasticrec.config.fingerprint import decisive_keys, differences, fingerprint, meaning_keys, structure_keys
from elasticrec.config.job import Job, job_schema
from elasticrec.config.load import default_job, load_job, parse_job
from elasticrec.config.secret import Secret
from elasticrec.config.serve import Serve

__all__ = [
    "Job",
    "Secret",
    "Serve",
    "decisive_keys",
    "default_job",
    "differences",
    "fingerprint",
    "job_schema",
    "load_job",
    "match_files",
    "meaning_keys",
    "parse_job",
    "structure_keys",
]
