"""Custom metrics: classes with `update` and `result` that run over an evaluation."""

import math
import numbers
from pathlib import Path
from typing import Any

from elasticrec.config import Job
from elasticrec.config.train import METRICS
from elasticrec.errors import ModelError
from elasticrec.training.metrics import Array
from elasticrec.user_code import load_class, locate_errors

_METHODS = ("update", "result")


class CustomMetric:
    """A custom metric class; creates one object for each evaluation and label."""

    def __init__(self, location: str) -> None:
        self.path = Path(location.rpartition(":")[0])
        self._class = load_class(location)
        for method in _METHODS:
            if not callable(getattr(self._class, method, None)):
                raise ModelError(f"{self.path}: `{self._class.__name__}`: expected a method `{method}`, got none")
        # Call the constructor once, so that its errors occur before training.
        self.start()

    def start(self) -> "Measurement":
        """Start an evaluation of one label."""
        with locate_errors(self.path):
            return Measurement(self.path, self._class.__name__, self._class())


class Measurement:
    """An object of a custom metric class during an evaluation."""

    def __init__(self, path: Path, name: str, metric: Any) -> None:
        self._path = path
        self._name = name
        self._metric = metric

    def update(self, scores: Array, labels: Array, weights: Array) -> None:
        """Add a batch: predictions, labels and weights, `[N]` each."""
        with locate_errors(self._path):
            self._metric.update(scores, labels, weights)

    def result(self) -> dict[str, float]:
        """Return the metric's values after checking their names and types."""
        with locate_errors(self._path):
            values = self._metric.result()
        where = f"{self._path}: `{self._name}.result`"
        if not isinstance(values, dict):
            raise ModelError(f"{where}: expected a dict of names and numbers, got {type(values).__name__}")
        for name, value in values.items():
            if not isinstance(name, str) or not name or not name.isprintable():
                raise ModelError(f"{where}: expected names as keys, got {name!r}")
            if name in (*METRICS, "samples", "calibration"):
                raise ModelError(f"{where}: `{name}` is taken, expected another name")
            if not isinstance(value, numbers.Real) or not math.isfinite(value):
                raise ModelError(f"{where}: `{name}`: expected a finite number, got {value!r}")
        return {name: float(value) for name, value in values.items()}


def load_metrics(job: Job) -> list[CustomMetric]:
    """Load the classes named in `train.metrics`."""
    return [CustomMetric(location) for location in job.train.metrics]
