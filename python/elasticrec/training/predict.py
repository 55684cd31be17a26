"""Scores of a checkpoint, computed by torch; the server must match them."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.data.batches import line_parser
from elasticrec.data.units import UnitSplit, plan_units
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


@dataclass
class CheckpointModel:
    """A checkpoint loaded into memory."""

    job: Job
    checkpoint: Checkpoint
    state: State
    scorer: Scorer
    parser: _core.Parser
    parse: Callable[[bytes], _core.Batch]

    def predict(self, text: bytes) -> Scores:
        """Return probabilities `[N, L]` of lines in the training format; labels are ignored."""
        return self.scores(self.parse(text))

    def read_row(self, path: Path, row: int) -> _core.Batch:
        """Read a row of a Parquet file, counted from 0; raise `SampleError` for a bad one."""
        from elasticrec.data.parquet import row_of

        return row_of(self.job, self.parser, path, row)

    def predict_file(self, path: str) -> Iterator[Scores]:
        """Yield the probabilities of a Parquet file by batch; raise `SampleError` at a bad row."""
        from elasticrec.data.parquet import ParquetReader

        units = plan_units([Path(path)], replace(UnitSplit.of(self.job), shuffle=False), 0, 0)
        job = self.job.without_holdout()
        with closing(
            ParquetReader(job, self.parser, units, shuffle=False, skip=0, held_out=False, labels=False)
        ) as batches:
            for batch in batches:
                if batch.bad:
                    raise SampleError(batch.bad[0])
                yield self.scores(batch)

    def scores(self, batch: _core.Batch) -> Scores:
        """Return probabilities `[N, L]` of a batch."""
        logits = torch.from_numpy(logits_of(self.state.embedding, self.scorer, batch)).double()
        return self.scorer.probabilities(logits).float().numpy()


def load_checkpoint(run: Run, *, best: bool = False) -> CheckpointModel:
    """Load the newest or the best checkpoint of a run; retry if a running training removes it."""
    hint = "; train it with `data.eval`" if best else "; train it first"
    while True:
        checkpoint = checkpoints.newest_or_best(run, is_best=best, hint=hint)
        try:
            return load(run.job(), checkpoint)
        except (ModelError, OSError):
            if (checkpoint.path / MANIFEST).exists():
                raise


def load(job: Job, checkpoint: Checkpoint) -> CheckpointModel:
    """Verify and load a checkpoint of a job."""
    model = build_model(job)
    state = State(Embedding(job, model.columns), FlatParameters(model, job), [MetricSums() for _ in job.data.labels])
    checkpoints.restore(checkpoint, job, state)
    parser = _core.Parser(json.dumps(job.features()))
    return CheckpointModel(
        job, checkpoint, state, Scorer(model, job.data.negative_rate), parser, line_parser(job, parser)
    )
