"""The gate before an offer, and the state of a version that it refuses."""

from pathlib import Path
from typing import Any

import pytest

from elasticrec.config.publish import Gate, Publish
from elasticrec.errors import UnavailableError
from elasticrec.publish.gate import Candidate, refusals
from elasticrec.publish.offer import HELD_REASON, offer_version
from elasticrec.publish.rollout.known_store import record_store
from elasticrec.repository.repository import Repository
from elasticrec.repository.version import Version
from support.versions import write_version

MEASURED: dict[str, Any] = {
    "train": [{"auc": 0.6, "log_loss": 0.7}, {"auc": 0.1}],
    "eval": [{"auc": 0.75, "log_loss": 0.4}, {"auc": 0.2}],
}


def reasons(rows: int = 100, current: int | None = 100, metrics: Any = None, **gate: Any) -> list[str]:
    return refusals(Gate(**gate), Candidate(rows, MEASURED if metrics is None else metrics), current)


def test_by_default_only_weights_and_rows_are_checked() -> None:
    assert reasons() == []
    assert reasons(metrics={"train": [], "eval": None}) == []
    assert refusals(Gate(), Candidate(1, MEASURED, ("mlp.0.weight", "b")), None) == [
        "dense weights: `mlp.0.weight` has values that are not finite",
        "dense weights: `b` has values that are not finite",
    ]


def test_bounds_apply_to_the_evaluation_of_the_first_label() -> None:
    assert reasons(min_auc=0.75, max_log_loss=0.4) == []
    assert reasons(min_auc=0.76, max_log_loss=0.39) == [
        "AUC of the evaluation: expected at least 0.76, got 0.7500",
        "log loss of the evaluation: expected at most 0.39, got 0.4000",
    ]


def test_without_an_evaluation_bounds_apply_to_the_last_pass() -> None:
    metrics = {**MEASURED, "eval": None}
    assert reasons(metrics=metrics, min_auc=0.6) == []
    assert reasons(metrics=metrics, min_auc=0.61) == ["AUC of the last pass: expected at least 0.61, got 0.6000"]


@pytest.mark.parametrize("value", [None, float("nan"), "0.9", True])
def test_a_metric_that_is_not_a_number_fails_any_bound(value: Any) -> None:
    metrics = {"eval": [{"auc": value, "log_loss": value}]}
    assert reasons(metrics=metrics, min_auc=0.1, max_log_loss=9.0) == [
        "AUC of the evaluation: expected at least 0.1, got none",
        "log loss of the evaluation: expected at most 9, got none",
    ]
    assert reasons(metrics={}, min_auc=0.1) == ["AUC of the last pass: expected at least 0.1, got none"]


def test_rows_may_shrink_by_max_row_loss() -> None:
    assert reasons(rows=50) == []
    assert reasons(rows=1000) == []
    assert reasons(rows=49) == [
        "rows: expected to lose at most 50% of the current version's 100, got 49, a loss of 51%"
    ]
    assert reasons(rows=0, max_row_loss=1.0) == []
    assert reasons(rows=99, max_row_loss=0.0) != []
    assert reasons(rows=0, current=None) == []
    assert reasons(rows=0, current=0) == []


def offer(repository: Repository, settings: Publish, *, has_store: bool = False, **changes: Any) -> Any:
    version = write_version(repository, **changes)
    return offer_version(repository, version, settings, has_store=has_store)


def test_a_failed_gate_stops_the_offer_and_keeps_the_version(tmp_path: Path) -> None:
    repository = Repository.open(tmp_path, "demo")
    assert offer(repository, Publish(), rows=100).summary == "offered"
    result = offer(repository, Publish(), rows=10)
    assert not result.is_offered
    assert result.summary.startswith("not offered: rows: expected to lose at most 50%")
    assert (repository.versions(), repository.current()) == ([1, 2], 1)
    # the bound refers to the current version, not to a refused version
    assert not offer(repository, Publish(), rows=11).is_offered
    assert offer(repository, Publish(), rows=60).is_offered
    assert repository.current() == 4


def test_with_a_store_the_rollout_makes_the_offer(tmp_path: Path) -> None:
    repository = Repository.open(tmp_path, "demo")
    result = offer(repository, Publish(), has_store=True)
    assert (result.is_offered, result.summary) == (False, "not offered: the store must load it first")
    assert repository.current() is None


def test_a_recorded_store_blocks_the_offer_of_a_job_without_one(tmp_path: Path) -> None:
    """`deliver` recorded the store: a publish by hand must not offer a version that no cube server has."""
    repository = Repository.open(tmp_path, "demo")
    assert offer(repository, Publish()).is_offered
    record_store(repository, [["127.0.0.1:8600"]], None)
    result = offer(repository, Publish())
    store_file = tmp_path / "demo/STORE"
    assert result.summary == (
        "not offered: the store must load it first, then `elasticrec deliver` offers it; "
        f"remove {store_file} if the store no longer exists"
    )
    assert repository.current() == 1
    store_file.unlink()
    assert offer(repository, Publish()).is_offered


def test_a_rollback_blocks_the_offer_and_old_versions_are_collected(tmp_path: Path) -> None:
    repository = Repository.open(tmp_path, "demo")
    settings = Publish(keep=2)
    for _ in range(2):
        assert offer(repository, settings).collected == ()
    assert offer(repository, settings).collected == (1,)
    repository.rollback(2)
    result = offer(repository, settings)
    assert result.summary == f"not offered: {HELD_REASON}"
    assert result.collected == ()
    assert (repository.versions(), repository.current()) == ([2, 3, 4], 2)
    # a version that was not offered is collected like any other
    repository.resume()
    assert offer(repository, settings).collected == (3, 2)


def test_a_version_older_than_the_current_one_is_not_offered(tmp_path: Path) -> None:
    repository = Repository.open(tmp_path, "demo")
    late, newer = write_version(repository), write_version(repository)
    assert offer_version(repository, newer, Publish(), has_store=False).is_offered
    result = offer_version(repository, late, Publish(), has_store=False)
    assert result.summary == "not offered: the newer version 2 is current"
    assert repository.current() == 2
    # another process may have offered the same version
    assert offer_version(repository, newer, Publish(), has_store=False).summary == "offered"


def test_old_versions_that_cannot_be_removed_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = Repository.open(tmp_path, "demo")
    repository.storage.write("PINS", b"damaged")
    result = offer(repository, Publish())
    assert result.is_offered
    assert result.collect_error is not None
    assert "PINS: expected" in result.collect_error


def test_a_version_is_not_offered_if_the_current_one_cannot_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repository that does not answer must not switch off the limit of lost rows."""
    repository = Repository.open(tmp_path, "demo")
    assert offer(repository, Publish(), rows=100).is_offered

    def unavailable(number: int) -> Version:
        raise UnavailableError(f"version {number}: did not answer")

    with monkeypatch.context() as patch:
        patch.setattr(repository, "version", unavailable)
        result = offer(repository, Publish(), rows=10)
    assert (result.summary, result.has_failed) == ("not offered: version 1: did not answer", True)
    assert repository.current() == 1
    # A current version that was removed has no rows to compare with.
    repository.remove("1")
    assert offer(repository, Publish(), rows=10).is_offered
