"""Publishes of a running job survive crashes: a version equals the shards; the next one has changes that failed."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from elasticrec.coordinator.checkpoints import CheckpointSettings
from elasticrec.coordinator.coordinator import Coordinator
from elasticrec.coordinator.members import Timing
from elasticrec.coordinator.passes import PassPlan
from elasticrec.coordinator.settings import Settings
from elasticrec.net.messages import PublishPart
from elasticrec.net.placement import ShardOwner
from elasticrec.publish.content import PublishedVersion
from elasticrec.publish.servers.publishing import PublishHooks, Publishing, PublishSettings
from elasticrec.publish.servers.target import LostParentError, ShardDraft, ShardParts
from support.fake_roles import Clock, FakeCluster, Shard, Trainer, plan_of, seeded

Online = dict[int, list[Any]]


class KilledError(BaseException):
    """Raised where the coordinator dies."""


class Versions:
    """A repository in memory: committed versions survive the death of any process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.committed: dict[int, tuple[PublishedVersion, ShardParts, Online]] = {}
        self.lost: set[int] = set()
        self.on_step: Callable[[str], None] = lambda step: None
        """Called with the name of each step that may fail; raises the failure."""
        self._number = 0

    def claim(self) -> PublishedVersion | None:
        self.on_step("claim")
        return self.committed[max(self.committed)][0] if self.committed else None

    def begin(self, parent: PublishedVersion | None) -> ShardDraft:
        self.on_step("begin")
        if parent is not None and parent.number in self.lost:
            raise LostParentError(f"version {parent.number} is gone")
        self._number += 1
        path = self.directory / str(self._number)
        (path / "cube").mkdir(parents=True)
        return ShardDraft(self._number, path)

    def commit(self, draft: ShardDraft, content: ShardParts) -> PublishedVersion:
        self.on_step("commit")
        online: Online = {} if content.parent is None else dict(self.committed[content.parent.number][2])
        for index, part in content.parts.items():
            content_of = draft.cube(index).read_bytes()
            assert part.cube is not None and len(content_of) == part.cube.bytes
            for number, change in json.loads(content_of).items():
                before = [] if change["whole"] else online[int(number)]
                assert len(before) == change["first"], "a delta begins where its parent ends"
                online[int(number)] = before + change["events"]
        assert content.publish not in {one.publish for _, one, _ in self.committed.values()}, "committed twice"
        num_deltas = 0 if content.parent is None else content.parent.num_deltas + 1
        version = PublishedVersion(draft.number, content.publish, num_deltas)
        self.committed[draft.number] = (version, content, online)
        self.on_step("committed")
        return version

    def abandon(self, draft: ShardDraft) -> None:
        self.on_step("abandon")
        if draft.number not in self.committed:
            shutil.rmtree(draft.path)

    def close(self) -> None:
        pass

    def online(self) -> Online:
        return self.committed[max(self.committed)][2]


class PublishCluster(FakeCluster):
    """A run that publishes."""

    versions: Versions

    def step(self, seconds: float = 0.05) -> None:
        try:
            super().step(seconds)
        except KilledError:
            self.kill_coordinator()

    @property
    def publishing(self) -> Publishing:
        assert self.coordinator is not None and self.coordinator.publishing is not None
        return self.coordinator.publishing

    def keep_up(self) -> None:
        """Restart dead processes, as the launcher does."""
        if self.coordinator is None:
            self.start_coordinator()
        live = [shard for shard in self.shards if shard.alive]
        while len(live) < 2:
            live.append(Shard(self, f"s{len(self.shards)}"))
            self.shards.append(live[-1])

    def check_online(self) -> None:
        """Check that the last version equals the last checkpoint."""
        assert self.coordinator is not None
        newest = self.coordinator.checkpoints.newest
        assert newest is not None
        saved: Online = {}
        for part in newest.parts(range(self.settings.num_partitions)):
            saved |= {int(key): value for key, value in json.loads(Path(part["dense"]).read_text()).items()}
        assert self.versions.online() == saved


MakeCluster = Callable[..., PublishCluster]


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[MakeCluster]:
    clusters: list[PublishCluster] = []
    versions = Versions(tmp_path / "versions")

    def make(*, change: Callable[[Settings], Settings] = lambda s: s, **options: Any) -> PublishCluster:
        plan = {key: options.pop(key) for key in ("num_units", "num_passes") if key in options}
        publish = PublishSettings(**{"every_s": 1.0, "base_every": 3, "timeout_s": 20.0, "retry_s": 0.5, **options})

        def settings(plan: PassPlan) -> Settings:
            return change(
                Settings(
                    job="job-1",
                    num_partitions=6,
                    servers=2,
                    plan=plan,
                    timing=Timing(lease_s=1.0, margin_s=0.2, heartbeat_s=0.3),
                    settle_s=1.0,
                    checkpoint=CheckpointSettings(every_s=4.0, keep=2, timeout_s=20.0, retry_s=0.5),
                    stop_when_finished=False,
                    publish=publish,
                    target=versions,
                    run=lambda act: act(),
                )
            )

        cluster = PublishCluster(tmp_path, settings, plan_of(tmp_path, **plan))
        cluster.versions = versions
        clusters.append(cluster)
        cluster.start_coordinator()
        cluster.shards = [Shard(cluster, f"s{i}") for i in range(2)]
        cluster.trainers = [Trainer(cluster, f"t{i}") for i in range(2)]
        return cluster

    yield make
    for cluster in clusters:
        cluster.kill_coordinator()


def kinds(versions: Versions) -> str:
    return "".join("B" if content.parent is None else "d" for _, content, _ in versions.committed.values())


def test_a_base_after_every_base_every_deltas(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(num_units=120)
    cluster.run_to_end()
    cluster.check_online()
    found = kinds(cluster.versions)
    assert found.startswith("BdddBdddB"), found
    contents = [content for _, content, _ in cluster.versions.committed.values()]
    for before, content in pairwise(contents):
        if content.parent is not None:
            assert content.parent.publish == before.publish
            assert all(part.whole == 0 for part in content.parts.values())
    status = cluster.publishing.describe()
    assert status["version"] == max(cluster.versions.committed) and status["error"] is None
    assert status["committed"] == len(found) and status["failed"] == 0


@pytest.mark.parametrize("base_every", [0, 60])
def test_a_version_is_cut_at_the_end_of_each_pass(make_cluster: MakeCluster, base_every: int) -> None:
    cluster = make_cluster(num_units=9, num_passes=3, every_s=None, base_every=base_every)
    cluster.run_to_end()
    cluster.check_online()
    assert kinds(cluster.versions) == ("BBB" if base_every == 0 else "Bdd")
    for number, (_, content, online) in enumerate(cluster.versions.committed.values()):
        assert content.facts["passes"] == number + 1
        for events in online.values():
            assert events[-1] == ["boundary", number]


@pytest.mark.parametrize("num_good", [5, 6])
def test_a_full_disk_does_not_block_the_training(make_cluster: MakeCluster, num_good: int) -> None:
    cluster = make_cluster(num_units=9, num_passes=3, every_s=None)

    def on_step(step: str) -> None:
        if step == "commit" and cluster.publishing._number < num_good:
            raise OSError(28, "No space left on device", "models/m/1/manifest.json")

    cluster.versions.on_step = on_step
    cluster.run_to_end()
    # the versions of the first two passes fail and training goes on; the end of the last pass waits for a retry
    if num_good == 5:
        cluster.check_online()
        assert [content.facts["passes"] for _, content, _ in cluster.versions.committed.values()] == [3]
    else:
        assert not cluster.versions.committed and cluster.publishing._number == 5
    notes = cluster.coordinator.status()["passes"]["notes"] if cluster.coordinator else []
    failures = [text for _, text in notes if text.startswith("publish failed: ")]
    assert len(failures) == 1, "the same failure is noted once"
    assert "No space left on device" in failures[0] and "the next version will include its changes" in failures[0]
    assert not [
        path for path in cluster.versions.directory.iterdir() if int(path.name) not in cluster.versions.committed
    ]


def test_a_failed_commit_loses_no_change(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(num_units=60)
    cluster.until(lambda _: len(cluster.versions.committed) == 2)
    failing = True

    def on_step(step: str) -> None:
        if step == "commit" and failing:
            raise OSError(28, "No space left on device")

    cluster.versions.on_step = on_step
    cluster.until(lambda _: cluster.publishing.figures.failed == 2)
    assert cluster.publishing.describe()["error"] == "[Errno 28] No space left on device"
    failing = False
    cluster.until(lambda _: len(cluster.versions.committed) == 3)
    assert all(
        part.whole == 0 for part in cluster.versions.committed[max(cluster.versions.committed)][1].parts.values()
    )
    cluster.run_to_end()
    cluster.check_online()


def test_a_commit_that_succeeded_despite_an_error_is_not_repeated(make_cluster: MakeCluster) -> None:
    """For example, a storage writes the manifest and its response is lost."""
    cluster = make_cluster(num_units=60)
    failed: list[int] = []

    def on_step(step: str) -> None:
        if step == "committed" and len(failed) < 3:
            failed.append(max(cluster.versions.committed))
            raise TimeoutError("no answer")

    cluster.versions.on_step = on_step
    cluster.run_to_end()
    cluster.check_online()
    assert len(failed) == 3 and failed[0] in cluster.versions.committed
    parents = {content.parent.number for _, content, _ in cluster.versions.committed.values() if content.parent}
    assert failed[0] in parents, "the next version is a delta on it"


@pytest.mark.parametrize("killed_at", ["claim", "begin", "commit", "committed", "abandon"])
@pytest.mark.parametrize("every_s", [1.0, None])
def test_a_coordinator_may_die_at_any_step_of_a_publish(
    make_cluster: MakeCluster, killed_at: str, every_s: float | None
) -> None:
    cluster = make_cluster(num_units=30, num_passes=3, every_s=every_s)
    deaths = 0

    def on_step(step: str) -> None:
        nonlocal deaths
        if step == "commit" and killed_at in ("abandon", "claim") and deaths < 3:
            # these two steps run only after a failed commit
            raise OSError("no room")
        if step == killed_at and deaths < 3:
            deaths += 1
            raise KilledError

    cluster.versions.on_step = on_step
    cluster.run_to_end(cluster.keep_up)
    assert deaths == 3
    cluster.check_online()
    cluster.check_exactly_once([30, 60, 90])


@pytest.mark.parametrize("every_s", [1.0, None])
def test_a_shard_that_dies_during_a_publish(make_cluster: MakeCluster, every_s: float | None) -> None:
    """The publish fails, and the next one has all rows of the partitions of the replacement shard."""
    cluster = make_cluster(num_units=60, num_passes=2, every_s=every_s)
    cluster.until(lambda _: len(cluster.versions.committed) == 1)
    cluster.shards[1]._publish = lambda command: setattr(cluster.shards[1], "alive", False)  # type: ignore[method-assign]
    cluster.until(lambda _: len(cluster.versions.committed) == 2, cluster.keep_up)
    _, content, _ = cluster.versions.committed[max(cluster.versions.committed)]
    assert (content.parent is not None, [content.parts[index].whole for index in (0, 1)]) == (True, [0, 3])
    assert cluster.publishing.figures.failed == 1
    notes = [text for _, text in cluster.coordinator.status()["passes"]["notes"]] if cluster.coordinator else []
    assert "publish failed: a shard died during the publish; the next version will include its changes" in notes
    cluster.run_to_end(cluster.keep_up)
    cluster.check_online()


def test_nothing_is_published_while_a_shard_is_behind(make_cluster: MakeCluster) -> None:
    checkpoint = CheckpointSettings(every_s=1e6, retry_s=0.5)
    cluster = make_cluster(num_units=60, change=lambda s: replace(s, checkpoint=checkpoint))
    cluster.until(lambda _: len(cluster.versions.committed) >= 2)
    cluster.shards[1].alive = False
    seen: list[bool] = []

    def each() -> None:
        cluster.keep_up()
        if cluster.coordinator is not None and cluster.publishing.is_writing:
            seen.append(any(not cluster.is_complete(unit, cluster.members()) for unit in cluster.missing_units))

    cluster.run_to_end(each)
    assert seen and not any(seen)
    cluster.check_online()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("every_s", [0.6, None])
def test_processes_may_die_at_random_during_publishes(
    make_cluster: MakeCluster, seed: int, every_s: float | None
) -> None:
    cluster = make_cluster(num_units=20, num_passes=4, every_s=every_s)
    rng = seeded(seed)
    cluster.lose_answer = lambda: rng.random() < 0.02
    faults_end_at = cluster.clock() + 60

    def on_step(step: str) -> None:
        if cluster.clock() < faults_end_at and rng.random() < 0.1:
            raise rng.choice([KilledError(), OSError("no room"), OSError("no answer")])

    def each() -> None:
        cluster.keep_up()
        if cluster.clock() < faults_end_at:
            if rng.random() < 0.01:
                rng.choice(cluster.shards).alive = False
            if rng.random() < 0.005:
                cluster.kill_coordinator()

    cluster.versions.on_step = on_step
    cluster.run_to_end(each)
    cluster.check_online()
    cluster.check_exactly_once([20, 40, 60, 80])


def test_without_new_samples_nothing_is_published(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(num_units=30, every_s=0.5)
    cluster.trainers, trainers = [], cluster.trainers
    quiet_until = cluster.clock() + 5
    cluster.until(lambda _: cluster.clock() >= quiet_until)
    assert not cluster.versions.committed
    cluster.trainers = trainers
    cluster.until(lambda _: len(cluster.versions.committed) >= 2)
    # the trainers pause, then go on
    for trainer in trainers:
        trainer.next_at = cluster.clock() + 10
    quiet_until = cluster.clock() + 3
    cluster.until(lambda _: cluster.clock() >= quiet_until)
    number = len(cluster.versions.committed)
    quiet_until = cluster.clock() + 5
    cluster.until(lambda _: cluster.clock() >= quiet_until)
    assert len(cluster.versions.committed) == number
    cluster.run_to_end()
    cluster.check_online()


def test_a_refused_version_is_reported_once(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(num_units=60)
    commit = cluster.versions.commit
    refused = "not offered: rows: expected more"

    def refuse(draft: ShardDraft, content: ShardParts) -> PublishedVersion:
        found = commit(draft, content)
        is_refused = 2 <= found.number <= 4
        return replace(found, offer=refused if is_refused else "offered", is_refused=is_refused)

    cluster.versions.commit = refuse  # type: ignore[method-assign]
    coordinator = cluster.until(lambda _: len(cluster.versions.committed) == 4)
    assert coordinator.status()["publish"]["offer"] == refused
    cluster.run_to_end()
    notes = [text for _, text in coordinator.status()["passes"]["notes"]]
    assert notes == [f"version 2 is {refused}; the current version stays until a new one passes"]


def test_without_its_parent_the_next_version_is_a_base(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(num_units=60, base_every=60)
    cluster.until(lambda _: len(cluster.versions.committed) == 2)
    cluster.versions.lost = set(cluster.versions.committed)
    cluster.run_to_end()
    cluster.check_online()
    assert kinds(cluster.versions).startswith("BdBd")


def test_versions_of_strategy_sync_are_cut_between_groups(make_cluster: MakeCluster) -> None:
    def change(settings: Settings) -> Settings:
        return replace(settings, group_size=2, checkpoint=replace(settings.checkpoint, may_mix=False))

    cluster = make_cluster(num_units=40, every_s=0.5, change=change)
    # the fake trainers do not know of steps: all units of a group count as pushed at the same time
    cluster.run_to_end()
    cluster.check_online()
    assert len(cluster.versions.committed) >= 3
    for _, _, online in cluster.versions.committed.values():
        names = [{tuple(event) for event in events if event[0] != "boundary"} for events in online.values()]
        assert all(one == names[0] for one in names), "all partitions are at the same step"
        units = {unit for unit, _ in names[0]}
        assert len(units) % 2 == 0, "whole groups"


OWNERS = {0: ShardOwner(11, range(0, 3)), 1: ShardOwner(12, range(3, 6))}


class SlowPublishing:
    """A publishing whose background work runs when the test calls `act`."""

    def __init__(self, directory: Path) -> None:
        self.clock, self.notes, self.pending_work = Clock(), list[str](), list[Callable[[], None]]()
        hooks = PublishHooks(self.clock, self.notes.append, lambda: None, self.pending_work.append)
        self.versions = Versions(directory)
        self.publishing = Publishing(PublishSettings(every_s=5.0, timeout_s=30.0), self.versions, 1, hooks)
        self.tick()
        self.act()

    def act(self) -> None:
        (act,) = self.pending_work
        self.pending_work.clear()
        act()
        self.tick()

    def tick(self, owners: dict[int, ShardOwner] | None = OWNERS) -> None:
        self.publishing.tick(owners, dict, may_begin=True)

    def report(self, index: int, **changes: Any) -> None:
        command = self.publishing.command(index, OWNERS[index].incarnation)
        name = command["publish"] if command else "00000001-000001"
        file = {"bytes": 2, "sha256": "0" * 64}
        fields = {"publish": name, "incarnation": OWNERS[index].incarnation, "state": "written", "cube": file}
        self.publishing.report(index, PublishPart.model_validate({**fields, "dense": file, **changes}))


@pytest.fixture
def slow(tmp_path: Path) -> SlowPublishing:
    return SlowPublishing(tmp_path)


def test_a_publish_longer_than_its_interval_is_followed_by_one(slow: SlowPublishing) -> None:
    slow.clock.now += 5.0
    slow.tick()
    slow.act()
    command = slow.publishing.command(0, 11)
    assert command is not None and command["base"] and command["committed"] is None
    for index in OWNERS:
        draft_of = slow.publishing.command(index, OWNERS[index].incarnation)
        assert draft_of is not None
        Path(draft_of["cube"]).write_text("{}")
        slow.report(index)
    # the commit takes three intervals
    slow.clock.now += 15.0
    slow.tick()
    assert slow.publishing.command(0, 11) is None
    slow.act()
    assert slow.publishing.figures.committed == 1
    assert slow.publishing._open is not None, "the next publish begins at once"
    slow.act()
    assert slow.publishing._number == 2


def test_reports_of_other_publishes_and_incarnations_are_ignored(slow: SlowPublishing) -> None:
    slow.clock.now += 5.0
    slow.tick()
    slow.act()
    assert slow.publishing.command(0, 99) is None, "a shard of another incarnation gets no command"
    slow.report(0, incarnation=99)
    slow.report(0, publish="00000000-000001")
    slow.report(1, state="writing")
    assert slow.publishing.is_writing and slow.publishing.command(0, 11) is not None
    slow.report(1, state="failed", error="no room")
    assert not slow.publishing.is_writing
    assert slow.notes == ["publish failed: shard 1: no room; the next version will include its changes"]


def test_a_part_without_its_file_fails_the_publish(slow: SlowPublishing) -> None:
    slow.clock.now += 5.0
    slow.tick()
    slow.act()
    slow.report(0, cube=None)
    assert slow.notes == [
        "publish failed: shard 0: reported its part as written, without its files; "
        "the next version will include its changes"
    ]


def test_a_hanging_shard_fails_the_publish_after_the_timeout(slow: SlowPublishing) -> None:
    slow.clock.now += 5.0
    slow.tick()
    slow.act()
    slow.clock.now += 30.0
    slow.tick()
    assert slow.notes == [
        "publish failed: shards did not write their parts within 30 s; the next version will include its changes"
    ]


def test_the_draft_of_a_failed_publish_is_removed(slow: SlowPublishing) -> None:
    slow.clock.now += 5.0
    slow.tick()
    slow.tick(None)
    assert slow.notes == ["publish failed: a shard died during the publish; the next version will include its changes"]
    slow.act()
    slow.act()
    assert list(slow.versions.directory.iterdir()) == []


def test_a_repository_that_cannot_be_read_is_retried(tmp_path: Path, make_cluster: MakeCluster) -> None:
    cluster = make_cluster(num_units=60)
    cluster.kill_coordinator()
    times = 0

    def on_step(step: str) -> None:
        nonlocal times
        times += step == "claim"
        if step == "claim" and times <= 2:
            raise OSError("no route to host")

    cluster.versions.on_step = on_step
    cluster.start_coordinator()
    cluster.run_to_end()
    cluster.check_online()
    notes = [text for _, text in cluster.coordinator.status()["passes"]["notes"]] if cluster.coordinator else []
    assert notes.count("publish: the repository cannot be used: no route to host") == 1


@pytest.mark.parametrize("every_s", [1.0, None])
def test_an_unreachable_repository_does_not_block_the_training(
    make_cluster: MakeCluster, every_s: float | None
) -> None:
    cluster = make_cluster(num_units=9, num_passes=3, every_s=every_s)
    cluster.kill_coordinator()

    def on_step(step: str) -> None:
        raise OSError("no route to host")

    cluster.versions.on_step = on_step
    cluster.start_coordinator()
    cluster.run_to_end()
    cluster.check_exactly_once([9, 18, 27])
    assert not cluster.versions.committed


def test_the_status_shows_the_last_publish(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(num_units=60)
    coordinator: Coordinator = cluster.until(lambda _: len(cluster.versions.committed) == 2)
    publish = coordinator.status()["publish"]
    assert publish["version"] == 2 and publish["deltas"] == 1 and publish["kind"] == "delta"
    assert publish["age_s"] >= 0 and publish["last_s"] > 0 and 0 <= publish["next_s"] <= 1.0
