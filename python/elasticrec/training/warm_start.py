"""Warm start: a new run begins with the parameters of another one, whose model has the same structure."""

from pathlib import Path

from elasticrec.config import Job, structure
from elasticrec.errors import ElasticRecError, ModelError
from elasticrec.manifest import MANIFEST
from elasticrec.run import resolve_run
from elasticrec.training import checkpoint as checkpoints
from elasticrec.training.checkpoint import Checkpoint, State
from elasticrec.training.metrics import MetricSums


def warm_start(job: Job, state: State) -> Checkpoint:
    """Load rows, network and the state of both optimizers; settings such as learning rates are the new job's."""
    assert job.train.warm_start is not None
    try:
        checkpoint = _find(job.train.warm_start)
        checkpoints.restore(checkpoint, job, state, equal=structure)
    except ElasticRecError as error:
        raise type(error)(f"{job.source}: train.warm_start: {error}") from None
    # the metrics are of this run's samples alone
    state.sums = [MetricSums() for _ in job.data.labels]
    return checkpoint


def _find(text: str) -> Checkpoint:
    """The checkpoint of a directory, or the newest of a run."""
    if (Path(text) / MANIFEST).is_file():
        return checkpoints.open_checkpoint(Path(text))
    run = resolve_run(text)
    checkpoint = checkpoints.latest(run)
    if checkpoint is None:
        raise ModelError(f"{run.path}: expected a checkpoint, got none; train it first")
    return checkpoint
