"""Statistics in two passes over the data: click rates are learned on one part and measured on the other."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np

from elasticrec import _core
from elasticrec.config import Job, match_files
from elasticrec.config.data import Holdout
from elasticrec.data.batches import open_batches
from elasticrec.data.header import check_headers, with_names
from elasticrec.data.reader import SHOWN_BAD
from elasticrec.data.stats.arrays import F64, SignCounts, distance, split_by_slot
from elasticrec.data.stats.result import DenseStats, SlotStats, Stats
from elasticrec.data.stats.sums import SMOOTHING, DenseBins, DenseValues, SideSums, SlotMeasure
from elasticrec.data.stats.unused import find_unused
from elasticrec.data.units import UnitSplit, plan_units
from elasticrec.errors import SampleError

_BATCH_SIZE = 8192
# Samples to measure on, as a share of the samples to learn from.
_MEASURED = 0.25
# Share of the training data to measure on if the job has no evaluation data.
_HELD_OUT = 0.3
# Limit for the signs of all slots together, 24 bytes each.
_MAX_SIGNS = 20_000_000
QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)

LEAK_AUC = 0.95
_LARGE_DRIFT = 0.3
_LARGE_UNSEEN = 0.5


def collect(job: Job, *, num_samples: int, progress: Callable[[int], None] | None = None) -> Stats:
    """Return statistics from at most `num_samples` samples to learn from and a quarter as many to measure on."""
    job = with_names(job)
    has_eval = bool(job.data.eval)
    # With few samples, a batch must not exceed the number to measure on.
    batch_size = min(_BATCH_SIZE, max(1, round(num_samples * _MEASURED)))
    return _Collection(_measurement_job(job, has_eval, batch_size), has_eval, num_samples, progress).run(job)


def _measurement_job(job: Job, has_eval: bool, batch_size: int) -> Job:
    """Return the job with large batches, dense values without normalisation, and samples to measure on."""
    plain = {"normalize": "none", "min": None, "max": None}
    changes: dict[str, Any] = {"dense": tuple(column.model_copy(update=plain) for column in job.data.dense)}
    if not has_eval:
        changes["eval"] = Holdout(ratio=_HELD_OUT)
    train = job.train.model_copy(update={"batch_size": batch_size})
    return job.model_copy(update={"data": job.data.model_copy(update=changes), "train": train})


class _Collection:
    """Both passes over the data, and the statistics from them."""

    def __init__(self, job: Job, has_eval: bool, num_samples: int, progress: Callable[[int], None] | None) -> None:
        self._job = job
        self._has_eval = has_eval
        self._num_samples = num_samples
        self._progress = progress
        self._num_slots = len(job.data.inputs)
        self._learned, self._measured = SideSums(self._num_slots), SideSums(self._num_slots)
        self._counts = [SignCounts() for _ in job.data.inputs]
        self._dense = DenseValues(len(job.data.dense), num_samples)

    def run(self, job: Job) -> Stats:
        for batch, shows, clicks in self._batches(self._learned, self._num_samples, held_out=False):
            self._learned.add(batch, shows, clicks)
            for counts, part in zip(self._counts, split_by_slot(batch, self._num_slots), strict=True):
                counts.add(part.signs, shows[part.samples], clicks[part.samples])
            self._dense.add(batch.dense, shows, clicks)
        if self._learned.num_samples == 0:
            raise SampleError(f"{job.source}: data.train: expected samples, got none")
        base = float(self._learned.labels[0] / self._learned.shows)
        slots = [
            SlotMeasure(counts, base, rate)
            for counts, rate in zip(self._counts, self._rates_without_sign(base), strict=True)
        ]
        bins = [DenseBins(*self._dense.column(at), base) for at in range(len(job.data.dense))]
        limit = max(1, round(self._num_samples * _MEASURED))
        for batch, shows, clicks in self._batches(self._measured, limit, held_out=True):
            lengths = self._measured.add(batch, shows, clicks)
            for at, part in enumerate(split_by_slot(batch, self._num_slots)):
                slots[at].add(part.signs, part.samples, lengths[:, at], shows, clicks)
            for at, column in enumerate(bins):
                column.measure(batch.dense[:, at].astype(np.float64), shows, clicks)
            if not self._has_eval:
                self._dense.add(batch.dense, shows, clicks)
        return self._result(job, slots, bins)

    def _rates_without_sign(self, base: float) -> F64:
        """Return for each slot the click rate of the samples without a sign in it."""
        side = self._learned
        clicks = side.labels[0] - side.covered_clicks
        return np.asarray((clicks + SMOOTHING * base) / (side.shows - side.covered_shows + SMOOTHING), np.float64)

    def _batches(self, side: SideSums, limit: int, *, held_out: bool) -> Iterator[tuple[_core.Batch, F64, F64]]:
        job = self._job
        files = match_files(job, "eval" if held_out else "train")
        check_headers(job, files)
        # Read units in random order, so that the first of them represent all data.
        units = plan_units(files, UnitSplit(job.data.unit_bytes, True, job.train.seed, "", job.data.format), 0, 0)
        parser = _core.Parser(json.dumps(job.features()), missing=float("nan"))
        with closing(open_batches(job, parser, units, shuffle=False, held_out=held_out)) as batches:
            for batch in batches:
                shows = batch.weights.astype(np.float64)
                yield batch, shows, shows * batch.labels[:, 0]
                if self._progress is not None:
                    self._progress(self._learned.num_samples + self._measured.num_samples)
                if side.num_samples >= limit or sum(len(counts.signs) for counts in self._counts) > _MAX_SIGNS:
                    side.is_truncated = next(iter(batches), None) is not None
                    return

    def _result(self, job: Job, slots: list[SlotMeasure], bins: list[DenseBins]) -> Stats:
        learned, measured = self._learned, self._measured
        # Without evaluation data, both sides are training data.
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
            is_sample=learned.is_truncated or measured.is_truncated,
            labels=dict(zip(labels, rates, strict=True)),
            slots=slot_stats,
            dense=dense_stats,
            num_records=learned.num_records + measured.num_records,
            num_bad=learned.num_bad + measured.num_bad,
            bad=[*learned.bad, *measured.bad][:SHOWN_BAD],
            unused=find_unused(job),
            warnings=_warnings(slot_stats, dense_stats),
        )

    def _slot(self, at: int, measure: SlotMeasure, sides: list[SideSums]) -> SlotStats:
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

    def _column(self, at: int, bins: DenseBins, sides: list[SideSums]) -> DenseStats:
        dense, count = self._dense, int(self._dense.num_present[at])
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
            lines.append(f"{kind} `{one.name}` has no value in any inspected sample: is its name correct?")
        if one.auc is not None and one.auc > LEAK_AUC:
            lines.append(f"{kind} `{one.name}` alone has AUC {one.auc:.2f}: is it known only after the click?")
        if one.drift is not None and one.drift > _LARGE_DRIFT:
            lines.append(f"{kind} `{one.name}` differs between train and eval: drift {one.drift:.2f}")
        if isinstance(one, SlotStats) and one.unseen is not None and one.unseen > _LARGE_UNSEEN:
            lines.append(f"slot `{one.name}`: {one.unseen:.0%} of its signs in eval are not in train")
    return lines
