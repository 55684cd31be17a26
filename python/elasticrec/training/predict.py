"""Scores from a checkpoint: the trainer's own view of a sample, which the server must match."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.data.batches import line_parser
from elasticrec.errors import ModelError
from elasticrec.manifest import MANIFEST
from elasticrec.run import Run
from elasticrec.training import checkpoint as checkpoints
from elasticrec.training.checkpoint import Checkpoint, State
from elasticrec.training.dense import FlatParameters
from elasticrec.training.embedding import Embedding
from elasticrec.training.evaluate import Scores, logits_of
from elasticrec.training.metrics import MetricSums
from elasticrec.training.network import Scorer, build_model


@dataclass
class CheckpointModel:
    """A checkpoint in memory."""

    job: Job
    checkpoint: Checkpoint
    state: State
    scorer: Scorer
    parse: Callable[[bytes], _core.Batch]

    def predict(self, text: bytes) -> Scores:
        """Probabilities `[N, L]` of lines in the training format; their labels are passed over."""
        batch = self.parse(text)
        logits = logits_of(self.state.embedding, self.scorer, batch).astype(np.float64)
        return (1 / (1 + np.exp(-logits))).astype(np.float32)


def load_checkpoint(run: Run) -> CheckpointModel:
    """The newest checkpoint of a run; one that a training at work drops meanwhile gives way to the next."""
    while True:
        checkpoint = checkpoints.latest(run)
        if checkpoint is None:
            raise ModelError(f"{run.path}: expected a checkpoint, got none; train it first")
        try:
            return _load(run, checkpoint)
        except (ModelError, OSError):
            if (checkpoint.path / MANIFEST).exists():
                raise


def _load(run: Run, checkpoint: Checkpoint) -> CheckpointModel:
    job = run.job()
    model = build_model(job)
    state = State(Embedding(job, model.columns), FlatParameters(model, job), [MetricSums() for _ in job.data.labels])
    checkpoints.restore(checkpoint, job, state)
    return CheckpointModel(job, checkpoint, state, Scorer(model), line_parser(job))
