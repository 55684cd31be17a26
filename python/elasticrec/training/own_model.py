"""A model of the user's own: from its file to a network that the rest of the data path can trust.

What is wrong with it is said in one line, with the line of the file, before anything is trained or written.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from elasticrec.config import Job
from elasticrec.data.reader import describe, load_class, place_of
from elasticrec.errors import ModelError
from elasticrec.models import Column, Model, Options, Shape
from elasticrec.training.embedding import split_columns


def build_own(job: Job, shape: Shape, options: Options) -> Model:
    """The model of a job whose kind is FILE.py:CLASS, tried once on two samples without signs."""
    assert job.model.own is not None, "the caller has looked"
    path, name = job.model.own
    what = f"{job.source}: model.kind"
    found = load_class(job.model.kind, what, job.model_source())
    if not issubclass(found, Model) or found is Model:
        raise ModelError(f"{what}: {path}: expected `{name}` to be a subclass of `elasticrec.models.Model`")
    with _explained(job, f"{name}()"):
        model = found(shape, options)
    columns = getattr(model, "columns", None)
    if not isinstance(columns, tuple) or not columns or not all(isinstance(column, Column) for column in columns):
        raise ModelError(f"{what}: {path}: {name}: columns: expected a tuple of `Column`, got {_show(columns)}")
    if len({column.name for column in columns}) < len(columns) or any(column.width < 1 for column in columns):
        raise ModelError(f"{what}: {path}: {name}: columns: expected different names and widths of at least 1")
    pooled = torch.zeros(2, shape.num_slots, sum(column.width for column in columns))
    model.eval()
    with _explained(job, f"{name}.forward"), torch.no_grad():
        logits = model(split_columns(pooled, columns), torch.zeros(2, shape.num_dense))
    if not isinstance(logits, torch.Tensor) or logits.shape != (2, shape.num_labels):
        raise ModelError(
            f"{what}: {path}: {name}.forward: expected a tensor [2, {shape.num_labels}] for 2 samples "
            f"and {shape.num_labels} label(s), got {_show(logits)}"
        )
    return model.train()


@contextmanager
def _explained(job: Job, call: str) -> Iterator[None]:
    """Whatever the user's code raises, as one line that names the place in the file."""
    assert job.model.own is not None, "the caller has looked"
    try:
        yield
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        place = place_of(error, job.model.own[0])
        raise ModelError(f"{job.source}: model.kind: {place}: {call}: {describe(error)}") from error


def _show(value: object) -> str:
    return f"one {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
