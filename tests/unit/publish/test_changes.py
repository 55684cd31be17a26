"""Bases and deltas of a training in one process: each version equals its checkpoint, bit for bit."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.publish import live, local_versions
from elasticrec.publish.live import LivePublisher
from elasticrec.publish.local import publish_run
from elasticrec.publish.train import train_and_publish
from elasticrec.repository.find import find_version
from elasticrec.repository.repository import Repository
from elasticrec.repository.verify import verify
from elasticrec.run import Run
from elasticrec.serving.onnxruntime import library_path
from elasticrec.training.checkpoint import list_checkpoints
from elasticrec.training.event import Event
from elasticrec.training.loop import Trainer
from elasticrec.training.passes import LocalPasses
from elasticrec.training.predict import load_checkpoint
from support.disks import fill, small_file_system
from support.online import check_version, rows_of_version
from support.small import MakeJob, WriteSamples, sample_lines

HOURS = [f"20260101{hour:02d}" for hour in range(8)]
# rows with a single impression are evicted after a few passes
EVICT = {"decay": {"show_click": 0.5}, "evict": {"min_score": 0.1}}
TRAIN = {"threads": 1, "batch_size": 64, "checkpoint": {"keep_epochs": True}}
FULL = OSError(28, "No space left on device")


pytestmark = pytest.mark.usefixtures("own_directory")


def write_hour(hour: str, count: int) -> None:
    directory = Path("logs") / hour[:8] / hour[8:]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "part.txt").write_text("".join(f"{line}\n" for line in sample_lines(count, int(hour))))
    (directory / "_SUCCESS").touch()


@pytest.fixture
def hourly(make_job: MakeJob) -> Any:
    """A job on hours that are complete, with few samples each; each hour gives a version and a checkpoint."""
    for hour in HOURS:
        write_hour(hour, 60)

    def make(*, sparse: dict[str, Any] | None = None, **publish: Any) -> Job:
        hours = {"start": HOURS[0], "end": HOURS[-1], "poll_s": 0.01}
        settings = {"every": "hour", "base_every": 3, "keep": 9, "gate": {"max_row_loss": 1}, **publish}
        return make_job(
            data={"train": "logs", "hours": hours},
            sparse={"partitions": 4, **(sparse or {})},
            train=TRAIN,
            publish=settings,
        )

    return make


@pytest.fixture
def evicting(hourly: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same job with days of one hour; each end of a day evicts rows."""
    monkeypatch.setattr(LocalPasses, "ends_day", True)
    return partial(hourly, sparse=EVICT, base_every=60)


def local() -> Repository:
    return Repository.open("models", "small")


def kinds() -> str:
    """Return one letter per version, oldest first: `B` for a base, `d` for a delta."""
    return "".join("d" if local().version(number).is_delta else "B" for number in local().versions())


def check_all(name: str = "small") -> list[dict[str, Any]]:
    """Check that every version cut at the end of a pass equals its checkpoint; return the `table` of each manifest."""
    run = Run(Path("runs") / name)
    checkpoints = {one.progress.epoch: one for one in list_checkpoints(run) if not one.progress.batches}
    found = [local().version(number) for number in local().versions()]
    for version in found:
        check_version(local(), version.number, run, checkpoints[version.manifest["data"]["epoch"]])
        assert verify(local(), version.number) == []
    return [version.manifest["table"] for version in found]


def at_pass(number: int, act: Any) -> Any:
    """Return a callback that acts once, when the pass has ended and before its version is written."""

    def watch(event: Event) -> Any:
        if event.kind in ("pass", "epoch") and event.values[event.kind] == number:
            return act()
        return None

    return watch


def test_a_base_after_every_base_every_deltas(hourly: Any, capsys: pytest.CaptureFixture[str]) -> None:
    train_and_publish(hourly())
    assert kinds() == "BdddBddd"
    assert local().current() == 8
    tables = check_all()
    assert all(0 < table["changed"] < table["rows"] for table in tables if "changed" in table)
    log = capsys.readouterr().err
    assert "published models/small/1: " in log and "published models/small/5: " in log
    delta = f"{tables[1]['changed']} rows changed, 0 removed, of {tables[1]['rows']}, "
    assert f"published models/small/1/deltas/2: {delta}" in log
    assert "partitions whole" not in log


@pytest.mark.parametrize("row_type", ["f32", "f16", "int8"])
def test_evicted_rows_are_removed_from_the_published_version(evicting: Any, row_type: str) -> None:
    train_and_publish(evicting(row_type=row_type))
    assert kinds() == "Bddddddd"
    tables = check_all()
    assert sum(table["removed"] for table in tables[1:]) > 20
    first, last = rows_of_version(local(), 1), rows_of_version(local(), 8)
    assert set(first) - set(last), "some rows of the first version are not in the last"


def test_a_run_that_publishes_only_bases_tracks_no_changes(
    hourly: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tables: list[_core.Table] = []

    class Watched(LivePublisher):
        def end(self, trainer: Trainer) -> None:
            super().end(trainer)
            tables.append(trainer.state.embedding.table)

    monkeypatch.setattr(live, "LivePublisher", Watched)
    for base_every, expected in ((0, "B" * 8), (60, "Bddddddd")):
        train_and_publish(hourly(base_every=base_every), fresh=True)
        assert kinds()[-8:] == expected
    whole = [
        table.publish("9", committed="8", is_base=False, row_type="f32", path=str(tmp_path / f"{at}"))["whole"]
        for at, table in enumerate(tables)
    ]
    assert whole == [4, 0], "only the second run tracks changes since its eighth publish"


def test_a_pass_without_changes_gives_an_empty_delta(hourly: Any) -> None:
    write_hour(HOURS[2], 0)
    train_and_publish(hourly())
    tables = check_all()
    assert kinds() == "BdddBddd"
    assert (tables[2]["changed"], tables[2]["removed"], tables[2]["rows"]) == (0, 0, tables[1]["rows"])
    assert [local().version(number).manifest["data"]["until"] for number in (2, 3)] == [
        "2026-01-01T01",
        "2026-01-01T02",
    ]


@pytest.mark.parametrize("where", ["rows", "network", "manifest", "behind the manifest", "offer"])
def test_a_failed_publish_loses_no_change(
    evicting: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    """The publish of the base fails once; the publish of a delta fails twice in a row."""
    calls: list[str] = []

    def failing(act: Any, *, after: bool = False) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(where)
            is_bad = len(calls) in (1, 3, 4)
            if is_bad and not after:
                raise FULL
            result = act(*arguments, **options)
            if is_bad:
                raise FULL
            return result

        return call

    write, commit, offer = local_versions.LocalVersions._write_rows, Repository.commit, Repository.offer
    if where == "rows":
        monkeypatch.setattr(local_versions.LocalVersions, "_write_rows", failing(write, after=True))
    elif where == "network":
        monkeypatch.setattr(local_versions, "commit_version", failing(local_versions.commit_version))
    elif where == "offer":
        monkeypatch.setattr(Repository, "offer", failing(offer))
    else:
        # a failure behind the manifest leaves a version that the publisher does not know of
        monkeypatch.setattr(Repository, "commit", failing(commit, after=where != "manifest"))
    train_and_publish(evicting())
    expected = {"behind the manifest": "BBdddddd", "offer": "Bddddddd"}.get(where, "Bdddd")
    assert kinds() == expected
    tables = check_all()
    assert sum(table.get("removed", 0) for table in tables) > 10
    assert local().current() == max(local().versions())
    full = "[Errno 28] No space left on device"
    problem = f"; not offered: {full}\n" if where == "offer" else f"publish failed: {full}; the next version"
    assert capsys.readouterr().err.count(problem) == 3


@pytest.mark.parametrize("leave", [0, 5000])
def test_a_full_disk_loses_no_change(evicting: Any, tmp_path: Path, leave: int) -> None:
    """The disk has no space for any row, or for some of the rows only."""
    with small_file_system(tmp_path / "disk", "2m") as disk:
        repository = Repository.open(disk, "small")

        def watch(event: Event) -> None:
            if event.kind == "pass" and event.values["pass"] == 3:
                fill(disk / "full", leave)
            if event.kind == "pass" and event.values["pass"] == 6:
                (disk / "full").unlink()

        train_and_publish(evicting(repository=str(disk)), callback=watch)
        found = [repository.version(number) for number in repository.versions()]
        assert [version.manifest["data"]["epoch"] for version in found] == [1, 2, 6, 7, 8]
        assert [version.is_delta for version in found] == [False] + [True] * 4
        assert sum(version.manifest["table"].get("removed", 0) for version in found) > 0
        check_version(repository, found[-1].number, Run(Path("runs/small")))


def test_without_its_parent_the_next_version_is_a_base(hourly: Any) -> None:
    callback = at_pass(4, lambda: local().remove("1/deltas/3"))
    train_and_publish(hourly(base_every=60), callback=callback)
    # the number of the removed version is used again
    assert [local().version(number).manifest["data"]["epoch"] for number in local().versions()] == [1, 2, 4, 5, 6, 7, 8]
    assert kinds() == "BdBdddd"
    check_all()


def test_deltas_are_published_to_a_repository_behind_a_url(
    hourly: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTICREC_CACHE", str(tmp_path / "cache"))
    url = "memory://test-publish-changes/models"
    train_and_publish(hourly(repository=url))
    repository = Repository.open(url, "small")
    assert [repository.version(number).is_delta for number in repository.versions()] == ([False] + [True] * 3) * 2
    assert [verify(repository, number) for number in repository.versions()] == [[]] * 8
    text = "\n".join(sample_lines(100, 3)).encode()
    scores = _core.Predictor(str(find_version(f"{url}/small")[0]), str(library_path())).predict(text)
    np.testing.assert_allclose(scores, load_checkpoint(Run(Path("runs/small"))).predict(text), atol=1e-5)


def test_a_refused_version_does_not_block_later_versions(hourly: Any, capsys: pytest.CaptureFixture[str]) -> None:
    train_and_publish(hourly(gate={"min_auc": 0.9999}))
    assert kinds() == "BdddBddd"
    assert local().current() is None
    assert capsys.readouterr().err.count("not offered: AUC of the last pass: expected at least") == 8
    check_all()


def test_bases_of_deltas_in_use_are_not_collected(hourly: Any) -> None:
    """A rollback to a delta keeps its base while newer versions are published and collected."""
    callback = at_pass(3, lambda: local().rollback(2))
    train_and_publish(hourly(keep=1, base_every=1), callback=callback)
    assert local().versions() == [1, 2, 7, 8]
    assert kinds() == "BdBd"
    check_all()


@pytest.mark.parametrize("num_lost", [0, 2])
def test_a_resumed_run_begins_with_a_base(hourly: Any, num_lost: int) -> None:
    """Also when the run resumes from before the current version, which has rows that the checkpoint does not have."""
    train_and_publish(hourly(), callback=at_pass(4, lambda: False))
    assert kinds() == "Bddd"
    run = Run(Path("runs/small"))
    for checkpoint in list_checkpoints(run):
        if checkpoint.progress.epoch > 4 - num_lost:
            shutil.rmtree(checkpoint.path)
    online = rows_of_version(local(), 4)
    train_and_publish(hourly())
    assert kinds() == "Bddd" + ("BdddBd" if num_lost else "Bddd")
    check_all()
    if num_lost:
        assert set(online) - set(rows_of_version(local(), 5)), (
            "the resumed run lacks rows of the version that was online"
        )


def test_a_warm_start_begins_with_a_base(hourly: Any, make_job: MakeJob, write_samples: WriteSamples) -> None:
    train_and_publish(hourly())
    write_samples(count=100)
    publish = {"every": "epoch", "model": "small", "keep": 9}
    train_and_publish(make_job(name="later", train={**TRAIN, "epochs": 2, "warm_start": "small"}, publish=publish))
    assert kinds() == "BdddBddd" + "Bd"
    run = Run(Path("runs/later"))
    for number, checkpoint in zip((9, 10), list_checkpoints(run)[-2:], strict=True):
        check_version(local(), number, run, checkpoint)


def test_evictions_after_the_last_batch_are_published(evicting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version cut by time may be of the very last batch; the epoch ends with an eviction after it."""
    now = [0.0]

    class Clocked(LivePublisher):
        def __init__(self, job: Job, repository: Repository) -> None:
            super().__init__(job, repository, lambda: now[0])

        def between(self, trainer: Trainer) -> None:
            now[0] += 1.0
            super().between(trainer)

    monkeypatch.setattr(live, "LivePublisher", Clocked)
    # one batch per hour
    train_and_publish(evicting(every="1s"))
    samples = [local().version(number).manifest["data"]["samples"] for number in local().versions()]
    assert samples == [60, 120, 180, 240, 300, 360, 420, 480, 480]
    check_version(local(), 9, Run(Path("runs/small")))
    table = local().version(9).manifest["table"]
    assert (table["changed"], table["removed"] > 0) == (0, True)


@pytest.mark.parametrize("point", ["commit_version", "offer_committed"])
@pytest.mark.parametrize("every", ["hour", "epoch"])
def test_the_last_version_is_published_after_a_crash_before_it(
    evicting: Any,
    make_job: MakeJob,
    write_samples: WriteSamples,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    every: str,
    point: str,
) -> None:
    """The same command again trains nothing and publishes the final state, once."""
    write_samples(count=100)
    job, num_passes = evicting(), 8
    if every == "epoch":
        job, num_passes = make_job(train={**TRAIN, "epochs": 3}, publish={"every": "epoch", "keep": 9}), 3
    act = getattr(local_versions, point)

    def die(*arguments: Any) -> Any:
        source = next(one for one in arguments if isinstance(one, local_versions.VersionSource))
        if source.progress.epoch == num_passes:
            raise KeyboardInterrupt
        return act(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(local_versions, point, die)
        train_and_publish(job)
    assert local().current() == num_passes - 1
    for _ in range(2):
        train_and_publish(job)
        # the number of an uncommitted version is not used again
        assert local().current() == num_passes + (point == "commit_version")
        assert kinds() == "B" + "d" * (num_passes - 2) + ("B" if point == "commit_version" else "d")
    check_all()
    if point == "offer_committed":
        assert capsys.readouterr().err.count(f"models/small/1/deltas/{num_passes}: offered\n") == 1
    # a version published by hand stays current
    publish_run(Run(Path("runs/small")))
    train_and_publish(job)
    assert local().current() == num_passes + 1 + (point == "commit_version")
