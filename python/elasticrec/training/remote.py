"""The network of a trainer whose rows and parameters are on parameter servers."""

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.models import Model
from elasticrec.training.clock import StageClock
from elasticrec.training.dense import FlatParameters
from elasticrec.training.forward import forward
from elasticrec.training.groups import UnitBatch
from elasticrec.training.metrics import FLAT_SIZE, flat_sums
from elasticrec.training.network import Scorer, build_model, num_threads

Sums = tuple[npt.NDArray[np.uint32], npt.NDArray[np.float64]]

_NOTHING = np.zeros(0, np.float32)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchResult:
    """The gradients of a batch, valid until the next batch."""

    batch: _core.Batch
    gradient: npt.NDArray[np.float32]
    """Gradient of the mean loss for the rows, `[B, S, W]`."""
    dense: npt.NDArray[np.float32]
    """Gradient of the parameters and changes of the buffers; empty for a batch without samples."""
    scale: float
    """Factor from the mean to the sum over samples; NaN if nothing may be applied."""
    weight: float
    """Total weight of the samples."""
    sums: Sums
    """Indices into the metric sums, and the values to add."""


class RemoteNetwork:
    """Forward and backward of batches whose rows and dense values come from servers."""

    def __init__(self, job: Job, clock: StageClock | None = None, model: Model | None = None) -> None:
        self.clock = clock or StageClock()
        torch.set_num_threads(max(num_threads(job) // self.clock.lanes, 1))
        self._job = job
        # torch has one generator for all threads, so parallel lanes cannot seed by batch.
        self._is_seeded = self.clock.lanes == 1
        self.model = model or build_model(job)
        self._scorer = Scorer(self.model, job.data.negative_rate)
        self.dense = FlatParameters(self.model, job)
        self._num_cells = sum(slot.sequence or 1 for slot in job.data.inputs)
        self._buffer = torch.empty(0)
        self._scorer.train()
        self.buffer_share = 1.0
        """Weight of buffer changes. Several networks change the buffers at the same time, based on stale values; adding
        their changes at full weight would oscillate."""
        self.num_samples = 0
        self.num_batches = 0
        self.num_pulls = 0
        self.num_pushes = 0

    def receive(self, servers: _core.PsClient, pulling: _core.PullTicket, batch: _core.Batch, *, dense: bool) -> Tensor:
        """Wait for the rows of a batch, and for the dense values if requested."""
        self.num_pulls += 1
        with self.clock.stage("pull"):
            pooled = self.rows_of(batch, servers.width)
            servers.receive(pulling, batch, pooled.numpy(), self.dense.values.numpy() if dense else None)
        return pooled

    def learn(self, batch: _core.Batch, pooled: Tensor) -> BatchResult:
        """Run forward and backward."""
        for line in batch.bad:
            logger.warning("bad record: %s", line)
        self.num_batches += 1
        if not batch.num_samples:
            sums = self._with_records(batch, np.zeros(0, np.uint32), np.zeros(0))
            return BatchResult(batch, pooled.numpy(), _NOTHING, 1.0, 0.0, sums)
        pooled.requires_grad_()
        buffers = self.dense.buffers()
        with self.clock.stage("forward"):
            logits, loss = forward(self._job, self._scorer, pooled, batch, is_seeded=self._is_seeded)
        with self.clock.stage("backward"):
            self.dense.zero_gradient()
            torch.autograd.backward(loss.mean)
        with self.clock.stage("metrics"):
            sums = self._with_records(batch, *flat_sums(logits.detach().numpy(), batch.labels, batch.weights))
        # A batch is applied completely or not at all: with a NaN scale the push only counts it.
        change = self.dense.change(buffers, self.buffer_share)
        is_finite = self.dense.gradient_is_finite() and math.isfinite(float(change[self.dense.num_parameters :].sum()))
        if not is_finite:
            # Every server receives NaN for its part of the dense values, and the local buffers are restored.
            change = np.full(len(change), np.nan, np.float32)
            self.dense.values[self.dense.num_parameters :] = buffers
        scale = loss.weight if is_finite else math.nan
        gradient = torch.zeros_like(pooled) if pooled.grad is None else pooled.grad
        self.num_samples += batch.num_samples
        return BatchResult(batch, gradient.numpy(), change, scale, loss.weight, sums)

    def step(
        self,
        servers: _core.PsClient,
        seen: int,
        one: UnitBatch,
        pulling: _core.PullTicket,
        *,
        dense: bool = True,
        group: tuple[int, int] | None = None,
    ) -> _core.PushTicket:
        """Receive the rows of a batch, train it and send the push. The push is not yet acknowledged."""
        result = self.learn(one.batch, self.receive(servers, pulling, one.batch, dense=dense))
        with self.clock.stage("push"):
            self.num_pushes += 1
            return servers.push(
                pulling,
                one.batch,
                result.gradient,
                result.dense,
                scale=result.scale,
                last=one.is_last,
                seen=seen,
                sums=result.sums,
                weight=result.weight,
                group=group,
            )

    def rows_of(self, batch: _core.Batch, width: int) -> Tensor:
        """Return a buffer for the rows of a batch, `[B, S, W]`."""
        shape = (batch.num_samples, self._num_cells, width)
        size = math.prod(shape)
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size)
        return self._buffer[:size].view(shape)

    def _with_records(
        self, batch: _core.Batch, indices: npt.NDArray[np.uint32], values: npt.NDArray[np.float64]
    ) -> Sums:
        """Append the counts of records and of bad records to the sums of a batch."""
        end = FLAT_SIZE * len(self._job.data.labels)
        counts = np.array([batch.num_records, batch.num_bad], np.float64)
        return np.append(indices, np.array([end, end + 1], np.uint32)), np.append(values, counts)


def make_networks(job: Job, clock: StageClock) -> list[RemoteNetwork]:
    """Create a network for each lane of a clock; a custom model is built once and copied."""
    model = build_model(job)
    if clock.lanes > 1:
        torch.seed()
    # Copy before the parameters move into a flat vector.
    models = [model, *(copy.deepcopy(model) for _ in range(clock.lanes - 1))]
    return [RemoteNetwork(job, clock, one) for one in models]


def network_figures(networks: Sequence[RemoteNetwork], clock: StageClock) -> dict[str, Any]:
    """Return the counts, the time and the stage shares of a trainer's networks."""
    shares = {f"share_{name}": round(share, 6) for name, share in clock.shares().items()}
    return {
        "clock_s": clock.elapsed,
        "samples": sum(network.num_samples for network in networks),
        "batches": sum(network.num_batches for network in networks),
        "pulls": sum(network.num_pulls for network in networks),
        "pushes": sum(network.num_pushes for network in networks),
        **shares,
    }
