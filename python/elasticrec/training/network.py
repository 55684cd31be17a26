"""The network of a job and its loss: the part of a training step that torch does."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.errors import ModelError
from elasticrec.machine import num_cores
from elasticrec.models import ZOO, Model, Options, Sequence, Shape
from elasticrec.training.embedding import split_columns


def build_model(job: Job) -> Model:
    """The model of a job with the initial weights that its seed decides."""
    shape = shape_of(job)
    options = Options(**job.model.model_dump(exclude={"kind"}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.train.seed)
        try:
            return ZOO[job.model.kind](shape, options)
        except (RuntimeError, MemoryError) as error:
            if "memory" not in str(error) and not isinstance(error, MemoryError):
                raise
            raise ModelError(f"{job.source}: model: does not fit into the memory of this machine") from None


def shape_of(job: Job) -> Shape:
    """The sizes of a job's data: each slot is one vector, a sequence one for each of its places."""
    first: dict[str, int] = {}
    num_cells = 0
    for slot in job.data.slots:
        first[slot.name] = num_cells
        num_cells += slot.sequence or 1
    sequences = tuple(
        Sequence(first[slot.name], slot.sequence, first.get(slot.share or ""))
        for slot in job.data.slots
        if slot.sequence
    )
    return Shape(num_cells, len(job.data.dense), len(job.data.labels), sequences)


def num_threads(job: Job) -> int:
    """Threads of the network: as the job says, or all cores."""
    return job.train.threads or num_cores()


@dataclass(frozen=True)
class Loss:
    """The mean over a batch, and the weight that it is the mean over."""

    mean: Tensor
    weight: float


def loss_of(logits: Tensor, batch: _core.Batch) -> Loss:
    """Cross entropy, summed over labels, averaged over the times that samples were shown."""
    weights = torch.from_numpy(batch.weights)
    total = functional.binary_cross_entropy_with_logits(
        logits, torch.from_numpy(batch.labels), weight=weights[:, None], reduction="sum"
    )
    weight = float(weights.sum())
    return Loss(total / weight, weight)


class Scorer(nn.Module):
    """What is exported: pooled rows and dense values to probabilities."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, pooled: Tensor, dense: Tensor) -> Tensor:
        """`[B, L]`"""
        return torch.sigmoid(self.logits(pooled, dense))

    def logits(self, pooled: Tensor, dense: Tensor) -> Tensor:
        """`[B, L]`"""
        logits: Tensor = self.model(split_columns(pooled, self.model.columns), dense)
        return logits
