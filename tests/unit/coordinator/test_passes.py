"""Passes: recorded before the first lease, equal after a restart, and ending as in local training."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

from elasticrec.coordinator.passes import Passes, Upkeep
from elasticrec.data.units import read_units
from elasticrec.errors import ModelError, SampleError
from elasticrec.journal import Entry
from elasticrec.training.checkpoint import Progress
from elasticrec.training.upkeep import run_upkeep
from support.fake_roles import plan_of
from support.small import MakeJob


def test_unit_ids_continue_across_passes(tmp_path: Path) -> None:
    journal: list[Entry] = []
    passes = Passes(tmp_path / "units", plan_of(tmp_path, num_units=4, num_passes=2), journal.append)
    first, second = passes.begin_next(), passes.begin_next()
    assert [(one.first_unit, one.end_unit) for one in (first, second)] == [(0, 4), (4, 8)]
    assert passes.is_last and passes.end_unit == 8
    assert [boundary["before_unit"] for boundary in passes.boundaries] == [4, 8]
    assert [unit.id for unit in read_units(tmp_path / "units/epoch-00001.jsonl")] == [4, 5, 6, 7]
    assert passes.unit(6).epoch == 1 and passes.unit(6).start == 16
    again = Passes(tmp_path / "units", plan_of(tmp_path, num_passes=2), journal.append)
    for entry in journal:
        again.replay({"n": 0, "term": 1, **entry})
    assert again.begun == passes.begun and again.unit(6) == passes.unit(6)


def test_units_are_written_before_the_pass_begins(tmp_path: Path) -> None:
    def crash(entry: Entry) -> None:
        assert [unit.id for unit in read_units(tmp_path / "units" / entry["file"])] == list(range(6))
        raise OSError("crash")

    passes = Passes(tmp_path / "units", plan_of(tmp_path), crash)
    with pytest.raises(OSError, match="crash"):
        passes.begin_next()
    assert passes.begun == []
    # The data changed in between: no unit was leased, so the files are split again.
    with (tmp_path / "train.txt").open("a") as file:
        file.write("1 0 5:0\n")
    passes = Passes(tmp_path / "units", plan_of(tmp_path), list[Entry]().append)
    assert passes.begin_next().end_unit == 7


def test_boundaries_do_not_change_with_the_job(tmp_path: Path) -> None:
    journal: list[Entry] = []
    Passes(tmp_path / "units", plan_of(tmp_path, upkeep=Upkeep(decay=0.5)), journal.append).begin_next()
    again = Passes(tmp_path / "units", plan_of(tmp_path, upkeep=Upkeep(decay=0.9)), journal.append)
    again.replay({"n": 0, "term": 1, **journal[0]})
    assert again.boundaries[0]["decay"] == 0.5


def test_a_changed_units_file_is_refused(tmp_path: Path) -> None:
    journal: list[Entry] = []
    Passes(tmp_path / "units", plan_of(tmp_path, num_units=3), journal.append).begin_next()
    other = tmp_path / "other"
    other.mkdir()
    Passes(tmp_path / "units", plan_of(other, num_units=3), list[Entry]().append).begin_next()
    with pytest.raises(ModelError, match=r"epoch-00000.jsonl: sha-256 differs from the journal: the units of pass 0"):
        Passes(tmp_path / "units", plan_of(tmp_path), journal.append).replay({"n": 0, "term": 1, **journal[0]})
    (tmp_path / "units/epoch-00000.jsonl").write_text("{}\n")
    with pytest.raises(ModelError, match="damaged"):
        Passes(tmp_path / "units", plan_of(tmp_path), journal.append).replay({"n": 0, "term": 1, **journal[0]})


def test_files_without_samples_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("")
    with pytest.raises(SampleError, match=r"data.train: expected samples, got 1 file\(s\) without any"):
        Passes(tmp_path / "units", plan_of(tmp_path), list[Entry]().append).begin_next()


@pytest.mark.parametrize(
    ("decay", "evict"),
    [
        ({}, {}),
        ({"show_click": 0.5}, {}),
        ({}, {"min_score": 1.5}),
        ({"show_click": 0.9}, {"max_age": 2, "nonclk_coeff": 0.2, "click_coeff": 3.0}),
    ],
)
def test_a_pass_ends_like_an_epoch(make_job: MakeJob, decay: Any, evict: Any) -> None:
    job = make_job(sparse={"partitions": 4, "decay": decay, "evict": evict})
    local = Mock()
    local.table.evict.return_value = 0
    run_upkeep(job, local, Progress(epoch=3, unit=0, batches=1, steps=1, samples=1, records=1, bad_records=0))
    settings = job.sparse.evict
    upkeep = Upkeep(
        decay=job.sparse.decay.show_click,
        min_score=settings.min_score,
        max_age=settings.max_age,
        nonclk_coeff=settings.nonclk_coeff,
        click_coeff=settings.click_coeff,
    )
    assert shard_calls(upkeep.boundary(3, before_unit=40)) == local.table.mock_calls


def shard_calls(boundary: dict[str, Any]) -> list[Any]:
    """Return the calls of a shard to its table at a boundary, as in crates/ps/src/shard.rs."""
    assert boundary.keys() == {
        "before_unit", "decay", "decay_step", "coefficients", "min_score", "now", "max_age"
    }  # fmt: skip
    calls = []
    if boundary["decay"] is not None:
        calls.append(call.decay(boundary["decay"], boundary["decay_step"]))
    if boundary["min_score"] is not None or boundary["max_age"] is not None:
        nonclk_coeff, click_coeff = boundary["coefficients"]
        more = {key: boundary[key] for key in ("min_score", "now", "max_age")}
        calls.append(call.evict(nonclk_coeff=nonclk_coeff, click_coeff=click_coeff, **more))
    return calls
