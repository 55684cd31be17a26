"""Warm start: a new run begins with the parameters of another one, whose model has the same structure."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elasticrec.config import Job, structure
from elasticrec.errors import ConfigError, ElasticRecError, ModelError
from elasticrec.manifest import MANIFEST
from elasticrec.run import Run, resolve_run
from elasticrec.training import checkpoint as checkpoints
from elasticrec.training.checkpoint import Checkpoint, State
from elasticrec.training.dense import FlatParameters
from elasticrec.training.metrics import MetricSums


def find_start(job: Job) -> Checkpoint:
    """The checkpoint that a new run of the job begins with, by what its manifest says."""
    with _naming_the_key(job):
        checkpoint = _find(str(job.train.warm_start))
        if checkpoint.path.resolve().is_relative_to(Run.of(job).path.resolve()):
            raise ConfigError(f"{checkpoint.path}: expected another run, got the job's own, which `train` goes on with")
        checkpoints.check_job(checkpoint, structure(job))
    return checkpoint


def warm_start(job: Job, state: State) -> Checkpoint:
    """Load rows, network and the state of both optimizers; settings such as learning rates are the new job's."""
    checkpoint = find_start(job)
    with _naming_the_key(job):
        checkpoints.restore(checkpoint, job, state, equal=structure)
    # epochs are counted from 0 again, and the age of a row with them
    state.embedding.table.restart_time()
    # the metrics are of this run's samples alone
    state.sums = [MetricSums() for _ in job.data.labels]
    return checkpoint


def start_files(job: Job, dense: FlatParameters) -> tuple[Checkpoint, list[Path]]:
    """As `warm_start`, of the network alone; returns the files of the rows, for whoever reads them."""
    checkpoint = find_start(job)
    with _naming_the_key(job):
        checkpoints.restore_dense(checkpoint, job, dense, equal=structure)
    return checkpoint, checkpoint.rows


@contextmanager
def _naming_the_key(job: Job) -> Iterator[None]:
    try:
        yield
    except ElasticRecError as error:
        raise type(error)(f"{job.source}: train.warm_start: {error}") from None


def _find(text: str) -> Checkpoint:
    """The checkpoint of a directory, or the newest of a run."""
    if (Path(text) / MANIFEST).is_file():
        return checkpoints.open_checkpoint(Path(text))
    run = resolve_run(text)
    checkpoint = checkpoints.latest(run)
    if checkpoint is None:
        raise ModelError(f"{run.path}: expected a checkpoint, got none; train it first")
    return checkpoint
