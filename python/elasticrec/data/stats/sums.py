"""Sums over the batches of a data set: of one side, of dense values, and of measured slots and columns."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticrec import _core
from elasticrec.data.reader import SHOWN_BAD
from elasticrec.data.stats.arrays import F64, I64, BucketAuc, SignCounts, distance, lengths_of

# Rates are smoothed with this many average shows, because rare signs say little.
SMOOTHING = 20.0
# Limit for the dense values kept for quantiles.
_MAX_KEPT = 20_000_000
_NUM_BINS = 50
# Most frequent signs that drift is measured on, with a minimum of shows; the rest count as one sign.
_TOP_SIGNS = 1000
_MIN_SHOWS = 5.0


@dataclass
class SideSums:
    """Sums over the batches of one side: the samples to learn from, or the samples to measure on."""

    num_slots: int
    num_samples: int = 0
    num_records: int = 0
    num_bad: int = 0
    bad: list[str] = field(default_factory=list)
    shows: float = 0.0
    labels: Any = 0.0
    covered: Any = 0
    covered_shows: Any = 0.0
    covered_clicks: Any = 0.0
    signs: Any = 0
    is_truncated: bool = False

    def add(self, batch: _core.Batch, shows: F64, clicks: F64) -> I64:
        """Add a batch; return the number of signs of each (sample, slot)."""
        lengths = lengths_of(batch, self.num_slots)
        has = lengths > 0
        self.num_samples += batch.num_samples
        self.num_records += batch.num_records
        self.num_bad += batch.num_bad
        self.bad += batch.bad[: SHOWN_BAD - len(self.bad)]
        self.shows += float(shows.sum())
        self.labels = self.labels + shows @ batch.labels
        self.covered = self.covered + has.sum(axis=0)
        self.covered_shows = self.covered_shows + shows @ has
        self.covered_clicks = self.covered_clicks + clicks @ has
        self.signs = self.signs + lengths.sum(axis=0)
        return lengths

    def rates(self, num_labels: int) -> list[float | None]:
        return [None if self.shows == 0 else float(self.labels[at] / self.shows) for at in range(num_labels)]


class DenseValues:
    """Values of dense columns: sums and extremes of all values, and some of the values themselves."""

    def __init__(self, num_columns: int, num_samples: int) -> None:
        self._stride = max(1, num_samples * num_columns // _MAX_KEPT)
        self._kept: list[npt.NDArray[np.float32]] = []
        self._counts: list[tuple[F64, F64]] = []
        self.num_present: I64 = np.zeros(num_columns, np.int64)
        self.sums: F64 = np.zeros(num_columns)
        self.smallest: F64 = np.full(num_columns, np.inf)
        self.largest: F64 = np.full(num_columns, -np.inf)

    def add(self, values: npt.NDArray[np.float32], shows: F64, clicks: F64) -> None:
        there = ~np.isnan(values)
        self.num_present += there.sum(axis=0)
        self.sums += np.where(there, values, 0).sum(axis=0, dtype=np.float64)
        self.smallest = np.minimum(self.smallest, np.where(there, values, np.inf).min(axis=0, initial=np.inf))
        self.largest = np.maximum(self.largest, np.where(there, values, -np.inf).max(axis=0, initial=-np.inf))
        self._kept.append(values[:: self._stride])
        self._counts.append((shows[:: self._stride], clicks[:: self._stride]))

    def column(self, at: int) -> tuple[F64, F64, F64]:
        """Return the kept values of a column, NaN for missing ones, with their shows and clicks."""
        values = np.concatenate([part[:, at] for part in self._kept]).astype(np.float64)
        shows, clicks = (np.concatenate([part[which] for part in self._counts]) for which in (0, 1))
        return values, shows, clicks


class DenseBins:
    """Click rates of a dense column by bins of its values; missing values have their own bin."""

    def __init__(self, values: F64, shows: F64, clicks: F64, base: float) -> None:
        there = values[~np.isnan(values)]
        self._edges: F64 = (
            np.unique(np.quantile(there, np.linspace(0, 1, _NUM_BINS + 1))) if len(there) else np.empty(0)
        )
        at = self.find(values)
        self.shows: F64 = np.bincount(at, shows, self.num_bins).astype(np.float64)
        self.rates: F64 = (np.bincount(at, clicks, self.num_bins) + SMOOTHING * base) / (self.shows + SMOOTHING)
        self.measured: F64 = np.zeros(self.num_bins)
        self.auc = BucketAuc()

    @property
    def num_bins(self) -> int:
        return len(self._edges) + 2

    def find(self, values: F64) -> I64:
        at = np.searchsorted(self._edges, values, side="right")
        return np.where(np.isnan(values), len(self._edges) + 1, at)

    def measure(self, values: F64, shows: F64, clicks: F64) -> None:
        at = self.find(values)
        self.measured += np.bincount(at, shows, self.num_bins)
        self.auc.add(self.rates[at], shows, clicks)


class SlotMeasure:
    """Measures a slot on other samples than its counts were learned from."""

    def __init__(self, counts: SignCounts, base: float, without: float) -> None:
        counts.merge()
        self._counts = counts
        self._base = base
        self._without = without
        self._rates = (counts.clicks + SMOOTHING * base) / (counts.shows + SMOOTHING)
        self._shows: F64 = np.zeros(len(counts.signs))
        self._unseen = 0.0
        self._own = SignCounts()
        self.auc = BucketAuc()

    def add(self, signs: npt.NDArray[np.uint64], samples: I64, lengths: I64, shows: F64, clicks: F64) -> None:
        at, is_known = self._counts.find(signs)
        scores = np.full(len(signs), self._base)
        scores[is_known] = self._rates[at[is_known]]
        sums = np.bincount(samples, scores, len(lengths))
        self.auc.add(np.where(lengths > 0, sums / np.maximum(lengths, 1), self._without), shows, clicks)
        weights = shows[samples]
        np.add.at(self._shows, at[is_known], weights[is_known])
        self._unseen += float(weights[~is_known].sum())
        self._own.add(signs[~is_known], weights[~is_known], weights[~is_known])

    def num_new(self) -> int:
        """Return the number of distinct signs that were not learned."""
        self._own.merge()
        return len(self._own.signs)

    def drift(self) -> tuple[float | None, float | None]:
        """Return the distance between the two sides, and the share of the signs that only the measured side has."""
        learned, measured = self._counts.shows, self._shows
        total = measured.sum() + self._unseen
        if learned.sum() <= 0 or total <= 0:
            return None, None
        top = np.argsort(learned)[::-1][:_TOP_SIGNS]
        top = top[learned[top] * min(1.0, total / learned.sum()) >= _MIN_SHOWS]
        rest = [learned.sum() - learned[top].sum()], [total - measured[top].sum()]
        both = (np.concatenate([side[top], more]) for side, more in zip((learned, measured), rest, strict=True))
        return distance(*(np.maximum(side, 0.0) for side in both)), float(self._unseen / total)
