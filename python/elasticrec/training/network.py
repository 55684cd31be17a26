"""The network of a job and its loss: the part of a training step that torch does."""

import math
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
from elasticrec.training.own_model import build_own


def build_model(job: Job) -> Model:
    """The model of a job with the initial weights that its seed decides."""
    shape = shape_of(job)
    options = Options(**job.model.model_dump(exclude={"kind", "options"}), extra=job.model.options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.train.seed)
        try:
            return build_own(job, shape, options) if job.model.own else ZOO[job.model.kind](shape, options)
        except (RuntimeError, MemoryError) as error:
            if "memory" not in str(error) and not isinstance(error, MemoryError):
                raise
            raise ModelError(f"{job.source}: model: does not fit into the memory of this machine") from None


def shape_of(job: Job) -> Shape:
    """The sizes of a job's data: each slot is one vector, a sequence one for each of its places."""
    first: dict[str, int] = {}
    num_cells = 0
    for slot in job.data.inputs:
        first[slot.name] = num_cells
        num_cells += slot.sequence or 1
    sequences = tuple(
        Sequence(first[slot.name], slot.sequence, first.get(slot.share or ""))
        for slot in job.data.inputs
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
    """What is exported: rows by cell and dense values to probabilities.

    Where only a share of the samples without a click was kept, probabilities are those of all samples, while logits are
    of the data as it is: with rate r and q learned, p / (1 - p) = r q / (1 - q) for the click, and any other label,
    which comes with a click, is scaled as the click's.
    """

    def __init__(self, model: Model, negative_rate: float = 1.0) -> None:
        super().__init__()
        self.model = model
        self.negative_rate = negative_rate

    def forward(self, pooled: Tensor, dense: Tensor) -> Tensor:
        """`[B, L]`"""
        return self.probabilities(self.logits(pooled, dense))

    def logits(self, pooled: Tensor, dense: Tensor) -> Tensor:
        """`[B, L]`"""
        logits: Tensor = self.model(split_columns(pooled, self.model.columns), dense)
        return logits

    def probabilities(self, logits: Tensor) -> Tensor:
        """Scores as users see them, `[B, L]`."""
        learned = torch.sigmoid(logits)
        if self.negative_rate == 1.0:
            return learned
        click = torch.sigmoid(logits[:, :1] + math.log(self.negative_rate))
        kept = click + self.negative_rate * (1 - click)
        return torch.cat([click, learned[:, 1:] * kept], 1)
