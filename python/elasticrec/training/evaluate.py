"""Evaluation: the network over data it does not learn from."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.data.batches import open_batches
from elasticrec.data.units import plan_units
from elasticrec.errors import ModelError
from elasticrec.training.embedding import Embedding
from elasticrec.training.metrics import Metrics, MetricSums
from elasticrec.training.network import Scorer
from elasticrec.training.own_metrics import OwnMetric
from elasticrec.training.read import cut_of, refuse_bad

Scores = npt.NDArray[np.float32]


@torch.inference_mode()
def logits_of(embedding: Embedding, scorer: Scorer, batch: _core.Batch) -> Scores:
    """Logits `[B, L]` of a batch; creates no row."""
    scorer.eval()
    logits = scorer.logits(embedding.pull(batch), torch.from_numpy(batch.dense))
    return logits.numpy()


def probabilities(logits: Scores) -> Scores:
    """Scores as users see them."""
    return (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)


def evaluate(
    embedding: Embedding,
    scorer: Scorer,
    batches: Iterable[_core.Batch],
    num_labels: int,
    own: Sequence[OwnMetric] = (),
) -> list[Metrics]:
    """Metrics of each label."""
    sums = [MetricSums() for _ in range(num_labels)]
    measurements = [[metric.start() for metric in own] for _ in range(num_labels)]
    for batch in batches:
        logits = logits_of(embedding, scorer, batch)
        for label, one in enumerate(sums):
            one.add(logits[:, label], batch.labels[:, label], batch.weights)
        if own and batch.num_samples:
            scores = probabilities(logits)
            for label, started in enumerate(measurements):
                for measurement in started:
                    measurement.update(scores[:, label], batch.labels[:, label], batch.weights)
    results = []
    for one, started in zip(sums, measurements, strict=True):
        values: dict[str, float] = {}
        for metric, measurement in zip(own, started, strict=True):
            found = measurement.result()
            if twice := sorted(values.keys() & found.keys()):
                raise ModelError(f"{metric.path}: `{twice[0]}` is the name of two metrics, expected one of each")
            values |= found
        results.append(one.result(calibration=True, own=values))
    return results


@dataclass
class Evaluator:
    """The data that a job is evaluated on, and what is measured."""

    job: Job
    files: list[Path]
    own: list[OwnMetric]
    say: Callable[[str], None]
    watch: Callable[[int], None] = field(default=lambda _: None)
    """Told the records so far, batch by batch; may raise to end it."""

    def run(self, embedding: Embedding, scorer: Scorer, parser: _core.Parser) -> list[Metrics]:
        """Metrics of each label over all of the data, in file order."""
        units = plan_units(self.files, replace(cut_of(self.job), shuffle=False), 0, 0)
        reader = open_batches(self.job, parser, units, shuffle=False, held_out=True)
        records = bad = 0

        def counted() -> Iterator[_core.Batch]:
            nonlocal records, bad
            for batch in reader:
                records += batch.num_records
                bad += batch.num_bad
                for line in batch.bad:
                    self.say(f"bad record: {line}")
                self.watch(records)
                yield batch

        with closing(reader):
            metrics = evaluate(embedding, scorer, counted(), len(self.job.data.labels), self.own)
        refuse_bad(self.job, records, bad, "data.eval")
        return metrics
