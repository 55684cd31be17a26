"""Bucketed metrics against naive ones over the same samples."""

import json
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from elasticrec.training.metrics import Metrics, MetricSums

Array = npt.NDArray[np.float64]


def samples(count: int, seed: int = 0) -> tuple[Array, Array, Array]:
    """Return logits, soft labels and weights."""
    random = np.random.default_rng(seed)
    logits = random.normal(-1, 2, count)
    weights = random.integers(1, 6, count).astype(np.float64)
    clicks = random.binomial(weights.astype(int), 1 / (1 + np.exp(-logits - random.normal(0, 1, count))))
    return logits, clicks / weights, weights


def naive_auc(logits: Array, labels: Array, weights: Array) -> float:
    """Compare every pair of a click and a non-click."""
    above = pairs = 0.0
    for score, click in zip(logits, labels * weights, strict=True):
        for other, miss in zip(logits, (1 - labels) * weights, strict=True):
            pairs += click * miss
            above += click * miss * (1.0 if score > other else 0.5 if score == other else 0.0)
    return above / pairs


def measure(*batches: tuple[Array, Array, Array]) -> Metrics:
    sums = MetricSums()
    for batch in batches:
        sums.add(*batch)
    return sums.result()


@pytest.mark.parametrize("seed", range(3))
def test_auc_equals_the_exact_auc_within_a_bucket(seed: int) -> None:
    batch = samples(300, seed)
    assert measure(batch).auc == pytest.approx(naive_auc(*batch), abs=1e-4)


def test_equal_scores_have_an_auc_of_one_half() -> None:
    batch = (np.zeros(10), np.array([1.0, 0.0] * 5), np.ones(10))
    assert measure(batch).auc == 0.5


def test_auc_tells_very_small_rates_apart() -> None:
    """Buckets are over logits, where rates near 1e-6 are far apart."""
    logits = np.array([-13.9, -13.8, -13.7, -13.6])
    assert measure((logits, np.array([0.0, 0.0, 1.0, 1.0]), np.ones(4))).auc == 1.0


def test_logits_beyond_the_limits_are_in_the_last_buckets() -> None:
    metrics = measure((np.array([-1e30, -40.0, 40.0, 1e30]), np.array([0.0, 0.0, 1.0, 1.0]), np.ones(4)))
    assert metrics.auc == 1.0
    assert metrics.log_loss == pytest.approx(0.0, abs=1e-12)
    assert metrics.copc == pytest.approx(1.0)


def test_log_loss_and_copc() -> None:
    logits, labels, weights = samples(5000)
    metrics = measure((logits, labels, weights))
    rate = 1 / (1 + np.exp(-logits))
    loss = -(labels * np.log(rate) + (1 - labels) * np.log(1 - rate))
    assert metrics.log_loss == pytest.approx((weights * loss).sum() / weights.sum(), rel=1e-12)
    assert metrics.copc == pytest.approx((labels * weights).sum() / (rate * weights).sum(), rel=1e-12)
    assert metrics.samples == 5000


def test_a_weight_of_n_equals_n_samples() -> None:
    logits, labels, weights = samples(200)
    times = weights.astype(int)
    clicks = np.rint(labels * weights).astype(int)
    outcomes = np.concatenate([np.arange(n) < c for n, c in zip(times, clicks, strict=True)]).astype(float)
    repeated = measure((np.repeat(logits, times), outcomes, np.ones(times.sum())))
    weighted = measure((logits, labels, weights))
    for name in ("auc", "log_loss", "copc"):
        assert getattr(weighted, name) == pytest.approx(getattr(repeated, name), rel=1e-9), name


def test_metrics_do_not_depend_on_the_split_into_batches() -> None:
    logits, labels, weights = samples(1000)
    whole = measure((logits, labels, weights))
    parts = measure(*[(logits[at::7], labels[at::7], weights[at::7]) for at in range(7)])
    assert parts.samples == whole.samples
    for name in ("auc", "log_loss", "copc"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-12), name


def test_restored_sums_continue_with_the_same_bits() -> None:
    first, second = samples(500, 1), samples(500, 2)
    sums = MetricSums()
    sums.add(*first)
    state = sums.state()
    sums.add(*second)
    # also into sums that have counted other samples
    for used in (False, True):
        restored = MetricSums()
        if used:
            restored.add(*samples(50, 3))
        restored.restore(state)
        assert restored.result() == measure(first)
        restored.add(*second)
        assert restored.result() == sums.result()


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_labels_with_one_outcome_have_no_auc(label: float) -> None:
    metrics = measure((np.linspace(-1, 1, 9), np.full(9, label), np.ones(9)))
    assert metrics.auc is None
    assert metrics.log_loss is not None
    assert metrics.copc is not None


def test_without_samples_there_are_no_metrics() -> None:
    empty = np.zeros(0)
    for metrics in (measure(), measure((empty, empty, empty))):
        assert metrics == Metrics(samples=0, auc=None, log_loss=None, copc=None)


def test_float32_batches() -> None:
    logits, labels, weights = (array.astype(np.float32) for array in samples(2000))
    sums = MetricSums()
    sums.add(logits, labels, weights)
    assert sums.result().auc == pytest.approx(measure(samples(2000)).auc, abs=1e-4)


def naive_deciles(logits: Array, labels: Array, weights: Array) -> list[tuple[float, float]]:
    """Repeat every sample by its weight, sort by score, cut into ten."""
    times = weights.astype(int)
    order = np.argsort(logits, kind="stable")
    scores = np.repeat((1 / (1 + np.exp(-logits)))[order], times[order])
    clicks = np.repeat(labels[order], times[order])
    parts = zip(np.split(scores, 10), np.split(clicks, 10), strict=True)
    return [(float(score.mean()), float(click.mean())) for score, click in parts]


def calibrate(*batch: Array) -> Metrics:
    sums = MetricSums()
    sums.add(*batch)
    return sums.result(calibration=True)


@pytest.mark.parametrize("weighted", [False, True])
def test_calibration_deciles_have_equal_weight(weighted: bool) -> None:
    logits, labels, weights = samples(1000)
    weights = weights if weighted else np.ones(1000)
    # a total weight divisible by ten, for the naive computation
    weights[-1] += -weights.sum() % 10
    deciles = calibrate(logits, labels, weights).calibration
    assert [decile.weight for decile in deciles] == [weights.sum() / 10] * 10
    for decile, (predicted, observed) in zip(deciles, naive_deciles(logits, labels, weights), strict=True):
        assert decile.predicted == pytest.approx(predicted, rel=2e-4)
        assert decile.observed == pytest.approx(observed, abs=1e-3), "equal up to samples in the bucket of a border"


def test_calibration_adds_up_to_copc() -> None:
    metrics = calibrate(*samples(777))
    clicks = sum(decile.observed * decile.weight for decile in metrics.calibration)
    predicted = sum(decile.predicted * decile.weight for decile in metrics.calibration)
    assert clicks / predicted == pytest.approx(metrics.copc, rel=1e-4)


def test_equal_scores_have_equal_deciles() -> None:
    deciles = calibrate(np.zeros(7), np.array([1.0, 0, 0, 1, 0, 0, 0]), np.ones(7)).calibration
    assert all(decile.predicted == pytest.approx(0.5, abs=1e-3) for decile in deciles)
    assert all(decile.observed == pytest.approx(2 / 7) for decile in deciles)


def test_metrics_survive_json() -> None:
    metrics = replace(calibrate(*samples(50)), own={"mine": 0.25})
    assert Metrics.from_dict(json.loads(json.dumps(metrics.to_dict()))) == metrics
    assert measure(samples(50)).to_dict().keys() == {"samples", "auc", "log_loss", "copc"}
    assert calibrate(*(np.zeros(0),) * 3).calibration == ()


def test_a_metric_by_name() -> None:
    metrics = Metrics(samples=1, auc=0.5, log_loss=None, copc=float("nan"), own={"mine": 0.25})
    assert [metrics.value(name) for name in ("auc", "log_loss", "copc", "mine", "other")] == [
        0.5,
        None,
        None,
        0.25,
        None,
    ]


def test_an_auc_below_one_half_must_be_significant() -> None:
    rng = np.random.default_rng(1)
    chance = [
        calibrate(rng.normal(size=2000), rng.integers(0, 2, 2000).astype(float), np.ones(2000)) for _ in range(50)
    ]
    assert all(metrics.errors_below_chance() is None for metrics in chance)
    assert any(metrics.auc is not None and metrics.auc < 0.5 for metrics in chance)
    logits = rng.normal(size=2000)
    labels = (rng.normal(size=2000) > 2 * logits).astype(float)
    below = calibrate(logits, labels, np.ones(2000)).errors_below_chance()
    assert below is not None and below > 20
    assert calibrate(-logits, labels, np.ones(2000)).errors_below_chance() is None
    # the same share of six samples is not significant
    assert calibrate(logits[:6], np.array([1.0, 0, 1, 0, 1, 0]), np.ones(6)).errors_below_chance() is None
    assert calibrate(logits, np.zeros(2000), np.ones(2000)).errors_below_chance() is None


def test_the_standard_error_equals_that_of_random_scores() -> None:
    rng = np.random.default_rng(2)
    labels = (np.arange(400) < 40).astype(float)
    aucs = [measure((rng.normal(size=400), labels, np.ones(400))).auc for _ in range(400)]
    spread = float(np.std([auc for auc in aucs if auc is not None]))
    metrics = replace(calibrate(rng.normal(size=400), labels, np.ones(400)), auc=0.5 - 4 * spread)
    assert metrics.errors_below_chance() == pytest.approx(4.0, rel=0.15)


def test_sums_have_the_same_bits_for_any_grouping() -> None:
    rng = np.random.default_rng(5)
    at_once, one_by_one = MetricSums(), MetricSums()
    for size in (512, 1, 7, 0, 300, 512):
        logits = rng.normal(size=size).astype(np.float32)
        labels, weights = rng.random(size).astype(np.float32), rng.random(size).astype(np.float32)
        for sums in (at_once, one_by_one):
            sums.add(logits, labels, weights)
        one_by_one.result()
    for key, array in at_once.state().items():
        assert array.tobytes() == one_by_one.state()[key].tobytes(), key
    assert at_once.result().samples == 1332
