"""AUC, log loss and COPC over buckets of the logit: sums that merge over batches, resumes and processes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Even steps of the logit: as fine for a click rate of 0.0001 as for one of 0.5.
_NUM_BUCKETS = 1 << 17
_LOGIT_LIMIT = 16.0


@dataclass(frozen=True)
class Metrics:
    """What the sums say of one label."""

    samples: int
    auc: float | None
    """None unless both outcomes occurred."""
    log_loss: float | None
    copc: float | None
    """Clicks over predicted clicks."""

    def to_dict(self) -> dict[str, float | int | None]:
        """For JSON."""
        return {"samples": self.samples, "auc": self.auc, "log_loss": self.log_loss, "copc": self.copc}


class MetricSums:
    """Weighted sums for one label."""

    def __init__(self) -> None:
        self._buckets = np.zeros((2, _NUM_BUCKETS))
        # samples, weight, log loss, clicks, predicted clicks
        self._sums = np.zeros(5)

    def add(self, logits: Array, labels: Array, weights: Array) -> None:
        """Count a batch: a label is the share of a sample's weight that clicked."""
        logits = logits.astype(np.float64)
        place = (np.clip(logits / _LOGIT_LIMIT, -1, 1) + 1) * (_NUM_BUCKETS / 2)
        bucket = np.minimum(place.astype(np.int64), _NUM_BUCKETS - 1)
        clicks = labels * weights
        np.add.at(self._buckets[1], bucket, clicks)
        np.add.at(self._buckets[0], bucket, weights - clicks)
        # log(1 + e^x) without overflow
        softplus = np.logaddexp(0, logits)
        self._sums += (
            len(logits),
            weights.sum(),
            (weights * (softplus - labels * logits)).sum(),
            clicks.sum(),
            (weights * np.exp(logits - softplus)).sum(),
        )

    def result(self) -> Metrics:
        """The metrics of everything added so far."""
        samples, weight, loss, clicks, predicted = self._sums.tolist()
        negative, positive = self._buckets
        pairs = negative.sum() * positive.sum()
        # a tie within a bucket counts half
        below = np.cumsum(negative) - negative / 2
        return Metrics(
            samples=int(samples),
            auc=float((positive * below).sum() / pairs) if pairs else None,
            log_loss=loss / weight if weight else None,
            copc=clicks / predicted if predicted else None,
        )

    def state(self) -> dict[str, Array]:
        """What a checkpoint keeps: the buckets that are not empty, and the sums."""
        used = np.flatnonzero(self._buckets.any(axis=0))
        return {"used": used, "buckets": self._buckets[:, used], "sums": self._sums.copy()}

    def restore(self, state: dict[str, Array]) -> None:
        """Put back what `state` gave."""
        self._buckets[:] = 0
        self._buckets[:, state["used"]] = state["buckets"]
        self._sums[:] = state["sums"]
