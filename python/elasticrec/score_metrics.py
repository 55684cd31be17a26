"""AUC and log loss of the scores that `predict` prints, for lines with labels."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticrec import _core
from elasticrec.errors import SampleError
from elasticrec.training.metrics import Metrics, MetricSums

Scores = npt.NDArray[np.float32]

# Line formats that the parser reads without a job or custom code.
_LINE_FORMATS = ("slots", "paddlerec", "criteo", "csv")

# The smallest 32-bit float above 0, and the distance from 1 to the next smaller float.
_SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
_STEP_BELOW_1 = float(np.finfo(np.float32).epsneg)


@dataclass(frozen=True)
class LabelReader:
    """Reads the labels of lines."""

    parse: Callable[[bytes], _core.Batch]
    """Return a batch with labels; raise `SampleError` for lines without labels."""
    columns: Sequence[int]
    """Columns of the scored labels, in the order of the scores."""
    names: Sequence[str]

    @classmethod
    def of_features(cls, features: dict[str, Any], scored: Sequence[str]) -> "LabelReader | None":
        """Return a label reader for the features of a manifest, or None if the format needs more than a parser."""
        if features["format"] not in _LINE_FORMATS:
            return None
        parser = _core.Parser(json.dumps(features))
        columns = [features["labels"].index(name) for name in scored]
        return cls(lambda text: parser.parse(text, labels=True), columns, scored)


class ScoreMetrics:
    """Compares scores with the labels of their lines."""

    def __init__(self, reader: LabelReader) -> None:
        self._reader = reader
        self._sums = [MetricSums() for _ in reader.names]
        self._num_counted = 0
        self._problem: str | None = None

    def add(self, text: bytes, scores: Scores) -> None:
        """Add the scores of some lines; after the first line without labels, further scores are ignored."""
        if self._problem is not None or not len(scores):
            return
        try:
            batch = self._reader.parse(text)
        except SampleError as error:
            self._problem = str(error).partition(": ")[2] or str(error)
            return
        if batch.num_samples != len(scores):
            self._problem = f"{len(scores)} scores for {batch.num_samples} samples"
            return
        self._num_counted += len(scores)
        labels, weights = batch.labels, batch.weights
        logits = _logits(scores)
        for at, (sums, column) in enumerate(zip(self._sums, self._reader.columns, strict=True)):
            sums.add(logits[:, at], labels[:, column], weights)

    def lines(self) -> list[str]:
        """Return a line per label; empty if no line had labels."""
        if not self._num_counted:
            return []
        if self._problem is not None:
            return [f"no AUC: cannot read labels after {self._num_counted:,} samples: {self._problem}"]
        found = [sums.result() for sums in self._sums]
        return [_line(name, one) for name, one in zip(self._reader.names, found, strict=True)]


def _line(name: str, metrics: Metrics) -> str:
    auc = "none, all labels are equal" if metrics.auc is None else f"{metrics.auc:.6f}"
    loss = "" if metrics.log_loss is None else f", log loss {metrics.log_loss:.6f}"
    return f"{name}: AUC {auc}{loss}, samples {metrics.samples:,}"


def _logits(scores: Scores) -> npt.NDArray[np.float64]:
    """Return the logits of probabilities; 0 and 1 are replaced by values that round to them."""
    within = np.clip(scores.astype(np.float64), _SMALLEST / 2, 1 - _STEP_BELOW_1 / 4)
    return np.log(within) - np.log1p(-within)
