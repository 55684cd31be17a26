"""Scores from a checkpoint: the trainer's own view of a sample, which the server must match."""

from collections.abc import Callable
from dataclasses import dataclass

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
from elasticrec.training.evaluate import Scores, logits_of, probabilities
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
        return probabilities(logits_of(self.state.embedding, self.scorer, self.parse(text)))


def load_checkpoint(run: Run, *, best: bool = False) -> CheckpointModel:
    """The newest or the best checkpoint of a run; one that a training at work drops meanwhile gives way to the next."""
    while True:
        checkpoint = checkpoints.best(run, run.job()) if best else checkpoints.latest(run)
        if checkpoint is None:
            what = "a checkpoint that was evaluated" if best else "a checkpoint"
            how = "; train it with `data.eval`" if best else "; train it first"
            raise ModelError(f"{run.path}: expected {what}, got none{how}")
        try:
            return load(run.job(), checkpoint)
        except (ModelError, OSError):
            if (checkpoint.path / MANIFEST).exists():
                raise


def load(job: Job, checkpoint: Checkpoint) -> CheckpointModel:
    """A checkpoint of a job, all files checked."""
    model = build_model(job)
    state = State(Embedding(job, model.columns), FlatParameters(model, job), [MetricSums() for _ in job.data.labels])
    checkpoints.restore(checkpoint, job, state)
    return CheckpointModel(job, checkpoint, state, Scorer(model), line_parser(job))
