"""Warm start: begin a new run with the parameters of another run whose model has the same structure."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elasticrec.config import Job, structure_keys
from elasticrec.errors import ConfigError, ElasticRecError, ModelError
from elasticrec.manifest import MANIFEST
from elasticrec.run import Run, resolve_run
from elasticrec.training import checkpoint as checkpoints
from elasticrec.training.checkpoint import Checkpoint, State
from elasticrec.training.dense import FlatParameters
from elasticrec.training.metrics import MetricSums


def find_start(job: Job) -> Checkpoint:
    """Find the checkpoint named by `train.warm_start` and check its manifest."""
    with _name_key_in_errors(job):
        checkpoint = _find(str(job.train.warm_start))
        if checkpoint.path.resolve().is_relative_to(Run.of(job).path.resolve()):
            raise ConfigError(f"{checkpoint.path}: expected another run, got the job's own, which `train` resumes")
        checkpoints.check_job(checkpoint, structure_keys(job))
    return checkpoint


def warm_start(job: Job, state: State) -> Checkpoint:
    """Load rows, network and optimizer states; settings such as learning rates come from the new job."""
    checkpoint = find_start(job)
    with _name_key_in_errors(job):
        checkpoints.restore(checkpoint, job, state, equal=structure_keys)
    # Epochs count from 0 again, and with them the age of rows.
    state.embedding.table.restart_time()
    # Metrics cover the samples of this run only.
    state.sums = [MetricSums() for _ in job.data.labels]
    return checkpoint


def start_files(job: Job, dense: FlatParameters) -> tuple[Checkpoint, list[Path]]:
    """Load only the network of the warm start. Return the checkpoint and the files of its rows."""
    checkpoint = find_start(job)
    with _name_key_in_errors(job):
        checkpoints.restore_dense(checkpoint, job, dense, equal=structure_keys)
    return checkpoint, checkpoint.rows


@contextmanager
def _name_key_in_errors(job: Job) -> Iterator[None]:
    try:
        yield
    except ElasticRecError as error:
        raise type(error)(f"{job.source}: train.warm_start: {error}") from None


def _find(text: str) -> Checkpoint:
    """Return the checkpoint in a directory, or the newest one of a run."""
    if (Path(text) / MANIFEST).is_file():
        return checkpoints.open_checkpoint(Path(text))
    run = resolve_run(text)
    checkpoint = checkpoints.latest(run)
    if checkpoint is None:
        raise ModelError(f"{run.path}: expected a checkpoint, got none; train it first")
    return checkpoint
