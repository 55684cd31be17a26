"""The Python API, for notebooks and scripts: load a job, train it, look at its history, score samples.

Importing it imports no torch: each function loads what it uses.
"""

import io
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from elasticrec.config import Job
from elasticrec.config import load_job as _load_job
from elasticrec.errors import SampleError
from elasticrec.predict import score_lines, scores_of, source_of
from elasticrec.run import Run, resolve_run

if TYPE_CHECKING:
    import pandas as pd

    from elasticrec.training.event import Event
    from elasticrec.training.metrics import Metrics
    from elasticrec.training.predict import CheckpointModel

Scores = npt.NDArray[np.float32]


def load_job(path: str | Path, set: Mapping[str, Any] | Sequence[str] = ()) -> Job:
    """Read and check a job file; `set` overrides keys: `{"train.epochs": 3}`, or `["train.epochs=3"]` as in `--set`."""
    _check("load_job", "path", path, (str, os.PathLike), "a str or a Path")
    # a text has characters, which are no overrides
    if not isinstance(set, Mapping | Sequence) or isinstance(set, str | bytes):
        raise _wrong("load_job", "set", "a dict such as {'train.epochs': 3}, or a list of str", set)
    if isinstance(set, Mapping):
        return _load_job(path, [_override(key, value) for key, value in set.items()])
    for number, item in enumerate(set):
        _check("load_job", f"set[{number}]", item, str, "a str such as 'train.epochs=3'")
    return _load_job(path, set)


def train(
    job: Job | str | Path,
    callback: "Callable[[Event], object] | None" = None,
    *,
    fresh: bool = False,
    quiet: bool = False,
) -> "Result":
    """Train a job in this process; an unfinished run of it goes on, `fresh` starts over.

    `callback` is told every progress line, evaluation and epoch as an `Event`. When it returns False the training stops
    after the batch at hand; an interrupt (Ctrl-C, or the stop button of a notebook) and an error of the callback stop
    it too, and are raised. All of them leave a checkpoint from which the next `train` goes on. `quiet` prints nothing.
    """
    _check("train", "job", job, (Job, str, os.PathLike), "a Job, a str or a Path")
    if callback is not None and not callable(callback):
        raise _wrong("train", "callback", "a function or None", callback)
    _check("train", "fresh", fresh, bool, "a bool")
    _check("train", "quiet", quiet, bool, "a bool")
    from elasticrec.publish.train import train_and_publish

    loaded = job if isinstance(job, Job) else load_job(job)
    with ExitStack() as stack:
        stream = stack.enter_context(open(os.devnull, "w")) if quiet else None
        summary = train_and_publish(loaded, fresh=fresh, callback=callback, stream=stream)
    return Result(summary.run)


def load_run(run: str | Path) -> "Result":
    """What a run has come to so far: a job file, the name of a run, or its directory."""
    _check("load_run", "run", run, (str, os.PathLike), "a str or a Path")
    return Result(resolve_run(os.fspath(run)))


class Result:
    """A run, as its newest checkpoint and its metrics file have it."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __repr__(self) -> str:
        return f"Result({str(self.run.path)!r})"

    @property
    def finished(self) -> bool:
        """Whether nothing of the job's epochs is left."""
        return self._model.checkpoint.progress.finished

    @property
    def metrics(self) -> "dict[str, Metrics]":
        """By label: of the last evaluation, or of the training where there was none."""
        from elasticrec.training.metrics import Metrics

        checkpoint = self._model.checkpoint
        found = checkpoint.evaluation
        if found is None:
            found = [Metrics.from_dict(one) for one in checkpoint.manifest["metrics"]["train"]]
        return dict(zip(self._model.job.data.labels, found, strict=True))

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records of the metrics file, without those of batches that a crash took back."""
        if not self.run.metrics_path.exists():
            return []
        records: list[dict[str, Any]] = []
        for line in self.run.metrics_path.read_text("utf-8").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                # the line that a crash cut short
                continue
            if record.get("event") == "start":
                records = [one for one in records if one.get("steps", 0) <= record["steps"]]
            records.append(record)
        return records

    @property
    def history(self) -> "pd.DataFrame":
        """The records as a table: a row a record, columns such as `eval_click_auc` and `share_wait`."""
        try:
            import pandas as pd
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "history needs `pandas`; install it: pip install 'elasticrec[notebook]'", name="pandas"
            ) from None
        labels = self.run.job().data.labels
        told = [record for record in self.records if record.get("event") != "evaluating"]
        return pd.DataFrame([_flat(record, labels) for record in told])

    def score(self, samples: Path | str | bytes | Iterable[str]) -> Scores:
        """Probabilities `[samples, labels]` by the newest checkpoint: of a file (a `Path`), of text, or of lines."""
        # going over a mapping or a table of pandas gives names, which are no samples
        has_names = isinstance(samples, Mapping) or hasattr(samples, "columns")
        if has_names or not isinstance(samples, Path | Iterable):
            raise _wrong("score", "samples", "a Path, a str, bytes or a list of str", samples)
        if isinstance(samples, Path):
            chunks = list(scores_of(source_of(self._model), str(samples)))
        else:
            chunks = list(score_lines(_lines(samples), "samples", source_of(self._model)))
        return np.concatenate([np.zeros((0, len(self._model.job.data.labels)), np.float32), *chunks])

    @cached_property
    def _model(self) -> "CheckpointModel":
        from elasticrec.training.predict import load_checkpoint

        return load_checkpoint(self.run)


def _check(function: str, name: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Refuse an argument of another type, by its name."""
    if not isinstance(value, kinds):
        raise _wrong(function, name, expected, value)


def _wrong(function: str, name: str, expected: str, value: object) -> TypeError:
    return TypeError(f"{function}: {name}: expected {expected}, got {type(value).__name__}")


def _override(key: object, value: object) -> str:
    _check("load_job", "set", key, str, "keys that are str such as 'train.epochs'")
    try:
        # JSON is YAML, which is what overrides are read as
        return f"{key}={json.dumps(value, default=_plain, ensure_ascii=False)}"
    except TypeError:
        raise _wrong(
            "load_job", f"set[{key!r}]", "a number, a str, a bool, None, or a list or dict of them", value
        ) from None


def _plain(value: object) -> object:
    """Paths, and numbers of numpy, as JSON has them."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError


def _lines(samples: str | bytes | Iterable[str]) -> BinaryIO:
    if isinstance(samples, bytes):
        return io.BytesIO(samples)
    if isinstance(samples, str):
        return io.BytesIO(samples.encode())
    items = list(samples)
    for number, item in enumerate(items):
        _check("score", f"samples[{number}]", item, str, "a str with one line")
    lines = [line.removesuffix("\n") for line in items]
    for number, line in enumerate(lines):
        # a list has a row of scores for each of its items
        if not line.strip() or "\n" in line:
            raise SampleError(f"samples[{number}]: expected one line, got {'none' if not line.strip() else 'several'}")
    return io.BytesIO("\n".join(lines).encode())


def _flat(record: dict[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    """A record without lists: metrics by label, shares by stage."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        if key in ("train", "eval"):
            for label, metrics in zip(labels, value or (), strict=False):
                values = {**metrics, **metrics.get("own", {})}
                flat |= {
                    f"{key}_{label}_{name}": one for name, one in values.items() if name not in ("own", "calibration")
                }
        elif key == "shares":
            flat |= {f"share_{name}": share for name, share in value.items()}
        else:
            flat[key] = value
    return flat
