"""The network of a job and its loss."""

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
from elasticrec.training.custom_model import build_custom
from elasticrec.training.embedding import split_columns


def build_model(job: Job) -> Model:
    """Build the model of a job; the seed determines its initial weights."""
    shape = shape_of(job)
    options = Options(**job.model.model_dump(exclude={"kind", "options"}), extra=job.model.options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.train.seed)
        try:
            return build_custom(job, shape, options) if job.model.custom_class else ZOO[job.model.kind](shape, options)
        except (RuntimeError, MemoryError) as error:
            if "memory" not in str(error) and not isinstance(error, MemoryError):
                raise
            raise ModelError(f"{job.source}: model: does not fit into the memory of this machine") from None


def shape_of(job: Job) -> Shape:
    """Return the sizes of a job's data: one vector per slot, one per position of a sequence."""
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
    """Return the number of threads of the network: `train.threads`, or all cores."""
    return job.train.threads or num_cores()


@dataclass(frozen=True)
class Loss:
    """The mean loss of a batch, and the total weight of its samples."""

    mean: Tensor
    weight: float


def loss_of(logits: Tensor, batch: _core.Batch) -> Loss:
    """Return the cross entropy, summed over labels and averaged over the weights of the samples."""
    weights = torch.from_numpy(batch.weights)
    total = functional.binary_cross_entropy_with_logits(
        logits, torch.from_numpy(batch.labels), weight=weights[:, None], reduction="sum"
    )
    weight = float(weights.sum())
    return Loss(total / weight, weight)


class Scorer(nn.Module):
    """The exported module: from rows by cell and dense values to probabilities.

    If only a share r of the samples without a click was kept (`data.negative_rate`), logits refer to the sampled data
    and probabilities to all data: a learned click probability q becomes p with p / (1 - p) = r q / (1 - q). Any other
    label occurs only with a click, and is scaled by the same factor as the click.
    """

    def __init__(self, model: Model, negative_rate: float = 1.0) -> None:
        super().__init__()
        self.model = model
        self.negative_rate = negative_rate

    def forward(self, pooled: Tensor, dense: Tensor) -> Tensor:
        """Return probabilities, `[B, L]`."""
        return self.probabilities(self.logits(pooled, dense))

    def logits(self, pooled: Tensor, dense: Tensor) -> Tensor:
        """Return logits, `[B, L]`."""
        logits: Tensor = self.model(split_columns(pooled, self.model.columns), dense)
        return logits

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return probabilities that are corrected for `negative_rate`, `[B, L]`."""
        learned = torch.sigmoid(logits)
        if self.negative_rate == 1.0:
            return learned
        click = torch.sigmoid(logits[:, :1] + math.log(self.negative_rate))
        kept = click + self.negative_rate * (1 - click)
        return torch.cat([click, learned[:, 1:] * kept], 1)
