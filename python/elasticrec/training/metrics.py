"""AUC, log loss, COPC and calibration, computed from sums over buckets of the logit that can be merged."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Equal steps of the logit have the same resolution for a click rate of 0.0001 as for one of 0.5.
_NUM_BUCKETS = 1 << 17
_LOGIT_LIMIT = 16.0
_NUM_DECILES = 10

FLAT_SIZE = 2 * _NUM_BUCKETS + 5
"""Values of one label in a flat vector of sums."""

# Samples are counted in groups, because small batches are dominated by the overhead of calls.
_COUNTED_AT_ONCE = 8192

# An AUC this many standard errors below 0.5 is not chance.
_MIN_ERRORS = 3.0


@dataclass(frozen=True)
class Decile:
    """A tenth of the weight, ordered by prediction."""

    predicted: float
    """Mean prediction."""
    observed: float
    """Clicks over weight."""
    weight: float


@dataclass(frozen=True)
class Metrics:
    """Metrics of one label."""

    samples: int
    auc: float | None
    """None unless both outcomes occurred."""
    log_loss: float | None
    copc: float | None
    """Clicks over predicted clicks."""
    calibration: tuple[Decile, ...] = ()
    """Present only for an evaluation and for a complete epoch."""
    own: dict[str, float] = field(default_factory=dict)
    """Custom metrics by name."""

    def to_dict(self) -> dict[str, Any]:
        """Return the metrics for JSON, without empty fields."""
        values: dict[str, Any] = {
            "samples": self.samples,
            "auc": self.auc,
            "log_loss": self.log_loss,
            "copc": self.copc,
        }
        if self.calibration:
            values["calibration"] = [[one.predicted, one.observed, one.weight] for one in self.calibration]
        if self.own:
            values["own"] = self.own
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Metrics":
        """Return the metrics that `to_dict` converted."""
        deciles = tuple(Decile(*one) for one in values.get("calibration", ()))
        return cls(**{**values, "calibration": deciles})

    def value(self, name: str) -> float | None:
        """Return a metric by its name, built-in or custom, or None if it has no finite value."""
        value = self.own.get(name) if name in self.own else getattr(self, name, None)
        return value if isinstance(value, float) and math.isfinite(value) else None

    def errors_below_chance(self) -> float | None:
        """Return by how many standard errors the AUC is below 0.5, or None if it may be chance."""
        clicks = sum(one.observed * one.weight for one in self.calibration)
        misses = sum(one.weight for one in self.calibration) - clicks
        if self.auc is None or clicks <= 0 or misses <= 0:
            return None
        # Standard error of the AUC of random scores (Mann and Whitney 1947).
        error = math.sqrt((clicks + misses + 1) / (12 * clicks * misses))
        below = (0.5 - self.auc) / error
        return below if below >= _MIN_ERRORS else None


def flat_sums(logits: Array, labels: Array, weights: Array) -> tuple[Array, Array]:
    """Return the contribution of a batch `[B, L]` to the flat vector of sums, as indices and values."""
    indices, values = [], []
    for label in range(logits.shape[1]):
        bucket, clicks, columns = _contributions(logits[:, label].astype(np.float64), labels[:, label], weights)
        first = label * FLAT_SIZE
        indices += [bucket, bucket + _NUM_BUCKETS, np.arange(5) + 2 * _NUM_BUCKETS]
        indices[-3:] = [part + first for part in indices[-3:]]
        values += [weights - clicks, clicks, np.array([column.sum(dtype=np.float64) for column in columns])]
    all_indices, all_values = np.concatenate(indices), np.concatenate(values).astype(np.float64)
    used = all_values != 0
    return all_indices[used].astype(np.uint32), all_values[used]


def _contributions(logits: Array, labels: Array, weights: Array) -> tuple[Array, Array, tuple[Array, ...]]:
    """Return for each sample its bucket, its clicks, and its contributions to the five sums."""
    position = (np.clip(logits / _LOGIT_LIMIT, -1, 1) + 1) * (_NUM_BUCKETS / 2)
    bucket = np.minimum(position.astype(np.int64), _NUM_BUCKETS - 1)
    clicks = labels * weights
    # log(1 + e^x) without overflow
    softplus = np.logaddexp(0, logits)
    columns = (
        np.ones_like(logits),
        weights,
        weights * (softplus - labels * logits),
        clicks,
        weights * np.exp(logits - softplus),
    )
    return bucket, clicks, columns


class MetricSums:
    """Weighted sums for one label."""

    def __init__(self) -> None:
        self._buckets = np.zeros((2, _NUM_BUCKETS))
        # samples, weight, log loss, clicks, predicted clicks
        self._sums = np.zeros(5)
        self._pending: list[tuple[Array, Array, Array]] = []
        self._num_pending = 0

    def add(self, logits: Array, labels: Array, weights: Array) -> None:
        """Add a batch; a label is the share of the sample's weight that clicked."""
        if not len(logits):
            return
        self._pending.append((logits, labels, weights))
        self._num_pending += len(logits)
        if self._num_pending >= _COUNTED_AT_ONCE:
            self._count()

    def _count(self) -> None:
        """Count pending batches; the sums are bit-identical for any grouping."""
        if not self._pending:
            return
        logits, labels, weights = (np.concatenate(parts) for parts in zip(*self._pending, strict=True))
        starts = np.cumsum([0, *(len(batch[0]) for batch in self._pending[:-1])])
        self._pending, self._num_pending = [], 0
        bucket, clicks, columns = _contributions(logits.astype(np.float64), labels, weights)
        np.add.at(self._buckets[1], bucket, clicks)
        np.add.at(self._buckets[0], bucket, weights - clicks)
        # Sum batch by batch, as if each batch were counted alone.
        for sums in zip(*(np.add.reduceat(column, starts, dtype=np.float64) for column in columns), strict=True):
            self._sums += sums

    def result(self, *, calibration: bool = False, own: dict[str, float] | None = None) -> Metrics:
        """Return the metrics of all batches added so far."""
        self._count()
        samples, weight, loss, clicks, predicted = self._sums.tolist()
        negative, positive = self._buckets
        pairs = negative.sum() * positive.sum()
        # A tie within a bucket counts half.
        below = np.cumsum(negative) - negative / 2
        return Metrics(
            samples=int(samples),
            auc=float((positive * below).sum() / pairs) if pairs else None,
            log_loss=loss / weight if weight else None,
            copc=clicks / predicted if predicted else None,
            calibration=self._deciles() if calibration and weight else (),
            own=own or {},
        )

    def _deciles(self) -> tuple[Decile, ...]:
        """Return tenths of equal weight; a bucket across a border is divided between both."""
        used = np.flatnonzero(self._buckets.any(axis=0))
        weights, clicks = self._buckets[:, used].sum(axis=0), self._buckets[1, used]
        middle = ((used + 0.5) / (_NUM_BUCKETS / 2) - 1) * _LOGIT_LIMIT
        predicted = weights / (1 + np.exp(-middle))
        ends = np.concatenate([[0.0], np.cumsum(weights)])
        borders = np.linspace(0.0, ends[-1], _NUM_DECILES + 1)

        def tenths_of(values: Array) -> Array:
            return np.diff(np.interp(borders, ends, np.concatenate([[0.0], np.cumsum(values)])))

        weight = ends[-1] / _NUM_DECILES
        pairs = zip((tenths_of(predicted) / weight).tolist(), (tenths_of(clicks) / weight).tolist(), strict=True)
        return tuple(Decile(mean, rate, float(weight)) for mean, rate in pairs)

    @classmethod
    def of_flat(cls, values: Array) -> list["MetricSums"]:
        """Return the sums of all labels from a flat vector of `flat_sums`; ignore values after them."""
        found = []
        for part in values[: len(values) // FLAT_SIZE * FLAT_SIZE].reshape(-1, FLAT_SIZE):
            sums = cls()
            sums._buckets[:] = part[: 2 * _NUM_BUCKETS].reshape(2, -1)
            sums._sums[:] = part[2 * _NUM_BUCKETS :]
            found.append(sums)
        return found

    def state(self) -> dict[str, Array]:
        """Return the state for a checkpoint: non-empty buckets and the sums."""
        self._count()
        used = np.flatnonzero(self._buckets.any(axis=0))
        return {"used": used, "buckets": self._buckets[:, used], "sums": self._sums.copy()}

    def restore(self, state: dict[str, Array]) -> None:
        """Restore the state that `state` returned."""
        self._pending, self._num_pending = [], 0
        self._buckets[:] = 0
        self._buckets[:, state["used"]] = state["buckets"]
        self._sums[:] = state["sums"]
