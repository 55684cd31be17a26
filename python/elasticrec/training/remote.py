"""The network of a trainer whose rows and parameters are on servers: a batch comes, what it learned goes."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.training.clock import StageClock
from elasticrec.training.dense import FlatParameters
from elasticrec.training.flight import Named
from elasticrec.training.forward import forward
from elasticrec.training.metrics import FLAT_SIZE, flat_sums
from elasticrec.training.network import Scorer, build_model, num_threads

Places = npt.NDArray[np.uint32]
Values = npt.NDArray[np.float64]


class RemoteNetwork:
    """Forward and backward of batches whose rows and dense values come from servers."""

    def __init__(self, job: Job, say: Callable[[str], None]) -> None:
        torch.set_num_threads(num_threads(job))
        self._job, self._say = job, say
        model = build_model(job)
        self._scorer = Scorer(model, job.data.negative_rate)
        self._dense = FlatParameters(model, job)
        self._num_cells = sum(slot.sequence or 1 for slot in job.data.inputs)
        self._buffer = torch.empty(0)
        self._scorer.train()
        self.clock = StageClock()
        self.num_samples = 0

    def step(self, servers: _core.PsClient, epoch: int, named: Named, pulling: _core.Pulling) -> _core.Pushing:
        """Receive a batch's rows and send what it learned; not yet acknowledged."""
        batch, dense, clock = named.batch, self._dense, self.clock
        for line in batch.bad:
            self._say(f"bad record: {line}")
        with clock.stage("pull"):
            pooled = self._rows_of(batch, servers.width)
            servers.receive(pulling, batch, pooled.numpy(), dense.values.numpy())
        if not batch.num_samples:
            sums = self._with_records(batch, np.zeros(0, np.uint32), np.zeros(0))
            nothing = np.zeros(0, np.float32)
            return servers.push(
                pulling, batch, pooled.numpy(), nothing, scale=1.0, last=named.is_last, seen=epoch, sums=sums
            )
        pooled.requires_grad_()
        with clock.stage("forward"):
            logits, loss = forward(self._job, self._scorer, pooled, batch)
        with clock.stage("backward"):
            dense.zero_gradient()
            torch.autograd.backward(loss.mean)
        with clock.stage("metrics"):
            sums = self._with_records(batch, *flat_sums(logits.detach().numpy(), batch.labels, batch.weights))
        with clock.stage("push"):
            # all of a batch is applied or nothing: without a number for a scale the push only counts
            scale = loss.weight if dense.gradient_is_finite() else math.nan
            gradient = torch.zeros_like(pooled) if pooled.grad is None else pooled.grad
            pushing = servers.push(
                pulling,
                batch,
                gradient.numpy(),
                dense.gradient,
                scale=scale,
                last=named.is_last,
                seen=epoch,
                sums=sums,
            )
        self.num_samples += batch.num_samples
        return pushing

    def _rows_of(self, batch: _core.Batch, width: int) -> torch.Tensor:
        """Room for the rows of a batch, `[B, S, W]`."""
        shape = (batch.num_samples, self._num_cells, width)
        size = math.prod(shape)
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size)
        return self._buffer[:size].view(shape)

    def _with_records(self, batch: _core.Batch, places: Places, values: Values) -> tuple[Places, Values]:
        """The sums of a batch, with its records and bad records behind them."""
        end = FLAT_SIZE * len(self._job.data.labels)
        counts = np.array([batch.num_records, batch.num_bad], np.float64)
        return np.append(places, np.array([end, end + 1], np.uint32)), np.append(values, counts)
