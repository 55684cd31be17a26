"""Two passes over the data of a job: counts by sign are learned on one part and measured on the other."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticrec import _core
from elasticrec.config import Job, match_files
from elasticrec.config.data import Holdout
from elasticrec.data.batches import open_batches
from elasticrec.data.header import check_headers, with_names
from elasticrec.data.stats.arrays import F64, I64, BucketAuc, SignCounts, by_slot, distance, lengths_of
from elasticrec.data.stats.unused import Unused, find_unused
from elasticrec.data.units import UnitSplit, plan_units
from elasticrec.errors import SampleError

SHOWN_BAD = 5
_BATCH_SIZE = 8192
# Samples to measure on, as a share of those to learn from.
_MEASURED = 0.25
# Where a job has no evaluation data, this share of the training data is held out to measure on.
_HELD_OUT = 0.3
# Shows that a sign without any has on average: rare signs say little.
_SMOOTHING = 20.0
# Memory for signs, by slot, is bounded by this; 24 bytes each.
_MAX_SIGNS = 20_000_000
# Dense values kept for quantiles.
_MAX_KEPT = 20_000_000
_NUM_BINS = 50
# Signs that drift is measured over, if there are enough shows of them to tell; the rest count as one.
_TOP_SIGNS = 1000
_MIN_SHOWS = 5.0
QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)

LEAK_AUC = 0.95
_MUCH_DRIFT = 0.3
_MUCH_UNSEEN = 0.5


@dataclass(frozen=True)
class SlotStats:
    """What is known of a slot."""

    name: str
    coverage: float
    """Share of the samples that have a sign."""
    num_signs: int
    """Distinct ones."""
    mean_signs: float
    """Signs a sample."""
    click_rate: float | None
    """Of the samples that have a sign."""
    auc: float | None
    """Of the smoothed click rate of its signs, learned apart from where it is measured."""
    drift: float | None
    """Jensen–Shannon distance between training and evaluation data."""
    unseen: float | None
    """Share of the signs in evaluation data that training data does not have."""


@dataclass(frozen=True)
class DenseStats:
    """What is known of a dense column, before normalisation."""

    name: str
    coverage: float
    min: float | None
    mean: float | None
    max: float | None
    quantiles: dict[str, float]
    auc: float | None
    drift: float | None


@dataclass(frozen=True)
class Stats:
    """What is known of the data of a job."""

    source: str
    num_train: int
    num_eval: int
    has_eval: bool
    """Otherwise part of the training data was held out to measure on."""
    is_sample: bool
    """Not all of the data was read."""
    labels: dict[str, tuple[float | None, float | None]]
    """Rate of each label in training and evaluation data."""
    slots: list[SlotStats]
    dense: list[DenseStats]
    num_records: int
    num_bad: int
    bad: list[str]
    unused: list[Unused]
    warnings: list[str]


@dataclass
class _Side:
    """Sums over the batches of one side."""

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
    is_cut: bool = False

    def add(self, batch: _core.Batch, shows: F64, clicks: F64) -> I64:
        """Count a batch; returns how many signs each (sample, slot) has."""
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


class _Dense:
    """Values of dense columns: extremes of all, the values themselves of some."""

    def __init__(self, num_columns: int, num_samples: int) -> None:
        self._stride = max(1, num_samples * num_columns // _MAX_KEPT)
        self._kept: list[npt.NDArray[np.float32]] = []
        self._counts: list[tuple[F64, F64]] = []
        self.num_there: I64 = np.zeros(num_columns, np.int64)
        self.sums: F64 = np.zeros(num_columns)
        self.smallest: F64 = np.full(num_columns, np.inf)
        self.largest: F64 = np.full(num_columns, -np.inf)

    def add(self, values: npt.NDArray[np.float32], shows: F64, clicks: F64) -> None:
        there = ~np.isnan(values)
        self.num_there += there.sum(axis=0)
        self.sums += np.where(there, values, 0).sum(axis=0, dtype=np.float64)
        self.smallest = np.minimum(self.smallest, np.where(there, values, np.inf).min(axis=0, initial=np.inf))
        self.largest = np.maximum(self.largest, np.where(there, values, -np.inf).max(axis=0, initial=-np.inf))
        self._kept.append(values[:: self._stride])
        self._counts.append((shows[:: self._stride], clicks[:: self._stride]))

    def column(self, at: int) -> tuple[F64, F64, F64]:
        """Values that were kept, NaN where there was none, with their shows and clicks."""
        values = np.concatenate([part[:, at] for part in self._kept]).astype(np.float64)
        shows, clicks = (np.concatenate([part[which] for part in self._counts]) for which in (0, 1))
        return values, shows, clicks


class _Bins:
    """The click rate of a dense column by bins of its values; samples without one are a bin of their own."""

    def __init__(self, values: F64, shows: F64, clicks: F64, base: float) -> None:
        there = values[~np.isnan(values)]
        self._edges: F64 = (
            np.unique(np.quantile(there, np.linspace(0, 1, _NUM_BINS + 1))) if len(there) else np.empty(0)
        )
        at = self.find(values)
        self.shows: F64 = np.bincount(at, shows, self.num_bins).astype(np.float64)
        self.rates: F64 = (np.bincount(at, clicks, self.num_bins) + _SMOOTHING * base) / (self.shows + _SMOOTHING)
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


class _SlotMeasure:
    """A slot measured on samples that its counts were not learned from."""

    def __init__(self, counts: SignCounts, base: float, without: float) -> None:
        counts.merge()
        self._counts = counts
        self._base = base
        self._without = without
        self._rates = (counts.clicks + _SMOOTHING * base) / (counts.shows + _SMOOTHING)
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
        """Distinct signs that were not learned from."""
        self._own.merge()
        return len(self._own.signs)

    def drift(self) -> tuple[float | None, float | None]:
        """Distance of the two sides, and the share of the signs that only this one has."""
        learned, measured = self._counts.shows, self._shows
        total = measured.sum() + self._unseen
        if learned.sum() <= 0 or total <= 0:
            return None, None
        top = np.argsort(learned)[::-1][:_TOP_SIGNS]
        top = top[learned[top] * min(1.0, total / learned.sum()) >= _MIN_SHOWS]
        rest = [learned.sum() - learned[top].sum()], [total - measured[top].sum()]
        both = (np.concatenate([side[top], more]) for side, more in zip((learned, measured), rest, strict=True))
        return distance(*(np.maximum(side, 0.0) for side in both)), float(self._unseen / total)


def collect(job: Job, *, num_samples: int, progress: Callable[[int], None] | None = None) -> Stats:
    """Statistics of the data of a job, from at most `num_samples` samples to learn from and a quarter to measure on."""
    job = with_names(job)
    has_eval = bool(job.data.eval)
    # of few samples no more than asked for
    batch_size = min(_BATCH_SIZE, max(1, round(num_samples * _MEASURED)))
    return _Collection(_prepared(job, has_eval, batch_size), has_eval, num_samples, progress).run(job)


def _prepared(job: Job, has_eval: bool, batch_size: int) -> Job:
    """The job with large batches, dense values as they stand in the data, and something to measure on."""
    plain = {"normalize": "none", "min": None, "max": None}
    changes: dict[str, Any] = {"dense": tuple(column.model_copy(update=plain) for column in job.data.dense)}
    if not has_eval:
        changes["eval"] = Holdout(ratio=_HELD_OUT)
    train = job.train.model_copy(update={"batch_size": batch_size})
    return job.model_copy(update={"data": job.data.model_copy(update=changes), "train": train})


class _Collection:
    def __init__(self, job: Job, has_eval: bool, num_samples: int, progress: Callable[[int], None] | None) -> None:
        self._job = job
        self._has_eval = has_eval
        self._num_samples = num_samples
        self._progress = progress
        self._num_slots = len(job.data.inputs)
        self._learned, self._measured = _Side(self._num_slots), _Side(self._num_slots)
        self._counts = [SignCounts() for _ in job.data.inputs]
        self._dense = _Dense(len(job.data.dense), num_samples)

    def run(self, job: Job) -> Stats:
        for batch, shows, clicks in self._batches(self._learned, self._num_samples, held_out=False):
            self._learned.add(batch, shows, clicks)
            for counts, part in zip(self._counts, by_slot(batch, self._num_slots), strict=True):
                counts.add(part.signs, shows[part.samples], clicks[part.samples])
            self._dense.add(batch.dense, shows, clicks)
        if self._learned.num_samples == 0:
            raise SampleError(f"{job.source}: data.train: expected samples, got none")
        base = float(self._learned.labels[0] / self._learned.shows)
        slots = [
            _SlotMeasure(counts, base, rate) for counts, rate in zip(self._counts, self._without(base), strict=True)
        ]
        bins = [_Bins(*self._dense.column(at), base) for at in range(len(job.data.dense))]
        limit = max(1, round(self._num_samples * _MEASURED))
        for batch, shows, clicks in self._batches(self._measured, limit, held_out=True):
            lengths = self._measured.add(batch, shows, clicks)
            for at, part in enumerate(by_slot(batch, self._num_slots)):
                slots[at].add(part.signs, part.samples, lengths[:, at], shows, clicks)
            for at, column in enumerate(bins):
                column.measure(batch.dense[:, at].astype(np.float64), shows, clicks)
            if not self._has_eval:
                self._dense.add(batch.dense, shows, clicks)
        return self._result(job, slots, bins)

    def _without(self, base: float) -> F64:
        """For each slot the click rate of the samples that have no sign in it."""
        side = self._learned
        clicks = side.labels[0] - side.covered_clicks
        return np.asarray((clicks + _SMOOTHING * base) / (side.shows - side.covered_shows + _SMOOTHING), np.float64)

    def _batches(self, side: _Side, limit: int, *, held_out: bool) -> Iterator[tuple[_core.Batch, F64, F64]]:
        job = self._job
        files = match_files(job, "eval" if held_out else "train")
        check_headers(job, files)
        # units in a random order: if not all of them are read they are still from everywhere
        units = plan_units(files, UnitSplit(job.data.unit_bytes, True, job.train.seed, "", job.data.format), 0, 0)
        parser = _core.Parser(json.dumps(job.features()), missing=float("nan"))
        with closing(open_batches(job, parser, units, shuffle=False, held_out=held_out)) as batches:
            for batch in batches:
                shows = batch.weights.astype(np.float64)
                yield batch, shows, shows * batch.labels[:, 0]
                if self._progress is not None:
                    self._progress(self._learned.num_samples + self._measured.num_samples)
                if side.num_samples >= limit or sum(len(counts.signs) for counts in self._counts) > _MAX_SIGNS:
                    side.is_cut = next(iter(batches), None) is not None
                    return

    def _result(self, job: Job, slots: list[_SlotMeasure], bins: list[_Bins]) -> Stats:
        learned, measured = self._learned, self._measured
        # without evaluation data both sides are training data
        sides = [learned] if self._has_eval else [learned, measured]
        slot_stats = [self._slot(at, slots[at], sides) for at in range(self._num_slots)]
        dense_stats = [self._column(at, bins[at], sides) for at in range(len(bins))]
        labels = job.data.labels
        rates = zip(learned.rates(len(labels)), measured.rates(len(labels)), strict=True)
        return Stats(
            source=job.source,
            num_train=sum(side.num_samples for side in sides),
            num_eval=measured.num_samples if self._has_eval else 0,
            has_eval=self._has_eval,
            is_sample=learned.is_cut or measured.is_cut,
            labels=dict(zip(labels, rates, strict=True)),
            slots=slot_stats,
            dense=dense_stats,
            num_records=learned.num_records + measured.num_records,
            num_bad=learned.num_bad + measured.num_bad,
            bad=[*learned.bad, *measured.bad][:SHOWN_BAD],
            unused=find_unused(job),
            warnings=_warnings(slot_stats, dense_stats),
        )

    def _slot(self, at: int, measure: _SlotMeasure, sides: list[_Side]) -> SlotStats:
        num_samples = sum(side.num_samples for side in sides)
        shows = sum(float(np.asarray(side.covered_shows)[at]) for side in sides if side.num_samples)
        clicks = sum(float(np.asarray(side.covered_clicks)[at]) for side in sides if side.num_samples)
        drift, unseen = measure.drift() if self._has_eval else (None, None)
        counted = [side for side in sides if side.num_samples]
        return SlotStats(
            name=self._job.data.inputs[at].name,
            coverage=sum(int(side.covered[at]) for side in counted) / max(num_samples, 1),
            num_signs=len(self._counts[at].signs) + (0 if self._has_eval else measure.num_new()),
            mean_signs=sum(int(side.signs[at]) for side in counted) / max(num_samples, 1),
            click_rate=clicks / shows if shows else None,
            auc=measure.auc.result(),
            drift=drift,
            unseen=unseen,
        )

    def _column(self, at: int, bins: _Bins, sides: list[_Side]) -> DenseStats:
        dense, count = self._dense, int(self._dense.num_there[at])
        values = dense.column(at)[0]
        values = values[~np.isnan(values)]
        has_drift = self._has_eval and bins.shows.sum() > 0 and bins.measured.sum() > 0
        return DenseStats(
            name=self._job.data.dense[at].name,
            coverage=count / max(sum(side.num_samples for side in sides), 1),
            min=float(dense.smallest[at]) if count else None,
            mean=float(dense.sums[at] / count) if count else None,
            max=float(dense.largest[at]) if count else None,
            quantiles={f"{q:.0%}": float(np.quantile(values, q)) for q in QUANTILES} if len(values) else {},
            auc=bins.auc.result(),
            drift=distance(bins.shows, bins.measured) if has_drift else None,
        )


def _warnings(slots: list[SlotStats], dense: list[DenseStats]) -> list[str]:
    lines = []
    features: list[tuple[str, SlotStats | DenseStats]] = [("slot", slot) for slot in slots]
    for kind, one in [*features, *(("dense column", column) for column in dense)]:
        if one.coverage == 0:
            lines.append(f"{kind} `{one.name}` has no value in any sample looked at: is its name right?")
        if one.auc is not None and one.auc > LEAK_AUC:
            lines.append(f"{kind} `{one.name}` alone has AUC {one.auc:.2f}: is it known only after the click?")
        if one.drift is not None and one.drift > _MUCH_DRIFT:
            lines.append(f"{kind} `{one.name}` differs between train and eval: drift {one.drift:.2f}")
        if isinstance(one, SlotStats) and one.unseen is not None and one.unseen > _MUCH_UNSEEN:
            lines.append(f"slot `{one.name}`: {one.unseen:.0%} of its signs in eval are not in train")
    return lines
