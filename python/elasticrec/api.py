"""The Python API, for notebooks and scripts: load a job, train, evaluate, publish, serve.

Importing this module does not import torch: each function imports what it needs.
"""

import io
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

import numpy as np
import numpy.typing as npt

from elasticrec.config import Job, Serve, default_job
from elasticrec.config import load_job as _load_job
from elasticrec.errors import ConfigError, SampleError
from elasticrec.machine import limit_spinning
from elasticrec.predict import score_lines, scores_of, source_of
from elasticrec.run import Run, resolve_run

if TYPE_CHECKING:
    import pandas as pd

    from elasticrec.publish.offer import PublishResult
    from elasticrec.serving.client import Client
    from elasticrec.training.event import Callback
    from elasticrec.training.metrics import Metrics
    from elasticrec.training.predict import CheckpointModel

Scores = npt.NDArray[np.float32]


def load_job(path: str | Path, set: Mapping[str, Any] | Sequence[str] = ()) -> Job:
    """Read and check a job file; `set` overrides keys: `{"train.epochs": 3}`, or `["train.epochs=3"]` as in `--set`."""
    _check_type("load_job", "path", path, (str, os.PathLike), "a str or a Path")
    # A str is a sequence too, but its characters are not overrides.
    if not isinstance(set, Mapping | Sequence) or isinstance(set, str | bytes):
        raise _type_error("load_job", "set", "a dict such as {'train.epochs': 3}, or a list of str", set)
    if isinstance(set, Mapping):
        return _load_job(path, [_override(key, value) for key, value in set.items()])
    for number, item in enumerate(set):
        _check_type("load_job", f"set[{number}]", item, str, "a str such as 'train.epochs=3'")
    return _load_job(path, set)


def train(
    job: Job | str | Path,
    callback: "Callback | None" = None,
    *,
    fresh: bool = False,
    quiet: bool = False,
) -> "TrainingRun":
    """Train a job and return its run; an unfinished run resumes, unless `fresh` starts it over.

    With `train.mode: local` the training runs in this process; with `ps` it starts the coordinator, the parameter
    servers and the trainers as processes of this machine, and ends them before it returns or raises.

    `callback` is called with every `Event`; when it returns False, the training stops after the current batch. An
    interrupt (Ctrl-C, or the stop button of a notebook) and an error of the callback stop it too, and are raised. All
    of them leave a checkpoint from which the next `train` resumes. `quiet` prints nothing.
    """
    _check_type("train", "job", job, (Job, str, os.PathLike), "a Job, a str or a Path")
    if callback is not None and not callable(callback):
        raise _type_error("train", "callback", "a function or None", callback)
    _check_type("train", "fresh", fresh, bool, "a bool")
    _check_type("train", "quiet", quiet, bool, "a bool")
    loaded = job if isinstance(job, Job) else load_job(job)
    if "torch" not in sys.modules:
        limit_spinning()
    with _output_stream(quiet) as stream:
        if loaded.train.mode == "ps":
            from elasticrec.roles.train import train_with_servers

            train_with_servers(loaded, fresh=fresh, callback=callback, stream=stream)
        else:
            from elasticrec.publish.train import train_and_publish

            train_and_publish(loaded, fresh=fresh, callback=callback, stream=stream)
    return TrainingRun(Run.of(loaded))


def load_run(run: str | Path) -> "TrainingRun":
    """Return a run, given its job file, name or directory."""
    _check_type("load_run", "run", run, (str, os.PathLike), "a str or a Path")
    return TrainingRun(resolve_run(os.fspath(run)))


@contextmanager
def serve(
    *models: str | Path, job: Job | str | Path | None = None, port: int = 0, wait: bool = False, quiet: bool = False
) -> Iterator["PredictionServer"]:
    """Serve published models over HTTP, gRPC and bRPC while the block runs, and follow their new versions.

    A model is a path or URL such as `models/demo` or `models/demo/7`; a repository stands for all its models. Without
    models, it serves `serve.models` of `job`, or the job's own model. `port` replaces `serve.port`; 0 picks a free
    port. `wait` waits until every model has a version. The server runs in this process; at the end of the block it
    answers the accepted requests and stops.
    """
    for number, model in enumerate(models):
        _check_type("serve", f"models[{number}]", model, (str, os.PathLike), "a str or a Path")
    if job is not None:
        _check_type("serve", "job", job, (Job, str, os.PathLike), "a Job, a str or a Path")
    _check_type("serve", "port", port, int, "an int")
    if not 0 <= port <= 65535:
        raise ConfigError(f"serve: port: expected 0 to 65535, got {port}")
    _check_type("serve", "wait", wait, bool, "a bool")
    _check_type("serve", "quiet", quiet, bool, "a bool")
    from elasticrec.net.logs import forward_logs
    from elasticrec.serving.plan import plan_models
    from elasticrec.serving.server import run_server, url_of

    given = default_job(()) if job is None else job if isinstance(job, Job) else load_job(job)
    loaded = given.model_copy(update={"serve": given.serve.model_copy(update={"port": port})})
    variants = plan_models([os.fspath(model) for model in models], loaded, is_given=job is not None)
    with _output_stream(quiet) as stream:

        def say(line: str) -> None:
            print(line, file=stream or sys.stdout, flush=True)

        with forward_logs(say), run_server(variants, loaded, threading.Event(), wait=wait) as server:
            yield PredictionServer(url_of(server, loaded.serve), loaded.serve)


@dataclass(frozen=True)
class PredictionServer:
    """A prediction server that runs in this process."""

    url: str
    """For example `http://127.0.0.1:8500`."""
    settings: Serve

    def client(self, model: str | None = None, **options: Any) -> "Client":
        """Return a client; `model` is needed if the server has several models, `options` are arguments of `Client`."""
        from elasticrec.serving.client import Client

        if self.settings.token is not None:
            options = {"token": self.settings.token.reveal_token(), **options}
        return Client(self.url, model, **options)


class TrainingRun:
    """A run: its job, newest checkpoint and metrics."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __repr__(self) -> str:
        return f"TrainingRun({str(self.path)!r})"

    @property
    def name(self) -> str:
        """Name of the run, equal to the name of its job."""
        return self._run.name

    @property
    def path(self) -> Path:
        """Directory of the run."""
        return self._run.path

    @property
    def job(self) -> Job:
        """The job of the run, with all defaults."""
        return self._run.job()

    @property
    def finished(self) -> bool:
        """Whether all epochs of the job are trained."""
        # A stopped run with servers has only `ps-*` checkpoints, which the next training reads.
        if not any(self._run.checkpoints.glob("step-*")):
            return False
        return self._model.checkpoint.progress.finished

    @property
    def metrics(self) -> "dict[str, Metrics]":
        """Metrics of the last evaluation by label; of the training if there was no evaluation."""
        from elasticrec.training.metrics import Metrics

        checkpoint = self._model.checkpoint
        found = checkpoint.evaluation
        if found is None:
            found = [Metrics.from_dict(one) for one in checkpoint.manifest["metrics"]["train"]]
        return dict(zip(self._model.job.data.labels, found, strict=True))

    @property
    def records(self) -> list[dict[str, Any]]:
        """Records of the metrics file, without the records of batches that a crash undid."""
        if not self._run.metrics_path.exists():
            return []
        records: list[dict[str, Any]] = []
        for line in self._run.metrics_path.read_text("utf-8").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                # A crash truncated the line.
                continue
            if record.get("event") == "start":
                records = [one for one in records if one.get("steps", 0) <= record["steps"]]
            records.append(record)
        return records

    @property
    def history(self) -> "pd.DataFrame":
        """The records as a table, with columns such as `eval_click_auc` and `share_wait`."""
        try:
            import pandas as pd
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "history needs `pandas`; install it: pip install 'elasticrec[notebook]'", name="pandas"
            ) from None
        labels = self.job.data.labels
        records = [record for record in self.records if record.get("event") != "evaluating"]
        return pd.DataFrame([_flatten(record, labels) for record in records])

    def score(self, samples: Path | str | bytes | Iterable[str]) -> Scores:
        """Return probabilities `[samples, labels]` of a file (a `Path`), of text, or of lines."""
        # Iterating over a mapping or a pandas table yields names, not samples.
        has_names = isinstance(samples, Mapping) or hasattr(samples, "columns")
        if has_names or not isinstance(samples, Path | Iterable):
            raise _type_error("score", "samples", "a Path, a str, bytes or a list of str", samples)
        if isinstance(samples, Path):
            chunks = list(scores_of(source_of(self._model), str(samples)))
        else:
            chunks = list(score_lines(_open_lines(samples), "samples", source_of(self._model)))
        return np.concatenate([np.zeros((0, len(self._model.job.data.labels)), np.float32), *chunks])

    def evaluate(self, *data: str | Path, best: bool = False) -> "dict[str, Metrics]":
        """Return the metrics by label of the newest or the best checkpoint on files, or on `data.eval` of the job."""
        for number, pattern in enumerate(data):
            _check_type("evaluate", f"data[{number}]", pattern, (str, os.PathLike), "a str or a Path")
        from elasticrec.net.logs import forward_logs
        from elasticrec.training.evaluate_run import choose, evaluate_run

        chosen = choose(self._run, None, best=best)
        patterns = [os.fspath(pattern) for pattern in data]
        with forward_logs(lambda line: print(line, file=sys.stderr)):
            (evaluated,) = evaluate_run(self._run, chosen, patterns)
        return evaluated.metrics

    def publish(self, *, best: bool = False, row_type: str | None = None) -> "PublishResult":
        """Write the newest or the best checkpoint as a version, and make it current if `publish.gate` accepts it.

        `row_type` replaces `publish.row_type` of the job. The result says whether the version is current:
        `offer.is_offered`, and why not: `offer.summary`.
        """
        from elasticrec.publish.local import publish_run

        return publish_run(self._run, best=best, row_type=row_type)

    @cached_property
    def _model(self) -> "CheckpointModel":
        from elasticrec.training.predict import load_checkpoint

        return load_checkpoint(self._run)


@contextmanager
def _output_stream(quiet: bool) -> Iterator[TextIO | None]:
    """Yield the stream for progress lines; None stands for the default."""
    with ExitStack() as stack:
        yield stack.enter_context(open(os.devnull, "w")) if quiet else None


def _check_type(function: str, name: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raise `TypeError` for an argument of the wrong type."""
    if not isinstance(value, kinds):
        raise _type_error(function, name, expected, value)


def _type_error(function: str, name: str, expected: str, value: object) -> TypeError:
    return TypeError(f"{function}: {name}: expected {expected}, got {type(value).__name__}")


def _override(key: object, value: object) -> str:
    _check_type("load_job", "set", key, str, "keys that are str such as 'train.epochs'")
    try:
        # Overrides are parsed as YAML, which contains JSON.
        return f"{key}={json.dumps(value, default=_to_json_value, ensure_ascii=False)}"
    except TypeError:
        raise _type_error(
            "load_job", f"set[{key!r}]", "a number, a str, a bool, None, or a list or dict of them", value
        ) from None


def _to_json_value(value: object) -> object:
    """Convert paths and numpy numbers to JSON values."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError


def _open_lines(samples: str | bytes | Iterable[str]) -> BinaryIO:
    if isinstance(samples, bytes):
        return io.BytesIO(samples)
    if isinstance(samples, str):
        return io.BytesIO(samples.encode())
    items = list(samples)
    for number, item in enumerate(items):
        _check_type("score", f"samples[{number}]", item, str, "a str with one line")
    lines = [line.removesuffix("\n") for line in items]
    for number, line in enumerate(lines):
        # The result has one row of scores for each item.
        if not line.strip() or "\n" in line:
            raise SampleError(f"samples[{number}]: expected one line, got {'none' if not line.strip() else 'several'}")
    return io.BytesIO("\n".join(lines).encode())


def _flatten(record: dict[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    """Flatten a record: metrics by label, shares by stage."""
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
