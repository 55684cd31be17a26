"""Forward pass of the network; a non-finite loss ends the training."""

import math
from contextlib import nullcontext

import torch
from torch import Tensor

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.errors import ModelError
from elasticrec.training.custom_model import seed_by_batch
from elasticrec.training.network import Loss, Scorer, loss_of


def forward(
    job: Job, scorer: Scorer, pooled: Tensor, batch: _core.Batch, *, is_seeded: bool = True
) -> tuple[Tensor, Loss]:
    """Return the logits and the loss of a batch; the error for a non-finite loss names the batch and its lines."""
    with seed_by_batch(job, batch) if is_seeded else nullcontext():
        logits = scorer.logits(pooled, torch.from_numpy(batch.dense))
        loss = loss_of(logits, batch)
        mean = loss.mean.item()
    if not math.isfinite(mean):
        raise ModelError(
            f"unit {batch.unit} batch {batch.index} ({batch.location}): expected a finite loss, got {mean}; "
            "lower the learning rates or check the data"
        )
    return logits, loss
