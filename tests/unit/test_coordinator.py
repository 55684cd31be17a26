"""The coordinator with fake roles: whatever dies, every name is applied once, in order, and nobody else restarts."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticrec.coordinator.checkpoints import CheckpointSettings
from elasticrec.coordinator.coordinator import Coordinator, Settings
from elasticrec.coordinator.members import Timing
from elasticrec.coordinator.messages import FencedError
from elasticrec.coordinator.passes import PassPlan
from elasticrec.errors import ConfigError, UnavailableError
from elasticrec.run import Run
from fake_roles import Clock, Shard, Trainer, World, ask, plan_of, seeded

PARTITIONS = 5


def settings_of(plan: PassPlan) -> Settings:
    return Settings(
        job="job-1",
        num_partitions=PARTITIONS,
        servers=2,
        plan=plan,
        timing=Timing(lease_s=1.0, margin_s=0.2, heartbeat_s=0.3, hurry_s=0.05, forget_s=10.0),
        settle_s=0.7,
        checkpoint=CheckpointSettings(every_s=2.0, keep=2, timeout_s=5.0, retry_s=0.5),
        stop_when_finished=False,
    )


def num_complete(coordinator: Coordinator) -> int:
    return coordinator.work.figures()["complete"] or 0


def incarnations(coordinator: Coordinator) -> set[int]:
    return {member.incarnation for member in (*coordinator.members.of("ps"), *coordinator.members.of("trainer"))}


MakeWorld = Callable[..., World]


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[MakeWorld]:
    worlds: list[World] = []

    def make(
        shards: int = 2, trainers: int = 2, change: Callable[[Settings], Settings] = lambda s: s, **plan: Any
    ) -> World:
        said: list[str] = []
        world = World(tmp_path, lambda p: change(settings_of(p)), plan_of(tmp_path, **plan), said.append)
        worlds.append(world)
        world.start_coordinator()
        world.shards = [Shard(world, f"s{i}") for i in range(shards)]
        world.trainers = [Trainer(world, f"t{i}") for i in range(trainers)]
        return world

    yield make
    for world in worlds:
        world.kill_coordinator()


def test_a_quiet_run(make_world: MakeWorld) -> None:
    world = make_world(num_units=7, num_passes=3)
    world.run_to_end()
    world.check_exactly_once([7, 14, 21])
    coordinator = world.coordinator
    assert coordinator is not None
    assert coordinator.work.counters.replayed == 0
    status = coordinator.status()
    assert status["state"] == "finished" and status["units"]["complete"] == 21
    newest = coordinator.checkpoints.newest
    assert newest is not None and len(newest.manifest["passes"]) == 3
    for trainer in world.trainers:
        for _ in range(100):
            trainer.step()
            world.clock.now += 0.1
        assert trainer.finished


@pytest.mark.parametrize("seed", range(12))
def test_anything_may_die(make_world: MakeWorld, seed: int) -> None:
    """Shards, trainers, coordinators killed and paused, answers lost: at the end every partition has all names once."""
    world = make_world(num_units=9, num_passes=3)
    chance = seeded(seed)
    world.lose_answer = lambda: chance.random() < 0.02
    down_until = 0.0
    started = 0
    calm_at = world.clock() + 60

    def launch() -> None:
        """The launcher: a process that ended, or hung for long, is started again."""
        nonlocal started
        assert world.coordinator is not None or world.clock() < down_until + 1
        live = [shard for shard in world.shards if shard.alive and world.clock() >= shard.paused_until]
        while len(live) < 2:
            started += 1
            live.append(Shard(world, f"new{started}"))
            world.shards.append(live[-1])
        world.trainers = [trainer for trainer in world.trainers if trainer.alive]
        while len(world.trainers) < 2:
            started += 1
            world.trainers.append(Trainer(world, f"new{started}"))

    def disturb() -> None:
        nonlocal down_until
        if world.coordinator is None and world.clock() >= down_until:
            world.start_coordinator()
        if world.clock() < calm_at:
            dice = chance.random()
            if dice < 0.01:
                chance.choice(world.shards).alive = False
            elif dice < 0.02:
                chance.choice(world.shards).paused_until = world.clock() + chance.uniform(0.5, 4.0)
            elif dice < 0.03 and world.trainers:
                chance.choice(world.trainers).alive = False
            elif dice < 0.04 and world.coordinator is not None:
                world.kill_coordinator()
                down_until = world.clock() + chance.uniform(0.0, 3.0)
        launch()

    world.run_to_end(disturb)
    world.check_exactly_once([9, 18, 27])


def test_only_the_shard_that_died_goes_back(make_world: MakeWorld) -> None:
    world = make_world(num_units=30)
    coordinator = world.until(lambda coordinator: num_complete(coordinator) >= 12)
    before = world.shards[1].incarnation
    world.shards[0].alive = False
    world.shards.append(Shard(world, "new"))
    world.run_to_end()
    world.check_exactly_once([30])
    assert world.shards[1].alive and world.shards[1].incarnation == before
    assert all(trainer.incarnation is not None and trainer.sequence > 3 for trainer in world.trainers)
    assert coordinator.work.counters.replayed > 0


def test_a_new_coordinator_finds_its_members_as_they_are(make_world: MakeWorld) -> None:
    world = make_world(num_units=30, change=lambda s: replace(s, checkpoint=CheckpointSettings(every_s=1e6)))
    first = world.until(lambda coordinator: coordinator.work.counters.given > 8)
    members = incarnations(first)
    term = first.term
    world.kill_coordinator()
    for _ in range(5):
        world.step()
    second = world.start_coordinator()
    assert second.term == term + 1
    held = {trainer.unit for trainer in world.trainers}
    world.until(lambda coordinator: coordinator.work.counters.given > 0)
    assert incarnations(second) == members
    world.run_to_end()
    world.check_exactly_once([30])
    assert len(world.shards) == 2 and len(world.trainers) == 2
    # what trainers held when the coordinator died was not given to others as well
    assert second.work.counters.replayed == 0, held


def test_nothing_is_leased_before_the_members_of_before_were_heard(make_world: MakeWorld) -> None:
    world = make_world(num_units=30, trainers=2)
    world.until(lambda coordinator: coordinator.work.counters.given > 4)
    world.kill_coordinator()
    world.start_coordinator()
    silent, asking = world.trainers
    silent.alive = False
    end = world.clock() + 1.2
    assert world.coordinator is not None
    while world.clock() < end - 0.06:
        world.step()
        asking.unit = None
        assert world.coordinator.work.counters.given == 0
    for _ in range(40):
        world.step()
    assert world.coordinator.work.counters.given > 0


def test_a_second_coordinator_does_no_harm(make_world: MakeWorld) -> None:
    world = make_world()
    world.step()
    before = {path: path.read_bytes() for path in sorted(world.run.path.rglob("*")) if path.is_file()}
    with pytest.raises(ConfigError, match="another coordinator has this run"):
        Coordinator(world.run, world.settings, clock=world.clock)
    assert {path: path.read_bytes() for path in sorted(world.run.path.rglob("*")) if path.is_file()} == before
    world.run_to_end()


def test_another_job(make_world: MakeWorld) -> None:
    world = make_world()
    world.kill_coordinator()
    with pytest.raises(ConfigError, match="run of another job, which differs in `job`"):
        Coordinator(world.run, replace(world.settings, job="job-2"), clock=world.clock)
    world.start_coordinator()


def test_a_coordinator_that_was_followed_by_another_one_decides_nothing(make_world: MakeWorld) -> None:
    world = make_world()
    assert world.coordinator is not None
    with pytest.raises(UnavailableError, match="term 1 is over: term 2 was seen"):
        ask(world.coordinator, "register", protocol=1, role="trainer", nonce="a", term=2)
    (world.run.path / "coordinator" / "term-00000002").touch()
    with pytest.raises(UnavailableError, match="taken this run over"):
        ask(world.coordinator, "register", protocol=1, role="trainer", nonce="a")


def test_an_old_protocol(make_world: MakeWorld) -> None:
    world = make_world()
    assert world.coordinator is not None
    with pytest.raises(ConfigError, match="register: protocol: expected 1, got 0"):
        ask(world.coordinator, "register", protocol=0, role="trainer", nonce="a")


def test_trainers_are_needed_until_the_last_checkpoint(make_world: MakeWorld) -> None:
    """If a shard died between the last push and the checkpoint, somebody would have to replay."""
    checkpoint = CheckpointSettings(every_s=1e6, retry_s=0.0)
    world = make_world(num_units=12, change=lambda s: replace(s, checkpoint=checkpoint))
    written: list[int] = []
    for shard in world.shards:
        shard._write = lambda command: written.append(1)  # type: ignore[method-assign, misc]
    for _ in range(200):
        world.step()
    assert written and world.coordinator is not None
    assert world.coordinator.work.is_finished() and not world.coordinator.is_finished
    assert not any(trainer.finished for trainer in world.trainers)
    world.shards[0].alive = False
    world.shards = [Shard(world, "a"), Shard(world, "b")]
    # what is saved while they catch up is not the end
    world.run_to_end()
    world.check_exactly_once([12])


def test_a_finished_run_stays_so(make_world: MakeWorld) -> None:
    world = make_world(change=lambda s: replace(s, stop_when_finished=True))
    world.run_to_end()
    world.kill_coordinator()
    coordinator = world.start_coordinator()
    answer = ask(coordinator, "register", protocol=1, role="ps", nonce="late")
    assert answer["commands"] == [{"command": "stop", "why": "finished"}]
    world.kill_coordinator()
    # more epochs go on
    world.settings = replace(world.settings, plan=replace(world.settings.plan, num_passes=2))
    world.shards = [Shard(world, "a"), Shard(world, "b")]
    world.trainers = [Trainer(world, "c")]
    world.start_coordinator()
    world.run_to_end()
    world.check_exactly_once([6, 12])


def test_scale_waits_for_the_old_shards(make_world: MakeWorld) -> None:
    world = make_world(num_units=30)
    coordinator = world.until(lambda coordinator: coordinator.checkpoints.num_committed > 0)
    coordinator.scale(3)
    world.shards[0].paused_until = world.clock() + 1e9
    world.shards += [Shard(world, f"new{i}") for i in range(3)]
    answer = ask(coordinator, "register", protocol=1, role="ps", nonce="x")
    assert answer["incarnation"] is None and "map before" in answer["why"] and answer["epoch"] == 2
    world.run_to_end()
    world.check_exactly_once([30])
    with pytest.raises(ConfigError, match="servers: expected 1 to 5, the number of partitions, got 6"):
        coordinator.scale(6)


def test_data_that_vanishes_before_a_pass_stops_the_run(make_world: MakeWorld, tmp_path: Path) -> None:
    world = make_world(num_passes=2)
    (tmp_path / "train.txt").unlink()
    for _ in range(200):
        world.step()
    assert world.coordinator is not None
    status = world.coordinator.status()
    assert status["state"] == "failed" and "train.txt" in status["failure"]
    assert {shard.stopped for shard in world.shards} == {status["failure"]}


def test_a_shard_that_finds_its_checkpoint_damaged_gets_the_one_before(make_world: MakeWorld) -> None:
    world = make_world(num_units=60)
    coordinator = world.until(lambda coordinator: coordinator.checkpoints.num_committed == 2)
    newest = coordinator.checkpoints.newest
    assert newest is not None
    world.shards[0].alive = False
    world.clock.now += 1.2
    asked = {"protocol": 1, "role": "ps", "nonce": "n", "index": 0}
    first = ask(coordinator, "register", **asked)
    assert first["checkpoint"]["name"] == newest.name
    with open(first["checkpoint"]["parts"][0]["dense"], "r+b") as file:
        file.write(b"?")
    second = ask(coordinator, "register", **asked, damaged={newest.name: "checksum"})
    assert second["incarnation"] == first["incarnation"]
    assert second["checkpoint"]["name"] == "ps-00000001-000001"
    world.clock.now += 1.2
    world.shards.append(Shard(world, "new"))
    world.run_to_end()
    world.check_exactly_once([60])


def test_a_late_heartbeat_is_not_news(make_world: MakeWorld) -> None:
    world = make_world(num_units=6)
    coordinator = world.until(lambda coordinator: num_complete(coordinator) >= 3)
    shard = world.shards[0]
    empty = {"records": [[list(shard.owned), {"watermark": 0, "complete": [], "open": {}, "boundaries": 0}]]}
    before = coordinator.work.figures()["complete"]
    body = {"address": "elsewhere", "state": "serving", "boundaries": 1, "status": empty}
    ask(world.coordinator, "heartbeat", incarnation=shard.incarnation, sequence=1, **body)
    assert coordinator.work.figures()["complete"] == before
    assert coordinator.status()["shards"][0]["address"] == shard.address


def test_who_left_need_not_be_waited_for(make_world: MakeWorld) -> None:
    world = make_world(num_units=30)
    for _ in range(20):
        world.step()
    shard, trainer = world.shards[0], world.trainers[0]
    assert world.coordinator is not None
    for role in (shard, trainer):
        role.alive = False
        ask(world.coordinator, "heartbeat", incarnation=role.incarnation, sequence=1000, leaving=True)
    assert trainer.incarnation not in world.coordinator.work.leases().values()
    answer = ask(world.coordinator, "register", protocol=1, role="ps", nonce="next")
    assert answer["index"] == 0 and answer["incarnation"] != shard.incarnation
    with pytest.raises(FencedError, match="not a member"):
        ask(world.coordinator, "lease", incarnation=trainer.incarnation)


def test_figures_that_are_not_numbers_are_left_out(tmp_path: Path) -> None:
    coordinator = Coordinator(Run(tmp_path / "run"), settings_of(plan_of(tmp_path)), clock=Clock(), say=print)
    trainer = ask(coordinator, "register", protocol=1, role="trainer", nonce="t")["incarnation"]
    body = {"incarnation": trainer, "sequence": 1, "figures": {"rate": 2.5, "bad": float("nan"), "deep": [1]}}
    ask(coordinator, "heartbeat", **body)
    status = coordinator.status()
    assert json.dumps(status, allow_nan=False) and status["trainers"][0]["figures"] == {"rate": 2.5}
    coordinator.close()
