"""Forward through the network: the loss of a batch, which is a number or the end."""

import math
from contextlib import nullcontext

import torch
from torch import Tensor

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.errors import ModelError
from elasticrec.training.network import Loss, Scorer, loss_of
from elasticrec.training.own_model import seeded


def forward(
    job: Job, scorer: Scorer, pooled: Tensor, batch: _core.Batch, *, is_seeded: bool = True
) -> tuple[Tensor, Loss]:
    """Logits and loss of a batch; a loss that is no number names the batch and its lines."""
    with seeded(job, batch) if is_seeded else nullcontext():
        logits = scorer.logits(pooled, torch.from_numpy(batch.dense))
        loss = loss_of(logits, batch)
        mean = loss.mean.item()
    if not math.isfinite(mean):
        raise ModelError(
            f"unit {batch.unit} batch {batch.index} ({batch.places}): expected a finite loss, got {mean}; "
            "lower the learning rates or look at the data"
        )
    return logits, loss
