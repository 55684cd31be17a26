"""AUC, log loss, COPC and calibration over buckets of the logit: sums that merge over batches and resumes."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Even steps of the logit: as fine for a click rate of 0.0001 as for one of 0.5.
_NUM_BUCKETS = 1 << 17
_LOGIT_LIMIT = 16.0
_NUM_DECILES = 10

FLAT_SIZE = 2 * _NUM_BUCKETS + 5
"""Values of one label in a flat vector of sums."""

# A batch alone costs more in calls than in samples.
_COUNTED_AT_ONCE = 8192

# An AUC below 0.5 by fewer standard errors may be chance.
_MIN_ERRORS = 3.0


@dataclass(frozen=True)
class Decile:
    """A tenth of the weight, by rising prediction."""

    predicted: float
    """Mean prediction."""
    observed: float
    """Clicks over weight."""
    weight: float


@dataclass(frozen=True)
class Metrics:
    """What the sums say of one label."""

    samples: int
    auc: float | None
    """None unless both outcomes occurred."""
    log_loss: float | None
    copc: float | None
    """Clicks over predicted clicks."""
    calibration: tuple[Decile, ...] = ()
    """Only of an evaluation and of a whole epoch."""
    own: dict[str, float] = field(default_factory=dict)
    """Metrics of the user's own, by name."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON; what is empty is left out."""
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
        """What `to_dict` gave."""
        deciles = tuple(Decile(*one) for one in values.get("calibration", ()))
        return cls(**{**values, "calibration": deciles})

    def value(self, name: str) -> float | None:
        """A metric by its name in JSON, or one of the user's own; none where it has no value."""
        value = self.own.get(name) if name in self.own else getattr(self, name, None)
        return value if isinstance(value, float) and math.isfinite(value) else None

    def errors_below_chance(self) -> float | None:
        """How many standard errors the AUC lies under 0.5, where that is too far to be chance."""
        clicks = sum(one.observed * one.weight for one in self.calibration)
        misses = sum(one.weight for one in self.calibration) - clicks
        if self.auc is None or clicks <= 0 or misses <= 0:
            return None
        # of scores that have nothing to do with the labels (Mann and Whitney 1947)
        error = math.sqrt((clicks + misses + 1) / (12 * clicks * misses))
        below = (0.5 - self.auc) / error
        return below if below >= _MIN_ERRORS else None


def flat_sums(logits: Array, labels: Array, weights: Array) -> tuple[Array, Array]:
    """What a batch `[B, L]` adds to the sums of all labels, as places and values of one flat vector."""
    places, values = [], []
    for label in range(logits.shape[1]):
        bucket, clicks, columns = _counted(logits[:, label].astype(np.float64), labels[:, label], weights)
        first = label * FLAT_SIZE
        places += [bucket, bucket + _NUM_BUCKETS, np.arange(5) + 2 * _NUM_BUCKETS]
        places[-3:] = [part + first for part in places[-3:]]
        values += [weights - clicks, clicks, np.array([column.sum(dtype=np.float64) for column in columns])]
    all_places, all_values = np.concatenate(places), np.concatenate(values).astype(np.float64)
    used = all_values != 0
    return all_places[used].astype(np.uint32), all_values[used]


def _counted(logits: Array, labels: Array, weights: Array) -> tuple[Array, Array, tuple[Array, ...]]:
    """Of each sample its bucket, its clicks, and what it adds to the five sums."""
    place = (np.clip(logits / _LOGIT_LIMIT, -1, 1) + 1) * (_NUM_BUCKETS / 2)
    bucket = np.minimum(place.astype(np.int64), _NUM_BUCKETS - 1)
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
        self._waiting: list[tuple[Array, Array, Array]] = []
        self._num_waiting = 0

    def add(self, logits: Array, labels: Array, weights: Array) -> None:
        """Count a batch: a label is the share of a sample's weight that clicked."""
        if not len(logits):
            return
        self._waiting.append((logits, labels, weights))
        self._num_waiting += len(logits)
        if self._num_waiting >= _COUNTED_AT_ONCE:
            self._count()

    def _count(self) -> None:
        """Count what waits; the sums have the same bits whatever is counted at once."""
        if not self._waiting:
            return
        logits, labels, weights = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
        starts = np.cumsum([0, *(len(batch[0]) for batch in self._waiting[:-1])])
        self._waiting, self._num_waiting = [], 0
        bucket, clicks, columns = _counted(logits.astype(np.float64), labels, weights)
        np.add.at(self._buckets[1], bucket, clicks)
        np.add.at(self._buckets[0], bucket, weights - clicks)
        # batch by batch, as if each were counted alone
        for sums in zip(*(np.add.reduceat(column, starts, dtype=np.float64) for column in columns), strict=True):
            self._sums += sums

    def result(self, *, calibration: bool = False, own: dict[str, float] | None = None) -> Metrics:
        """The metrics of everything added so far."""
        self._count()
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
            calibration=self._deciles() if calibration and weight else (),
            own=own or {},
        )

    def _deciles(self) -> tuple[Decile, ...]:
        """Tenths of equal weight: a bucket across a border counts to both sides by its share."""
        used = np.flatnonzero(self._buckets.any(axis=0))
        weights, clicks = self._buckets[:, used].sum(axis=0), self._buckets[1, used]
        middle = ((used + 0.5) / (_NUM_BUCKETS / 2) - 1) * _LOGIT_LIMIT
        predicted = weights / (1 + np.exp(-middle))
        ends = np.concatenate([[0.0], np.cumsum(weights)])
        borders = np.linspace(0.0, ends[-1], _NUM_DECILES + 1)

        def within(values: Array) -> Array:
            return np.diff(np.interp(borders, ends, np.concatenate([[0.0], np.cumsum(values)])))

        weight = ends[-1] / _NUM_DECILES
        pairs = zip((within(predicted) / weight).tolist(), (within(clicks) / weight).tolist(), strict=True)
        return tuple(Decile(mean, rate, float(weight)) for mean, rate in pairs)

    @classmethod
    def of_flat(cls, values: Array) -> list["MetricSums"]:
        """The sums of all labels from a flat vector that `flat_sums` was added to; what is behind them is left out."""
        found = []
        for part in values[: len(values) // FLAT_SIZE * FLAT_SIZE].reshape(-1, FLAT_SIZE):
            sums = cls()
            sums._buckets[:] = part[: 2 * _NUM_BUCKETS].reshape(2, -1)
            sums._sums[:] = part[2 * _NUM_BUCKETS :]
            found.append(sums)
        return found

    def state(self) -> dict[str, Array]:
        """What a checkpoint keeps: the buckets that are not empty, and the sums."""
        self._count()
        used = np.flatnonzero(self._buckets.any(axis=0))
        return {"used": used, "buckets": self._buckets[:, used], "sums": self._sums.copy()}

    def restore(self, state: dict[str, Array]) -> None:
        """Put back what `state` gave."""
        self._waiting, self._num_waiting = [], 0
        self._buckets[:] = 0
        self._buckets[:, state["used"]] = state["buckets"]
        self._sums[:] = state["sums"]
