"""Arrays for statistics: signs of a batch by slot, counts by sign, AUC from a histogram."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elasticrec import _core

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SlotPart:
    """The signs of one slot in a batch, with the sample of each."""

    signs: U64
    samples: I64


def lengths_of(batch: _core.Batch, num_slots: int) -> I64:
    """Return the number of signs of each (sample, slot)."""
    offsets = batch.offsets.astype(np.int64)
    return (offsets[1:] - offsets[:-1]).reshape(-1, num_slots)


def split_by_slot(batch: _core.Batch, num_slots: int) -> list[SlotPart]:
    """Return the signs of a batch, slot by slot."""
    lengths = lengths_of(batch, num_slots)
    slots = np.repeat(np.tile(np.arange(num_slots, dtype=np.uint16), len(lengths)), lengths.ravel())
    samples = np.repeat(np.arange(len(lengths)), lengths.sum(axis=1))
    # A stable sort of small integers is a radix sort.
    order = np.argsort(slots, kind="stable")
    ends = np.cumsum(lengths.sum(axis=0))[:-1]
    parts = zip(np.split(batch.signs[order], ends), np.split(samples[order], ends), strict=True)
    return [SlotPart(signs, samples) for signs, samples in parts]


class SignCounts:
    """Shows and clicks of each distinct sign of a slot; additions are merged from time to time."""

    def __init__(self) -> None:
        self.signs: U64 = np.empty(0, np.uint64)
        self.shows: F64 = np.empty(0)
        self.clicks: F64 = np.empty(0)
        self._pending: list[tuple[U64, F64, F64]] = []
        self._num_pending = 0

    def add(self, signs: U64, shows: F64, clicks: F64) -> None:
        """Add signs, which may repeat."""
        self._pending.append((signs, shows, clicks))
        self._num_pending += len(signs)
        if self._num_pending > max(len(self.signs), 1 << 16):
            self.merge()

    def merge(self) -> None:
        """Merge all additions."""
        if not self._pending:
            return
        parts = [(self.signs, self.shows, self.clicks), *self._pending]
        signs, shows, clicks = (np.concatenate([part[at] for part in parts]) for at in range(3))
        self.signs, inverse = np.unique(signs, return_inverse=True)
        self.shows = np.bincount(inverse, shows, len(self.signs)).astype(np.float64)
        self.clicks = np.bincount(inverse, clicks, len(self.signs)).astype(np.float64)
        self._pending, self._num_pending = [], 0

    def find(self, signs: U64) -> tuple[I64, npt.NDArray[np.bool_]]:
        """Return the positions of signs among the distinct signs, and which of them are known."""
        if len(self.signs) == 0:
            return np.zeros(len(signs), np.int64), np.zeros(len(signs), np.bool_)
        at = np.minimum(np.searchsorted(self.signs, signs), len(self.signs) - 1)
        return at, self.signs[at] == signs


class BucketAuc:
    """AUC of scores between 0 and 1, computed from a histogram."""

    # Log odds from -16 to 16 in steps of 1/1024, fine enough to tell click rates of 1e-6 apart.
    _RANGE = 16.0
    _STEPS = 1024

    def __init__(self) -> None:
        size = int(2 * self._RANGE * self._STEPS) + 1
        self._clicks: F64 = np.zeros(size)
        self._others: F64 = np.zeros(size)

    def add(self, scores: F64, shows: F64, clicks: F64) -> None:
        """Add samples with their shows and clicks."""
        odds = np.log(np.maximum(scores, 1e-12)) - np.log(np.maximum(1 - scores, 1e-12))
        at = np.rint((np.clip(odds, -self._RANGE, self._RANGE) + self._RANGE) * self._STEPS).astype(np.int64)
        self._clicks += np.bincount(at, clicks, len(self._clicks))
        self._others += np.bincount(at, shows - clicks, len(self._others))

    def result(self) -> float | None:
        """Return the AUC, or None if there is only one outcome."""
        clicks, others = self._clicks.sum(), self._others.sum()
        if clicks <= 0 or others <= 0:
            return None
        below = np.cumsum(self._others) - self._others
        return float(np.sum(self._clicks * (below + 0.5 * self._others)) / (clicks * others))


def distance(first: F64, second: F64) -> float:
    """Return the Jensen–Shannon distance of two distributions given as counts: 0 for equal, 1 for disjoint ones.

    It is corrected for chance: the expected divergence of two draws from the same distribution is subtracted.
    """
    p, q = first / first.sum(), second / second.sum()
    middle = (p + q) / 2

    def divergence(a: F64) -> float:
        has = a > 0
        return float(np.sum(a[has] * np.log2(a[has] / middle[has])))

    chance = (np.count_nonzero(middle) - 1) * (1 / first.sum() + 1 / second.sum()) / (8 * np.log(2))
    return float(np.sqrt(max(0.0, (divergence(p) + divergence(q)) / 2 - chance)))
