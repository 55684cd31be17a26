"""Publishes of a running job: whatever dies, a version is what shards held; what nobody got comes with the next."""

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
from elasticrec.net.messages import PublishPart, ShardOwner
from elasticrec.publish.content import PublishedVersion
from elasticrec.publish.servers.publishing import PublishHooks, Publishing, PublishSettings
from elasticrec.publish.servers.target import LostParentError, ShardDraft, ShardParts
from support.fake_roles import Clock, FakeCluster, Shard, Trainer, plan_of, seeded

Online = dict[int, list[Any]]


class KilledError(BaseException):
    """The coordinator dies here."""


class Versions:
    """A repository in memory: what was committed stays, whoever dies."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.committed: dict[int, tuple[PublishedVersion, ShardParts, Online]] = {}
        self.lost: set[int] = set()
        self.reach: Callable[[str], None] = lambda place: None
        """Told of every place at which something may go wrong; raises what goes wrong."""
        self._number = 0

    def claim(self) -> PublishedVersion | None:
        self.reach("claim")
        return self.committed[max(self.committed)][0] if self.committed else None

    def begin(self, parent: PublishedVersion | None) -> ShardDraft:
        self.reach("begin")
        if parent is not None and parent.number in self.lost:
            raise LostParentError(f"version {parent.number} is gone")
        self._number += 1
        path = self.directory / str(self._number)
        (path / "cube").mkdir(parents=True)
        return ShardDraft(self._number, path)

    def commit(self, draft: ShardDraft, content: ShardParts) -> PublishedVersion:
        self.reach("commit")
        online: Online = {} if content.parent is None else dict(self.committed[content.parent.number][2])
        for index, part in content.parts.items():
            content_of = draft.cube(index).read_bytes()
            assert part.cube is not None and len(content_of) == part.cube.bytes
            for number, change in json.loads(content_of).items():
                before = [] if change["whole"] else online[int(number)]
                assert len(before) == change["first"], "a delta is of its parent"
                online[int(number)] = before + change["events"]
        assert content.publish not in {one.publish for _, one, _ in self.committed.values()}, "it is committed twice"
        num_deltas = 0 if content.parent is None else content.parent.num_deltas + 1
        version = PublishedVersion(draft.number, content.publish, num_deltas)
        self.committed[draft.number] = (version, content, online)
        self.reach("committed")
        return version

    def abandon(self, draft: ShardDraft) -> None:
        self.reach("abandon")
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
        """The launcher: a process that ended is started again."""
        if self.coordinator is None:
            self.start_coordinator()
        live = [shard for shard in self.shards if shard.alive]
        while len(live) < 2:
            live.append(Shard(self, f"s{len(self.shards)}"))
            self.shards.append(live[-1])

    def check_online(self) -> None:
        """The last version is what was saved at the end."""
        assert self.coordinator is not None
        newest = self.coordinator.checkpoints.newest
        assert newest is not None
        saved: Online = {}
        for part in newest.parts(range(self.settings.num_partitions)):
            saved |= {int(key): value for key, value in json.loads(Path(part["dense"]).read_text()).items()}
        assert self.versions.online() == saved


MakeWorld = Callable[..., PublishCluster]


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[MakeWorld]:
    worlds: list[PublishCluster] = []
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

        world = PublishCluster(tmp_path, settings, plan_of(tmp_path, **plan))
        world.versions = versions
        worlds.append(world)
        world.start_coordinator()
        world.shards = [Shard(world, f"s{i}") for i in range(2)]
        world.trainers = [Trainer(world, f"t{i}") for i in range(2)]
        return world

    yield make
    for world in worlds:
        world.kill_coordinator()


def kinds(versions: Versions) -> str:
    return "".join("B" if content.parent is None else "d" for _, content, _ in versions.committed.values())


def test_a_base_first_and_every_so_often_deltas_between(make_world: MakeWorld) -> None:
    world = make_world(num_units=120)
    world.run_to_end()
    world.check_online()
    found = kinds(world.versions)
    assert found.startswith("BdddBdddB"), found
    contents = [content for _, content, _ in world.versions.committed.values()]
    for before, content in pairwise(contents):
        if content.parent is not None:
            assert content.parent.publish == before.publish
            assert all(part.whole == 0 for part in content.parts.values())
    status = world.publishing.describe()
    assert status["version"] == max(world.versions.committed) and status["error"] is None
    assert status["committed"] == len(found) and status["failed"] == 0


@pytest.mark.parametrize("base_every", [0, 60])
def test_a_version_is_cut_where_a_pass_ends(make_world: MakeWorld, base_every: int) -> None:
    world = make_world(num_units=9, num_passes=3, every_s=None, base_every=base_every)
    world.run_to_end()
    world.check_online()
    assert kinds(world.versions) == ("BBB" if base_every == 0 else "Bdd")
    for number, (_, content, online) in enumerate(world.versions.committed.values()):
        assert content.facts["passes"] == number + 1
        for events in online.values():
            assert events[-1] == ["boundary", number]


@pytest.mark.parametrize("num_good", [5, 6])
def test_a_disk_that_stays_full_does_not_hold_the_training_up(make_world: MakeWorld, num_good: int) -> None:
    world = make_world(num_units=9, num_passes=3, every_s=None)

    def reach(place: str) -> None:
        if place == "commit" and world.publishing._number < num_good:
            raise OSError(28, "No space left on device", "models/m/1/manifest.json")

    world.versions.reach = reach
    world.run_to_end()
    # all are cut at the end of the first pass and of the second: training goes on; at the last end there is time
    if num_good == 5:
        world.check_online()
        assert [content.facts["passes"] for _, content, _ in world.versions.committed.values()] == [3]
    else:
        assert not world.versions.committed and world.publishing._number == 5
    notes = world.coordinator.status()["passes"]["notes"] if world.coordinator else []
    told = [text for _, text in notes if text.startswith("publish failed: ")]
    assert len(told) == 1, "the same is not told over and over"
    assert "No space left on device" in told[0] and "the next version will include its changes" in told[0]
    assert not [path for path in world.versions.directory.iterdir() if int(path.name) not in world.versions.committed]


def test_a_commit_that_fails_loses_no_change(make_world: MakeWorld) -> None:
    world = make_world(num_units=60)
    world.until(lambda _: len(world.versions.committed) == 2)
    failing = True

    def reach(place: str) -> None:
        if place == "commit" and failing:
            raise OSError(28, "No space left on device")

    world.versions.reach = reach
    world.until(lambda _: world.publishing.figures.failed == 2)
    assert world.publishing.describe()["error"] == "[Errno 28] No space left on device"
    failing = False
    world.until(lambda _: len(world.versions.committed) == 3)
    assert all(part.whole == 0 for part in world.versions.committed[max(world.versions.committed)][1].parts.values())
    world.run_to_end()
    world.check_online()


def test_a_commit_that_succeeded_despite_an_error_is_not_repeated(make_world: MakeWorld) -> None:
    """As when a store takes a manifest and its answer is lost."""
    world = make_world(num_units=60)
    failed: list[int] = []

    def reach(place: str) -> None:
        if place == "committed" and len(failed) < 3:
            failed.append(max(world.versions.committed))
            raise TimeoutError("no answer")

    world.versions.reach = reach
    world.run_to_end()
    world.check_online()
    assert len(failed) == 3 and failed[0] in world.versions.committed
    parents = {content.parent.number for _, content, _ in world.versions.committed.values() if content.parent}
    assert failed[0] in parents, "the next one is of it"


@pytest.mark.parametrize("place", ["claim", "begin", "commit", "committed", "abandon"])
@pytest.mark.parametrize("every_s", [1.0, None])
def test_a_coordinator_may_die_anywhere_in_a_publish(make_world: MakeWorld, place: str, every_s: float | None) -> None:
    world = make_world(num_units=30, num_passes=3, every_s=every_s)
    deaths = 0

    def reach(here: str) -> None:
        nonlocal deaths
        if here == "commit" and place in ("abandon", "claim") and deaths < 3:
            # only then it comes there
            raise OSError("no room")
        if here == place and deaths < 3:
            deaths += 1
            raise KilledError

    world.versions.reach = reach
    world.run_to_end(world.keep_up)
    assert deaths == 3
    world.check_online()
    world.check_exactly_once([30, 60, 90])


@pytest.mark.parametrize("every_s", [1.0, None])
def test_a_shard_that_dies_meanwhile(make_world: MakeWorld, every_s: float | None) -> None:
    """The publish is given up, and in the next one the partitions of its successor are whole."""
    world = make_world(num_units=60, num_passes=2, every_s=every_s)
    world.until(lambda _: len(world.versions.committed) == 1)
    world.shards[1]._publish = lambda command: setattr(world.shards[1], "alive", False)  # type: ignore[method-assign]
    world.until(lambda _: len(world.versions.committed) == 2, world.keep_up)
    _, content, _ = world.versions.committed[max(world.versions.committed)]
    assert (content.parent is not None, [content.parts[index].whole for index in (0, 1)]) == (True, [0, 3])
    assert world.publishing.figures.failed == 1
    notes = [text for _, text in world.coordinator.status()["passes"]["notes"]] if world.coordinator else []
    assert "publish failed: a shard died during the publish; the next version will include its changes" in notes
    world.run_to_end(world.keep_up)
    world.check_online()


def test_nothing_is_published_while_a_shard_is_behind(make_world: MakeWorld) -> None:
    checkpoint = CheckpointSettings(every_s=1e6, retry_s=0.5)
    world = make_world(num_units=60, change=lambda s: replace(s, checkpoint=checkpoint))
    world.until(lambda _: len(world.versions.committed) >= 2)
    world.shards[1].alive = False
    seen: list[bool] = []

    def each() -> None:
        world.keep_up()
        if world.coordinator is not None and world.publishing.is_writing:
            seen.append(any(not world.is_complete(unit, world.present()) for unit in world.went_back))

    world.run_to_end(each)
    assert seen and not any(seen)
    world.check_online()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("every_s", [0.6, None])
def test_anything_may_die_while_it_publishes(make_world: MakeWorld, seed: int, every_s: float | None) -> None:
    world = make_world(num_units=20, num_passes=4, every_s=every_s)
    chance = seeded(seed)
    world.lose_answer = lambda: chance.random() < 0.02
    calm_at = world.clock() + 60

    def reach(place: str) -> None:
        if world.clock() < calm_at and chance.random() < 0.1:
            raise chance.choice([KilledError(), OSError("no room"), OSError("no answer")])

    def each() -> None:
        world.keep_up()
        if world.clock() < calm_at:
            if chance.random() < 0.01:
                chance.choice(world.shards).alive = False
            if chance.random() < 0.005:
                world.kill_coordinator()

    world.versions.reach = reach
    world.run_to_end(each)
    world.check_online()
    world.check_exactly_once([20, 40, 60, 80])


def test_nothing_is_published_before_anything_is_learned_or_when_nothing_is_new(make_world: MakeWorld) -> None:
    world = make_world(num_units=30, every_s=0.5)
    world.trainers, trainers = [], world.trainers
    quiet_until = world.clock() + 5
    world.until(lambda _: world.clock() >= quiet_until)
    assert not world.versions.committed
    world.trainers = trainers
    world.until(lambda _: len(world.versions.committed) >= 2)
    # they go on after a while
    for trainer in trainers:
        trainer.next_at = world.clock() + 10
    quiet_until = world.clock() + 3
    world.until(lambda _: world.clock() >= quiet_until)
    number = len(world.versions.committed)
    quiet_until = world.clock() + 5
    world.until(lambda _: world.clock() >= quiet_until)
    assert len(world.versions.committed) == number
    world.run_to_end()
    world.check_online()


def test_a_refused_version_is_reported_once(make_world: MakeWorld) -> None:
    world = make_world(num_units=60)
    commit = world.versions.commit
    refused = "not offered: rows: expected more"

    def refuse(draft: ShardDraft, content: ShardParts) -> PublishedVersion:
        found = commit(draft, content)
        is_refused = 2 <= found.number <= 4
        return replace(found, offer=refused if is_refused else "offered", is_refused=is_refused)

    world.versions.commit = refuse  # type: ignore[method-assign]
    coordinator = world.until(lambda _: len(world.versions.committed) == 4)
    assert coordinator.status()["publish"]["offer"] == refused
    world.run_to_end()
    notes = [text for _, text in coordinator.status()["passes"]["notes"]]
    assert notes == [f"version 2 is {refused}; the current version stays until a new one passes"]


def test_a_parent_that_is_gone_is_followed_by_a_base(make_world: MakeWorld) -> None:
    world = make_world(num_units=60, base_every=60)
    world.until(lambda _: len(world.versions.committed) == 2)
    world.versions.lost = set(world.versions.committed)
    world.run_to_end()
    world.check_online()
    assert kinds(world.versions).startswith("BdBd")


def test_versions_of_sync_are_cut_between_two_groups(make_world: MakeWorld) -> None:
    def change(settings: Settings) -> Settings:
        return replace(settings, group_size=2, checkpoint=replace(settings.checkpoint, mixed=False))

    world = make_world(num_units=40, every_s=0.5, change=change)
    # a trainer of these tests does not know of steps: all units of a group count as pushed when they are
    world.run_to_end()
    world.check_online()
    assert len(world.versions.committed) >= 3
    for _, _, online in world.versions.committed.values():
        names = [{tuple(event) for event in events if event[0] != "boundary"} for events in online.values()]
        assert all(one == names[0] for one in names), "all partitions are at the same step"
        units = {unit for unit, _ in names[0]}
        assert len(units) % 2 == 0, "whole groups"


OWNERS = {0: ShardOwner(11, range(0, 3)), 1: ShardOwner(12, range(3, 6))}


class Slow:
    """Publishes whose work beside the coordinator ends when the test says so."""

    def __init__(self, directory: Path) -> None:
        self.clock, self.noted, self.acts = Clock(), list[str](), list[Callable[[], None]]()
        hooks = PublishHooks(self.clock, self.noted.append, lambda: None, self.acts.append)
        self.versions = Versions(directory)
        self.publishing = Publishing(PublishSettings(every_s=5.0, timeout_s=30.0), self.versions, 1, hooks)
        self.tick()
        self.act()

    def act(self) -> None:
        (act,) = self.acts
        self.acts.clear()
        act()
        self.tick()

    def tick(self, owners: dict[int, ShardOwner] | None = OWNERS) -> None:
        self.publishing.tick(owners, dict, may_begin=True)

    def report(self, index: int, **changes: Any) -> None:
        command = self.publishing.command(index, OWNERS[index].incarnation)
        name = command["publish"] if command else "00000001-000001"
        file = {"bytes": 2, "sha256": "0" * 64}
        said = {"publish": name, "incarnation": OWNERS[index].incarnation, "state": "written", "cube": file}
        self.publishing.report(index, PublishPart.model_validate({**said, "dense": file, **changes}))


@pytest.fixture
def slow(tmp_path: Path) -> Slow:
    return Slow(tmp_path)


def test_a_publish_that_takes_longer_than_its_interval_is_followed_by_one(slow: Slow) -> None:
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
    assert slow.publishing._open is not None, "the next one begins at once"
    slow.act()
    assert slow.publishing._number == 2


def test_parts_of_others_are_none_of_it(slow: Slow) -> None:
    slow.clock.now += 5.0
    slow.tick()
    slow.act()
    assert slow.publishing.command(0, 99) is None, "of another incarnation"
    slow.report(0, incarnation=99)
    slow.report(0, publish="00000000-000001")
    slow.report(1, state="writing")
    assert slow.publishing.is_writing and slow.publishing.command(0, 11) is not None
    slow.report(1, state="failed", error="no room")
    assert not slow.publishing.is_writing
    assert slow.noted == ["publish failed: shard 1: no room; the next version will include its changes"]


def test_a_part_without_its_file_fails_the_publish(slow: Slow) -> None:
    slow.clock.now += 5.0
    slow.tick()
    slow.act()
    slow.report(0, cube=None)
    assert slow.noted == [
        "publish failed: shard 0: reported its part as written, without its files; "
        "the next version will include its changes"
    ]


def test_a_shard_that_hangs_does_not_hold_publishes_up_for_ever(slow: Slow) -> None:
    slow.clock.now += 5.0
    slow.tick()
    slow.act()
    slow.clock.now += 30.0
    slow.tick()
    assert slow.noted == [
        "publish failed: shards did not write their parts within 30 s; the next version will include its changes"
    ]


def test_a_publish_given_up_while_its_draft_is_created_is_removed(slow: Slow) -> None:
    slow.clock.now += 5.0
    slow.tick()
    slow.tick(None)
    assert slow.noted == ["publish failed: a shard died during the publish; the next version will include its changes"]
    slow.act()
    slow.act()
    assert list(slow.versions.directory.iterdir()) == []


def test_a_repository_that_cannot_be_read_is_asked_again(tmp_path: Path, make_world: MakeWorld) -> None:
    world = make_world(num_units=60)
    world.kill_coordinator()
    times = 0

    def reach(place: str) -> None:
        nonlocal times
        times += place == "claim"
        if place == "claim" and times <= 2:
            raise OSError("no route to host")

    world.versions.reach = reach
    world.start_coordinator()
    world.run_to_end()
    world.check_online()
    notes = [text for _, text in world.coordinator.status()["passes"]["notes"]] if world.coordinator else []
    assert notes.count("publish: the repository cannot be used: no route to host") == 1


@pytest.mark.parametrize("every_s", [1.0, None])
def test_a_repository_that_never_answers_does_not_hold_the_training_up(
    make_world: MakeWorld, every_s: float | None
) -> None:
    world = make_world(num_units=9, num_passes=3, every_s=every_s)
    world.kill_coordinator()

    def reach(place: str) -> None:
        raise OSError("no route to host")

    world.versions.reach = reach
    world.start_coordinator()
    world.run_to_end()
    world.check_exactly_once([9, 18, 27])
    assert not world.versions.committed


def test_the_status_tells_of_it(make_world: MakeWorld) -> None:
    world = make_world(num_units=60)
    coordinator: Coordinator = world.until(lambda _: len(world.versions.committed) == 2)
    publish = coordinator.status()["publish"]
    assert publish["version"] == 2 and publish["deltas"] == 1 and publish["kind"] == "delta"
    assert publish["age_s"] >= 0 and publish["last_s"] > 0 and 0 <= publish["next_s"] <= 1.0
