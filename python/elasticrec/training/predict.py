"""Scores from a checkpoint: the trainer's own view of a sample, which the server must match."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.data.batches import line_parser
from elasticrec.data.units import plan_units
from elasticrec.errors import ModelError, SampleError
from elasticrec.manifest import MANIFEST
from elasticrec.run import Run
from elasticrec.training import checkpoint as checkpoints
from elasticrec.training.checkpoint import Checkpoint, State
from elasticrec.training.dense import FlatParameters
from elasticrec.training.embedding import Embedding
from elasticrec.training.evaluate import Scores, logits_of
from elasticrec.training.metrics import MetricSums
from elasticrec.training.network import Scorer, build_model
from elasticrec.training.read import cut_of


@dataclass
class CheckpointModel:
    """A checkpoint in memory."""

    job: Job
    checkpoint: Checkpoint
    state: State
    scorer: Scorer
    parser: _core.Parser
    parse: Callable[[bytes], _core.Batch]

    def predict(self, text: bytes) -> Scores:
        """Probabilities `[N, L]` of lines in the training format; their labels are passed over."""
        return self.scores(self.parse(text))

    def read_row(self, path: Path, row: int) -> _core.Batch:
        """A row of a Parquet file, counted from 0; a bad one raises `SampleError`."""
        from elasticrec.data.parquet import row_of

        return row_of(self.job, self.parser, path, row)

    def predict_file(self, path: str) -> Iterator[Scores]:
        """Probabilities of the rows of a Parquet file, some at a time; a bad row ends it."""
        from elasticrec.data.parquet import ParquetReader

        units = plan_units([Path(path)], replace(cut_of(self.job), shuffle=False), 0, 0)
        job = self.job.without_holdout()
        with closing(
            ParquetReader(job, self.parser, units, shuffle=False, skip=0, held_out=False, labels=False)
        ) as batches:
            for batch in batches:
                if batch.bad:
                    raise SampleError(batch.bad[0])
                yield self.scores(batch)

    def scores(self, batch: _core.Batch) -> Scores:
        """Probabilities `[N, L]` of a batch."""
        logits = torch.from_numpy(logits_of(self.state.embedding, self.scorer, batch)).double()
        return self.scorer.probabilities(logits).float().numpy()


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
    parser = _core.Parser(json.dumps(job.features()))
    return CheckpointModel(
        job, checkpoint, state, Scorer(model, job.data.negative_rate), parser, line_parser(job, parser)
    )
