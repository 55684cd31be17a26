"""The coordinator with fake roles: after any failure, every batch is applied once and in order."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticrec.coordinator.checkpoints import CheckpointSettings
from elasticrec.coordinator.coordinator import Coordinator
from elasticrec.coordinator.members import Timing
from elasticrec.coordinator.metrics import render
from elasticrec.coordinator.passes import PassPlan
from elasticrec.coordinator.settings import Settings
from elasticrec.errors import ConfigError, UnavailableError
from elasticrec.net.messages import FencedError
from elasticrec.run import Run
from support.fake_roles import Clock, FakeCluster, Shard, Trainer, ask, plan_of, seeded

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


MakeCluster = Callable[..., FakeCluster]


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[MakeCluster]:
    worlds: list[FakeCluster] = []

    def make(
        shards: int = 2, trainers: int = 2, change: Callable[[Settings], Settings] = lambda s: s, **plan: Any
    ) -> FakeCluster:
        world = FakeCluster(tmp_path, lambda p: change(settings_of(p)), plan_of(tmp_path, **plan))
        worlds.append(world)
        world.start_coordinator()
        world.shards = [Shard(world, f"s{i}") for i in range(shards)]
        world.trainers = [Trainer(world, f"t{i}") for i in range(trainers)]
        return world

    yield make
    for world in worlds:
        world.kill_coordinator()


def test_a_run_without_faults(make_world: MakeCluster) -> None:
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
def test_anything_may_die(make_world: MakeCluster, seed: int) -> None:
    """Kill and pause roles, and lose answers: at the end every partition has each batch once."""
    world = make_world(num_units=9, num_passes=3)
    chance = seeded(seed)
    world.lose_answer = lambda: chance.random() < 0.02
    down_until = 0.0
    started = 0
    calm_at = world.clock() + 60

    def launch() -> None:
        """Restart processes that ended or hang, like the launcher."""
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


def test_a_lease_has_the_number_of_live_trainers(make_world: MakeCluster) -> None:
    world = make_world(trainers=3, num_units=50)
    coordinator = world.until(lambda coordinator: num_complete(coordinator) >= 5)
    world.trainers[0].alive = False
    gone_at = world.clock() + 1.5
    world.until(lambda _: world.clock() >= gone_at)
    trainer = ask(coordinator, "register", protocol=1, role="trainer", nonce="x")["incarnation"]
    leases = (ask(coordinator, "lease", incarnation=trainer) for _ in range(100))
    assert next(lease["trainers"] for lease in leases if lease["unit"]) == 3, "the two earlier ones and the new one"


def test_no_unit_is_leased_while_shards_return_to_a_checkpoint(make_world: MakeCluster) -> None:
    world = make_world(num_units=50, change=lambda settings: replace(settings, group_size=2))
    coordinator = world.until(lambda coordinator: num_complete(coordinator) >= 5)
    world.shards[0].alive = False
    world.shards.append(Shard(world, "new"))
    world.until(lambda coordinator: bool(coordinator.members.must_reload))
    trainer = ask(coordinator, "register", protocol=1, role="trainer", nonce="x")["incarnation"]
    lease = ask(coordinator, "lease", incarnation=trainer)
    assert lease["unit"] is None and lease["why"] == "all shards return to the last checkpoint"


def test_only_the_shard_that_died_is_restored(make_world: MakeCluster) -> None:
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


def test_a_new_coordinator_keeps_its_members(make_world: MakeCluster) -> None:
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
    # Units that trainers held when the coordinator died were not leased to others as well.
    assert second.work.counters.replayed == 0, held


def test_no_unit_is_leased_before_earlier_members_are_heard(make_world: MakeCluster) -> None:
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


def test_a_new_coordinator_does_not_report_unheard_members_as_down(make_world: MakeCluster) -> None:
    world = make_world(num_units=30)
    world.until(lambda coordinator: num_complete(coordinator) >= 3)
    world.kill_coordinator()
    coordinator = world.start_coordinator()

    def states() -> tuple[list[str], list[str]]:
        status = coordinator.status()
        return [one["state"] for one in status["shards"]], [one["state"] for one in status["trainers"]]

    assert states() == (["unheard", "unheard"], ["unheard", "unheard"])
    assert 'elasticrec_coordinator_shards{state="unheard"} 2' in render(coordinator.status())
    assert 'elasticrec_coordinator_trainers{state="unheard"} 2' in render(coordinator.status())
    world.shards[0].next_at = world.trainers[0].next_beat = 0.0
    world.shards[0].step()
    world.trainers[0].step()
    assert states() == (["serving", "unheard"], ["alive", "unheard"])
    world.clock.now += 1.2
    assert states() == (["down", "down"], ["silent", "silent"])


def test_a_second_coordinator_does_no_harm(make_world: MakeCluster) -> None:
    world = make_world()
    world.step()
    before = {path: path.read_bytes() for path in sorted(world.run.path.rglob("*")) if path.is_file()}
    with pytest.raises(ConfigError, match="another coordinator has this run"):
        Coordinator(world.run, world.settings, clock=world.clock)
    assert {path: path.read_bytes() for path in sorted(world.run.path.rglob("*")) if path.is_file()} == before
    world.run_to_end()


def test_the_run_of_another_job_is_refused(make_world: MakeCluster) -> None:
    world = make_world()
    world.kill_coordinator()
    with pytest.raises(ConfigError, match="run belongs to another job, which differs in `job`"):
        Coordinator(world.run, replace(world.settings, job="job-2"), clock=world.clock)
    world.start_coordinator()


def test_a_replaced_coordinator_decides_nothing(make_world: MakeCluster) -> None:
    world = make_world()
    assert world.coordinator is not None
    with pytest.raises(UnavailableError, match="term 1 is over: the role has seen term 2"):
        ask(world.coordinator, "register", protocol=1, role="trainer", nonce="a", term=2)
    (world.run.path / "coordinator" / "term-00000002").touch()
    with pytest.raises(UnavailableError, match="taken this run over"):
        ask(world.coordinator, "register", protocol=1, role="trainer", nonce="a")


def test_an_old_protocol(make_world: MakeCluster) -> None:
    world = make_world()
    assert world.coordinator is not None
    with pytest.raises(ConfigError, match="register: protocol: expected 1, got 0"):
        ask(world.coordinator, "register", protocol=0, role="trainer", nonce="a")


def test_trainers_are_needed_until_the_last_checkpoint(make_world: MakeCluster) -> None:
    """If a shard dies between the last push and the checkpoint, a trainer must replay its batches."""
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
    # Checkpoints that are written while the new shards catch up do not end the run.
    world.run_to_end()
    world.check_exactly_once([12])


def test_a_finished_run_stays_finished(make_world: MakeCluster) -> None:
    world = make_world(change=lambda s: replace(s, stop_when_finished=True))
    world.run_to_end()
    world.kill_coordinator()
    coordinator = world.start_coordinator()
    answer = ask(coordinator, "register", protocol=1, role="ps", nonce="late")
    assert answer["commands"] == [{"command": "stop", "why": "finished"}]
    world.kill_coordinator()
    # With more epochs the run continues.
    world.settings = replace(world.settings, plan=replace(world.settings.plan, num_passes=2))
    world.shards = [Shard(world, "a"), Shard(world, "b")]
    world.trainers = [Trainer(world, "c")]
    world.start_coordinator()
    world.run_to_end()
    world.check_exactly_once([6, 12])


def test_data_that_vanishes_before_a_pass_stops_the_run(make_world: MakeCluster, tmp_path: Path) -> None:
    world = make_world(num_passes=2)
    (tmp_path / "train.txt").unlink()
    for _ in range(200):
        world.step()
    assert world.coordinator is not None
    status = world.coordinator.status()
    assert status["state"] == "failed" and "train.txt" in status["failure"]
    assert {shard.stopped for shard in world.shards} == {status["failure"]}


def test_a_shard_with_a_damaged_checkpoint_gets_the_previous_one(make_world: MakeCluster) -> None:
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
    (note,) = [text for _, text in coordinator.status()["passes"]["notes"]]
    assert newest.name in note and note.endswith(" instead")
    world.clock.now += 1.2
    world.shards.append(Shard(world, "new"))
    world.run_to_end()
    world.check_exactly_once([60])


def test_checkpoints_without_a_journal_still_get_a_newer_term(make_world: MakeCluster) -> None:
    world = make_world(num_units=60)
    for _ in range(2):
        world.kill_coordinator()
        coordinator = world.start_coordinator()
    coordinator = world.until(lambda coordinator: coordinator.checkpoints.num_committed == 1)
    newest = coordinator.checkpoints.newest
    assert newest is not None and newest.name == "ps-00000003-000001"
    world.kill_coordinator()
    shutil.rmtree(world.run.path / "coordinator")
    (world.run.checkpoints / "ps-of-mine").mkdir()
    coordinator = world.start_coordinator()
    assert coordinator.term == 4 and coordinator.checkpoints.newest is not None
    assert coordinator.checkpoints.newest.name == newest.name


def test_a_role_with_the_directory_of_another_run_is_refused(make_world: MakeCluster) -> None:
    world = make_world(change=lambda settings: replace(settings, run_id="this"))
    assert world.coordinator is not None
    for role in ("ps", "trainer"):
        asked = {"protocol": 1, "role": role, "nonce": role}
        with pytest.raises(ConfigError, match="register: run: expected a role of this run, got one with the directory"):
            ask(world.coordinator, "register", **asked, run="other")
    assert not incarnations(world.coordinator)
    assert ask(world.coordinator, "register", protocol=1, role="ps", nonce="a", run="this")["incarnation"]
    assert ask(world.coordinator, "register", protocol=1, role="trainer", nonce="b")["incarnation"], (
        "the run is optional"
    )


def test_a_meeting_waits_for_a_trainer_that_may_have_a_unit(make_world: MakeCluster) -> None:
    """A new coordinator learns the units of a trainer from its first heartbeat."""
    world = make_world(num_units=30)
    world.until(lambda coordinator: num_complete(coordinator) >= 3)
    world.kill_coordinator()
    coordinator = world.start_coordinator()
    here, silent = world.trainers

    def meet() -> bool:
        for member in (*world.shards, here):
            ask(coordinator, "heartbeat", incarnation=member.incarnation, sequence=0)
        ask(coordinator, "heartbeat", incarnation=here.incarnation, sequence=0, units=[5], meeting=3)
        return bool(ask(coordinator, "meet", incarnation=here.incarnation, meeting=4)["go"])

    assert not meet()
    world.clock.now += 0.9
    assert not meet()
    ask(coordinator, "heartbeat", incarnation=silent.incarnation, sequence=0)
    assert meet(), "it has no unit"
    world.kill_coordinator()
    coordinator = world.start_coordinator()
    world.clock.now += 0.9
    assert not meet()
    world.clock.now += 0.4
    assert meet(), "its lease is over"


def test_with_groups_no_checkpoint_begins_before_earlier_trainers_are_heard(make_world: MakeCluster) -> None:
    """A trainer may be within a group that the shards have not reported yet."""
    world = make_world(num_units=30, change=lambda settings: replace(settings, group_size=2))
    for _ in range(5):
        world.step()
    assert all(role.incarnation is not None for role in (*world.shards, *world.trainers))
    world.kill_coordinator()
    coordinator = world.start_coordinator()
    coordinator.checkpoints.want()

    def hear(*trainers: Trainer) -> str | None:
        for shard in world.shards:
            status = {"records": [[list(shard.owned), {"watermark": 2}]]}
            body = {"state": "serving", "address": "a", "boundaries": 1, "status": status}
            ask(coordinator, "heartbeat", incarnation=shard.incarnation, sequence=shard.sequence + 1, **body)
        for trainer in trainers:
            ask(coordinator, "heartbeat", incarnation=trainer.incarnation, sequence=trainer.sequence + 1)
        return coordinator.checkpoints.writing

    assert hear(world.trainers[0]) is None and coordinator.work.is_between_groups()
    assert hear(*world.trainers) is not None


def test_a_late_heartbeat_does_not_overwrite_a_newer_one(make_world: MakeCluster) -> None:
    world = make_world(num_units=6)
    coordinator = world.until(lambda coordinator: num_complete(coordinator) >= 3)
    shard = world.shards[0]
    empty = {"records": [[list(shard.owned), {"watermark": 0, "complete": [], "open": {}, "boundaries": 0}]]}
    before = coordinator.work.figures()["complete"]
    body = {"address": "elsewhere", "state": "serving", "boundaries": 1, "status": empty}
    ask(world.coordinator, "heartbeat", incarnation=shard.incarnation, sequence=1, **body)
    assert coordinator.work.figures()["complete"] == before
    assert coordinator.status()["shards"][0]["address"] == shard.address


def test_members_that_left_are_not_waited_for(make_world: MakeCluster) -> None:
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


def test_only_finite_numbers_are_shown_as_figures(tmp_path: Path) -> None:
    coordinator = Coordinator(Run(tmp_path / "run"), settings_of(plan_of(tmp_path)), clock=Clock())
    trainer = ask(coordinator, "register", protocol=1, role="trainer", nonce="t")["incarnation"]
    body = {"incarnation": trainer, "sequence": 1, "figures": {"rate": 2.5, "bad": float("nan"), "deep": [1]}}
    ask(coordinator, "heartbeat", **body)
    status = coordinator.status()
    assert json.dumps(status, allow_nan=False) and status["trainers"][0]["figures"] == {"rate": 2.5}
    coordinator.close()


def test_units_without_data_are_skipped_by_all_members(make_world: MakeCluster) -> None:
    """Also by a coordinator and a shard that start after the unit was reported as missing."""
    world = make_world(
        change=lambda settings: replace(settings, plan=replace(settings.plan, on_missing="skip")),
        num_units=6,
        num_passes=2,
    )
    world.gone = {1, 4, 8}
    coordinator = world.until(lambda one: set(one.passes.missing) == {1, 4})
    line = "unit 1 is lost, 8 bytes from 8 on (data.on_missing): train.txt: is gone"
    assert line in [text for _, text in coordinator.status()["passes"]["notes"]]
    world.kill_coordinator()
    world.shards[0].alive = False
    world.shards.append(Shard(world, "s2"))
    world.gone = {8}
    world.start_coordinator()
    world.run_to_end()
    coordinator = world.coordinator
    assert coordinator is not None and set(coordinator.passes.missing) == {1, 4, 8}
    for shard in world.present():
        for partition in shard.partitions.values():
            applied = {event[0] for event in partition.events if event[0] != "boundary"}
            assert applied == set(range(12)) - {1, 4, 8} and partition.boundaries == 2
    newest = coordinator.checkpoints.newest
    assert newest is not None
    assert [(one["unit"], one["bytes"], one["batches"]) for one in newest.manifest["missing"]] == [
        (1, 8, 0),
        (4, 8, 0),
        (8, 8, 0),
    ]


def test_missing_data_fails_the_run_by_default(make_world: MakeCluster) -> None:
    world = make_world()
    world.gone = {0}
    with pytest.raises(ConfigError, match=r"unit 0: train.txt: is gone"):
        world.run_to_end()
