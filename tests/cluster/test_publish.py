"""A job that publishes while it trains: its last version equals the final tables of its servers, despite failures."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticrec import _core
from elasticrec.config.strategies import STRATEGIES
from elasticrec.repository.repository import Repository
from support.cluster import Trainings, load_rows
from support.disks import fill, small_file_system
from support.harness import succeed

# Versions as often as the job allows, so that a fast machine writes several before the data ends.
PUBLISH = ("publish.every=0.5s", "publish.base_every=4", "publish.gate.max_row_loss=1")
# At the end of each pass, half of the rows that were shown once are evicted.
EVICT = ("train.epochs=2", "sparse.decay.show_click=0.5", "sparse.evict.min_score=0.05")


def repository(trainings: Trainings) -> Repository:
    return Repository.open(trainings.directory / "models", "cluster")


def check_last(trainings: Trainings, found: Repository | None = None) -> dict[str, Any]:
    """Check that the last version has the rows and dense values of the last checkpoint; return its manifest."""
    found = found or repository(trainings)
    number = max(found.versions())
    chain = found.chain(number)
    paths = [[str(found.storage.path_of(f"{one.name}/{part}")) for part in one.parts] for one in chain]
    view = _core.CubeView(paths[0], paths[1:])
    checkpoint = max((trainings.run / "checkpoints").glob("step-*"))
    table = load_rows(trainings.run, checkpoint)
    signs = np.array(trainings.signs(), np.uint64)
    weights, present = view.lookup(signs)
    differ = []
    for at, sign in enumerate(signs):
        row = table.get(int(sign))
        if (row is not None) != bool(present[at]) or (row is not None and row[3] != weights[at].tolist()):
            differ.append(int(sign))
    assert differ == []
    assert view.num_rows == len(table) == chain[-1].rows
    dense = found.storage.read(f"{chain[-1].name}/dense.bin")
    assert (checkpoint / "dense.bin").read_bytes()[: len(dense)] == dense
    return chain[-1].manifest


def check_all(trainings: Trainings) -> list[Any]:
    """Check that every version opens and has the number of rows in its manifest; return the versions."""
    found = repository(trainings)
    for number in found.versions():
        chain = found.chain(number)
        paths = [[str(found.storage.path_of(f"{one.name}/{part}")) for part in one.parts] for one in chain]
        assert _core.CubeView(paths[0], paths[1:]).num_rows == chain[-1].rows
    return [found.version(number) for number in found.versions()]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_versions_equal_the_tables_of_the_servers(trainings: Trainings, strategy: str) -> None:
    # Without another base, deltas must list evicted rows.
    base_every = 1000 if strategy == "async" else 4
    # A lease that expires in a stall of the machine would fail a publish.
    settings = (f"publish.base_every={base_every}", "train.ps.lease_s=60")
    training = trainings.start(f"train.strategy={strategy}", *PUBLISH, *EVICT, *settings)
    output = training.finish()
    manifest = check_last(trainings)
    assert manifest["data"]["epoch"] == 2 and manifest["data"]["samples"] == 2 * trainings.num_samples
    assert manifest["metrics"]["train"][0]["auc"] > 0.6
    versions = check_all(trainings)
    deltas = [version.manifest["table"] for version in versions if version.is_delta]
    assert strategy != "async" or sum(table["removed"] for table in deltas) > 10_000
    rows = [version.rows for version in versions]
    assert any(after < before for before, after in pairwise(rows)), "rows were evicted"
    assert any(0 < table["changed"] < table["rows"] for table in deltas), "some delta has only a part of the rows"
    assert repository(trainings).current() == max(repository(trainings).versions())
    assert "published version 1, a base: " in log_of(trainings) and "publish failed" not in output


def log_of(trainings: Trainings) -> str:
    return "".join(path.read_text() for path in (trainings.run / "logs").glob("coordinator*"))


@pytest.mark.slow
def test_a_version_is_published_at_the_end_of_each_pass(trainings: Trainings) -> None:
    trainings.start("publish.every=epoch", "publish.gate.max_row_loss=1", *EVICT).finish()
    check_last(trainings)
    versions = check_all(trainings)
    assert [version.is_delta for version in versions] == [False, True]
    assert [version.manifest["data"]["epoch"] for version in versions] == [1, 2]
    assert [version.manifest["data"]["samples"] for version in versions] == [
        trainings.num_samples,
        2 * trainings.num_samples,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_any_role_may_be_killed_while_it_publishes(trainings: Trainings, strategy: str) -> None:
    # With more versions, `sync` rarely finds the time for a checkpoint between two kills.
    training = trainings.start(f"train.strategy={strategy}", *PUBLISH, "publish.every=1s", *EVICT)
    training.wait_for("servers 2/2")
    training.disturb(3, 5.0, ("ps", "trainer", "coordinator"))
    output = training.finish()
    assert training.kills.total() >= 2, "the run ended before two kills"
    assert f"{2 * trainings.num_samples:,} samples" in output
    check_last(trainings)
    check_all(trainings)


# Fail points: three processes die at each, at these counts since their start.
POINTS = {"publish": (300, 40, 1), "version": (2, 1, 1), "version-written": (2, 1, 1)}


@pytest.mark.slow
def test_roles_may_die_at_every_fail_point_of_a_publish(trainings: Trainings, tmp_path: Path) -> None:
    """While a part is written, and before and after the manifest."""
    points = tmp_path / "points"
    points.mkdir()
    for name, counts in POINTS.items():
        for at, number in enumerate(counts):
            (points / f"{name}.{at}").write_text(str(number))
    training = trainings.start(*PUBLISH, *EVICT, ELASTICREC_FAIL_POINTS=str(points))
    training.finish()
    assert sorted(path.name for path in points.iterdir()) == [], "each point was hit three times"
    check_last(trainings)
    publishes = [version.manifest["data"]["publish"]["name"] for version in check_all(trainings)]
    assert len(set(publishes)) == len(publishes), "no publish became two versions"


@pytest.mark.slow
def test_a_full_disk_loses_no_change(trainings: Trainings, tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small", "200m") as disk:
        settings = (f"publish.repository={disk}", "publish.keep=1", "publish.base_every=1000")
        # A single pass: many signs occur once, so a lost change of theirs would never be repeated.
        training = trainings.start(*PUBLISH, *settings)
        found = Repository.open(disk, "cluster")
        training.wait_until(lambda: len(found.versions()) >= 2)
        # There is space to reserve a version number, so servers collect their changes, but none for their parts.
        fill(disk / "full", leave=2**15)
        training.wait_for("publish failed: shard .*No space left on device")
        (disk / "full").unlink()
        number = len(found.versions())
        training.wait_until(lambda: len(found.versions()) > number)
        training.finish()
        check_last(trainings, found)
        versions = [found.version(one) for one in found.versions()]
        assert [version.is_delta for version in versions] == [False] + [True] * (len(versions) - 1)


@pytest.mark.slow
def test_a_run_is_scaled_while_it_publishes(trainings: Trainings) -> None:
    training = trainings.start(*PUBLISH, *EVICT, "publish.keep=1000")
    # Two servers have published.
    training.wait_until(lambda: repository(trainings).versions())
    succeed("scale", "cluster", "--servers", "3", cwd=trainings.directory)
    training.finish()
    check_last(trainings)
    parts = {len(version.parts) for version in check_all(trainings)}
    assert parts == {2, 3}, "every server wrote a part"


@pytest.mark.slow
def test_a_resumed_run_continues_its_versions(trainings: Trainings) -> None:
    """The servers are restored from a checkpoint, so the next delta has all their rows."""
    settings = (*PUBLISH, "publish.base_every=1000", "train.epochs=2")
    training = trainings.start(*settings)
    found = repository(trainings)
    training.wait_until(lambda: len(found.versions()) >= 3)
    training.stop()
    number = max(found.versions())
    trainings.start(*settings).finish()
    check_last(trainings)
    first = next(version for version in (found.version(one) for one in found.versions()) if version.number > number)
    assert first.is_delta and first.parent == number
    table = first.manifest["table"]
    assert table["changed"] == table["rows"], "all partitions are written completely"
    assert json.loads((trainings.directory / "models/cluster/CURRENT").read_text())["version"] == max(found.versions())
