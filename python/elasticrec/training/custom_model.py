"""Load a custom model from its file and check it.

Errors name the file and the line, and are raised before anything is trained or written.
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
from elasticrec.user_code import load_class, locate_errors


def build_custom(job: Job, shape: Shape, options: Options) -> Model:
    """Build the model of a job with `model.kind: FILE.py:CLASS`, and try it on two samples without signs."""
    assert job.model.custom_class is not None, "the job has a custom model"
    path, name = job.model.custom_class
    found = load_class(job.model.kind, job.model_source())
    where = f"{path}: `{name}`"
    if not issubclass(found, Model) or found is Model:
        raise ModelError(f"{where}: expected a subclass of `elasticrec.models.Model`")
    with locate_errors(path):
        model = found(shape, options)
    columns = getattr(model, "columns", None)
    if not isinstance(columns, tuple) or not columns or not all(isinstance(column, Column) for column in columns):
        raise ModelError(f"{where}: columns: expected a tuple of `Column`, got {_show(columns)}")
    if len({column.name for column in columns}) < len(columns) or any(column.width < 1 for column in columns):
        raise ModelError(f"{where}: columns: expected distinct names and widths of at least 1")
    pooled = torch.zeros(2, shape.num_slots, sum(column.width for column in columns))
    model.eval()
    with locate_errors(path), torch.no_grad():
        logits = model(split_columns(pooled, columns), torch.zeros(2, shape.num_dense))
    if not isinstance(logits, torch.Tensor) or logits.shape != (2, shape.num_labels):
        expected = f"a tensor [2, {shape.num_labels}] for 2 samples and {shape.num_labels} label(s)"
        raise ModelError(f"{where}: forward: expected {expected}, got {_show(logits)}")
    return model.train()


@contextmanager
def seed_by_batch(job: Job, batch: _core.Batch) -> Iterator[None]:
    """Seed random numbers (such as dropout) by the batch, so that a resumed training draws the same ones."""
    if job.model.custom_class is None:
        yield
        return
    name = f"{job.train.seed} {batch.unit} {batch.index}"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))
        yield


def _show(value: object) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
