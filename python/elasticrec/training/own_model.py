"""A model of the user's own: from its file to a network that the rest of the data path can trust.

What is wrong with it is said in one line, with the line of the file, before anything is trained or written.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.errors import ModelError
from elasticrec.models import Column, Model, Options, Shape
from elasticrec.training.embedding import split_columns
from elasticrec.user_code import load_class, told_with_line


def build_own(job: Job, shape: Shape, options: Options) -> Model:
    """The model of a job whose kind is FILE.py:CLASS, tried once on two samples without signs."""
    assert job.model.own is not None, "the caller has looked"
    path, name = job.model.own
    found = load_class(job.model.kind, job.model_source())
    where = f"{path}: `{name}`"
    if not issubclass(found, Model) or found is Model:
        raise ModelError(f"{where}: expected a subclass of `elasticrec.models.Model`")
    with told_with_line(path):
        model = found(shape, options)
    columns = getattr(model, "columns", None)
    if not isinstance(columns, tuple) or not columns or not all(isinstance(column, Column) for column in columns):
        raise ModelError(f"{where}: columns: expected a tuple of `Column`, got {_show(columns)}")
    if len({column.name for column in columns}) < len(columns) or any(column.width < 1 for column in columns):
        raise ModelError(f"{where}: columns: expected different names and widths of at least 1")
    pooled = torch.zeros(2, shape.num_slots, sum(column.width for column in columns))
    model.eval()
    with told_with_line(path), torch.no_grad():
        logits = model(split_columns(pooled, columns), torch.zeros(2, shape.num_dense))
    if not isinstance(logits, torch.Tensor) or logits.shape != (2, shape.num_labels):
        wanted = f"a tensor [2, {shape.num_labels}] for 2 samples and {shape.num_labels} label(s)"
        raise ModelError(f"{where}: forward: expected {wanted}, got {_show(logits)}")
    return model.train()


@contextmanager
def seeded(job: Job, batch: _core.Batch) -> Iterator[None]:
    """Random numbers of a batch, of dropout say, are the same whenever it is trained: after a resume, too."""
    if job.model.own is None:
        yield
        return
    name = f"{job.train.seed} {batch.unit} {batch.index}"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))
        yield


def _show(value: object) -> str:
    return f"one {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
