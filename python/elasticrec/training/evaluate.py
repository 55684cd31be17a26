"""Evaluation: the network over data it does not learn from."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from elasticrec import _core
from elasticrec.training.embedding import Embedding
from elasticrec.training.metrics import Metrics, MetricSums
from elasticrec.training.network import Scorer

Scores = npt.NDArray[np.float32]


@torch.inference_mode()
def logits_of(embedding: Embedding, scorer: Scorer, batch: _core.Batch) -> Scores:
    """Logits `[B, L]` of a batch; creates no row."""
    scorer.eval()
    logits = scorer.logits(embedding.pull(batch), torch.from_numpy(batch.dense))
    return logits.numpy()


def evaluate(embedding: Embedding, scorer: Scorer, batches: Iterable[_core.Batch], num_labels: int) -> list[Metrics]:
    """Metrics of each label."""
    sums = [MetricSums() for _ in range(num_labels)]
    for batch in batches:
        logits = logits_of(embedding, scorer, batch)
        for label, one in enumerate(sums):
            one.add(logits[:, label], batch.labels[:, label], batch.weights)
    return [one.result() for one in sums]
