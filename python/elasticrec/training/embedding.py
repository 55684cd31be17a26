"""Connect the table in Rust and the network in torch: pull pooled rows, push their gradient."""

import json
from typing import Any

import torch
from torch import Tensor

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.errors import ConfigError
from elasticrec.machine import num_cores
from elasticrec.models import Column, Inputs

# Initial values of rows depend on the name.
TABLE = "main"


def table_spec(job: Job, columns: tuple[Column, ...]) -> dict[str, Any]:
    """Return the specification of the job's table, for the crate and for snapshots."""
    scale = {"zero": 0.0, "uniform": job.sparse.init_scale}
    late = late_columns(job, columns)
    return {
        "name": TABLE,
        "seed": job.train.seed,
        "partitions": job.sparse.partitions,
        "columns": [
            {"name": c.name, "width": c.width, "init_scale": scale[c.init], "late": c.name in late} for c in columns
        ],
        "admit_after": job.sparse.admission.count,
        "optimizer": job.sparse.optimizer.model_dump(),
    }


def late_columns(job: Job, columns: tuple[Column, ...]) -> set[str]:
    """Return the names of the columns that a sign gets after `sparse.admission.count` shows."""
    admission, names = job.sparse.admission, [column.name for column in columns]
    late = names[1:] if admission.columns is None else list(admission.columns)
    for name in late:
        if name not in names:
            known = ", ".join(f"`{name}`" for name in names)
            raise ConfigError(
                f"{job.source}: sparse.admission.columns: expected columns of `{job.model.kind}`, which has {known}; "
                f"got `{name}`"
            )
    if admission.count and not late:
        raise ConfigError(
            f"{job.source}: sparse.admission: `{job.model.kind}` has the one column `{names[0]}`, which is not delayed "
            f"by default; set `columns: [{names[0]}]`"
        )
    return set(late)


def split_columns(pooled: Tensor, columns: tuple[Column, ...]) -> Inputs:
    """Return views of the columns by name."""
    widths = [column.width for column in columns]
    parts = torch.split(pooled, widths, dim=2)
    return {column.name: part for column, part in zip(columns, parts, strict=True)}


class Embedding:
    """Pulls the rows of a batch into memory shared with torch, and pushes the gradient of that memory."""

    def __init__(self, job: Job, columns: tuple[Column, ...]) -> None:
        threads = job.train.threads or num_cores()
        self.table = _core.Table(json.dumps(table_spec(job, columns)), threads=threads)
        self._num_cells = sum(slot.sequence or 1 for slot in job.data.inputs)
        self._buffer = torch.empty(0)

    def pull(self, batch: _core.Batch) -> Tensor:
        """Return the rows by cell `[B, S, W]`, a leaf with gradient; valid until the next pull."""
        shape = (batch.num_samples, self._num_cells, self.table.width)
        size = shape[0] * shape[1] * shape[2]
        if self._buffer.numel() < size:
            # Training must be able to use a buffer that an evaluation allocated.
            with torch.inference_mode(False):
                self._buffer = torch.empty(size)
        pooled = self._buffer[:size].view(shape)
        self.table.pull(batch, pooled.numpy())
        return pooled.requires_grad_()

    def push(self, batch: _core.Batch, pooled: Tensor, scale: float, seen: int) -> bool:
        """Count the batch and step its rows. Return False if the gradient was not finite and nothing was applied."""
        gradient = pooled.grad
        assert gradient is not None, "push follows backward"
        _, non_finite = self.table.push(batch, gradient.contiguous().numpy(), scale, seen)
        return not non_finite
