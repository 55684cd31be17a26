"""A model of the user's own: from its file to a network that the rest of the data path can trust.

What is wrong with it is said in one line, with the line of the file, before anything is trained or written.
"""

import difflib
import hashlib
import sys
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from elasticrec.config import Job
from elasticrec.errors import ModelError
from elasticrec.models import Column, Model, Options, Shape
from elasticrec.training.embedding import split_columns


def build_own(job: Job, shape: Shape, options: Options) -> Model:
    """The model of a job whose kind is FILE.py:CLASS, tried once on two empty samples."""
    found = _load_class(job)
    with _explained(job):
        model = found(shape, options)
        columns = getattr(model, "columns", None)
    _check_columns(job, columns)
    width = sum(column.width for column in model.columns)
    pooled, dense = torch.zeros(2, shape.num_slots, width), torch.zeros(2, shape.num_dense)
    model.eval()
    with _explained(job), torch.no_grad():
        logits = model(split_columns(pooled, model.columns), dense)
    got = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
    if got != [2, shape.num_labels]:
        raise ModelError(f"{_where(job)}: forward: expected logits [2, {shape.num_labels}] for 2 samples, got {got}")
    return model.train()


def _load_class(job: Job) -> type[Model]:
    assert job.model.own is not None, "the caller has looked"
    path, name = job.model.own
    source = job.model_source()
    assert source is not None, "a model of one's own has a file"
    # from the bytes that the fingerprint is of, not from a file that may change meanwhile
    module = types.ModuleType(f"elasticrec_own_model_{hashlib.sha256(source).hexdigest()[:12]}")
    module.__file__ = str(path)
    with _explained(job):
        code = compile(source, str(path), "exec", dont_inherit=True)
        # dataclasses and the like look their module up by its name
        sys.modules[module.__name__] = module
        exec(code, module.__dict__)
    found = getattr(module, name, None)
    if isinstance(found, type) and issubclass(found, Model) and found is not Model:
        return found
    if isinstance(found, type):
        raise ModelError(f"{_where(job)}: expected `{name}` to be a subclass of `elasticrec.models.Model`")
    names = [
        key for key, value in vars(module).items() if isinstance(value, type) and value.__module__ == module.__name__
    ]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"it has {', '.join(f'`{one}`' for one in names) or 'none'}"
    raise ModelError(f"{_where(job)}: no class `{name}`, {hint}")


def _check_columns(job: Job, columns: object) -> None:
    if not isinstance(columns, tuple) or not columns or not all(isinstance(column, Column) for column in columns):
        raise ModelError(f"{_where(job)}: columns: expected a tuple of `Column`, got {type(columns).__name__}")
    names = [column.name for column in columns]
    if len(set(names)) != len(names) or not all(isinstance(c.width, int) and c.width > 0 for c in columns):
        raise ModelError(f"{_where(job)}: columns: expected different names and widths above 0")


@contextmanager
def _explained(job: Job) -> Iterator[None]:
    """Whatever the user's code raises, as one line that names the place in the file."""
    try:
        yield
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        line = _line_in(error, _path(job))
        first = str(error).strip().splitlines()
        what = f"{type(error).__name__}: {first[0]}" if first else type(error).__name__
        if isinstance(error, SyntaxError):
            what = f"SyntaxError: {error.msg}"
        raise ModelError(f"{_where(job)}{f':{line}' if line else ''}: {what}") from error


def _line_in(error: BaseException, path: Path) -> int | None:
    if isinstance(error, SyntaxError):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if frame.filename == str(path)), None)


def _path(job: Job) -> Path:
    assert job.model.own is not None, "the caller has looked"
    return job.model.own[0]


def _where(job: Job) -> str:
    return f"{job.source}: model.kind: {_path(job)}"
