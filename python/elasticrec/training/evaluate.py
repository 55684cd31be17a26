"""Evaluate the network on data without training it."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.data.batches import open_batches, refuse_bad_records
from elasticrec.data.units import UnitSplit, plan_units
from elasticrec.errors import ModelError
from elasticrec.training.custom_metrics import CustomMetric
from elasticrec.training.embedding import Embedding
from elasticrec.training.metrics import Metrics, MetricSums
from elasticrec.training.network import Scorer

Scores = npt.NDArray[np.float32]

logger = logging.getLogger(__name__)


@torch.inference_mode()
def logits_of(embedding: Embedding, scorer: Scorer, batch: _core.Batch) -> Scores:
    """Return the logits `[B, L]` of a batch; creates no rows."""
    scorer.eval()
    logits = scorer.logits(embedding.pull(batch), torch.from_numpy(batch.dense))
    return logits.numpy()


def probabilities(logits: Scores) -> Scores:
    """Return the probabilities of logits."""
    return (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)


def evaluate(
    embedding: Embedding,
    scorer: Scorer,
    batches: Iterable[_core.Batch],
    num_labels: int,
    own: Sequence[CustomMetric] = (),
) -> list[Metrics]:
    """Return the metrics of each label."""
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
                raise ModelError(f"{metric.path}: `{twice[0]}`: two metrics have this name, expected distinct names")
            values |= found
        results.append(one.result(calibration=True, own=values))
    return results


@dataclass
class Evaluator:
    """The evaluation data of a job and its custom metrics."""

    job: Job
    files: list[Path]
    own: list[CustomMetric]
    watch: Callable[[int], None] = field(default=lambda _: None)
    """Called after every batch with the number of records so far; may raise to stop."""

    def run(self, embedding: Embedding, scorer: Scorer, parser: _core.Parser) -> list[Metrics]:
        """Return the metrics of each label over all data, in file order."""
        units = plan_units(self.files, replace(UnitSplit.of(self.job), shuffle=False), 0, 0)
        reader = open_batches(self.job, parser, units, shuffle=False, held_out=True)
        records = bad = 0

        def counted() -> Iterator[_core.Batch]:
            nonlocal records, bad
            for batch in reader:
                records += batch.num_records
                bad += batch.num_bad
                for line in batch.bad:
                    logger.warning("bad record: %s", line)
                self.watch(records)
                yield batch

        with closing(reader):
            metrics = evaluate(embedding, scorer, counted(), len(self.job.data.labels), self.own)
        refuse_bad_records(self.job, records, bad, "data.eval")
        return metrics
