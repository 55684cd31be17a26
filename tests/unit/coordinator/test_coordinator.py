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
from elasticrec.coordinator.metrics import render
from elasticrec.coordinator.settings import Settings
from elasticrec.errors import ConfigError, UnavailableError
from elasticrec.net.messages import FencedError
from elasticrec.run import Run
from support.fake_roles import Clock, FakeCluster, Shard, Trainer, ask, plan_of, seeded, settings_of


def num_complete(coordinator: Coordinator) -> int:
    return coordinator.work.figures()["complete"] or 0


def incarnations(coordinator: Coordinator) -> set[int]:
    return {member.incarnation for member in (*coordinator.members.of("ps"), *coordinator.members.of("trainer"))}


MakeCluster = Callable[..., FakeCluster]


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[MakeCluster]:
    clusters: list[FakeCluster] = []

    def make(
        shards: int = 2, trainers: int = 2, change: Callable[[Settings], Settings] = lambda s: s, **plan: Any
    ) -> FakeCluster:
        cluster = FakeCluster(tmp_path, lambda p: change(settings_of(p)), plan_of(tmp_path, **plan))
        clusters.append(cluster)
        cluster.start_coordinator()
        cluster.shards = [Shard(cluster, f"s{i}") for i in range(shards)]
        cluster.trainers = [Trainer(cluster, f"t{i}") for i in range(trainers)]
        return cluster

    yield make
    for cluster in clusters:
        cluster.kill_coordinator()


def test_a_run_without_faults(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(num_units=7, num_passes=3)
    cluster.run_to_end()
    cluster.check_exactly_once([7, 14, 21])
    coordinator = cluster.coordinator
    assert coordinator is not None
    assert coordinator.work.counters.replayed == 0
    status = coordinator.status()
    assert status["state"] == "finished" and status["units"]["complete"] == 21
    newest = coordinator.checkpoints.newest
    assert newest is not None and len(newest.manifest["passes"]) == 3
    for trainer in cluster.trainers:
        for _ in range(100):
            trainer.step()
            cluster.clock.now += 0.1
        assert trainer.finished


@pytest.mark.parametrize("seed", range(12))
def test_any_role_may_die(make_cluster: MakeCluster, seed: int) -> None:
    """Kill and pause roles, and lose answers: at the end every partition has each batch once."""
    cluster = make_cluster(num_units=9, num_passes=3)
    chance = seeded(seed)
    cluster.lose_answer = lambda: chance.random() < 0.02
    down_until = 0.0
    started = 0
    calm_at = cluster.clock() + 60

    def launch() -> None:
        """Restart processes that ended or hang, like the launcher."""
        nonlocal started
        assert cluster.coordinator is not None or cluster.clock() < down_until + 1
        live = [shard for shard in cluster.shards if shard.alive and cluster.clock() >= shard.paused_until]
        while len(live) < 2:
            started += 1
            live.append(Shard(cluster, f"new{started}"))
            cluster.shards.append(live[-1])
        cluster.trainers = [trainer for trainer in cluster.trainers if trainer.alive]
        while len(cluster.trainers) < 2:
            started += 1
            cluster.trainers.append(Trainer(cluster, f"new{started}"))

    def disturb() -> None:
        nonlocal down_until
        if cluster.coordinator is None and cluster.clock() >= down_until:
            cluster.start_coordinator()
        if cluster.clock() < calm_at:
            draw = chance.random()
            if draw < 0.01:
                chance.choice(cluster.shards).alive = False
            elif draw < 0.02:
                chance.choice(cluster.shards).paused_until = cluster.clock() + chance.uniform(0.5, 4.0)
            elif draw < 0.03 and cluster.trainers:
                chance.choice(cluster.trainers).alive = False
            elif draw < 0.04 and cluster.coordinator is not None:
                cluster.kill_coordinator()
                down_until = cluster.clock() + chance.uniform(0.0, 3.0)
        launch()

    cluster.run_to_end(disturb)
    cluster.check_exactly_once([9, 18, 27])


def test_a_lease_has_the_number_of_live_trainers(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(trainers=3, num_units=50)
    coordinator = cluster.until(lambda coordinator: num_complete(coordinator) >= 5)
    cluster.trainers[0].alive = False
    gone_at = cluster.clock() + 1.5
    cluster.until(lambda _: cluster.clock() >= gone_at)
    trainer = ask(coordinator, "register", protocol=1, role="trainer", nonce="x")["incarnation"]
    leases = (ask(coordinator, "lease", incarnation=trainer) for _ in range(100))
    assert next(lease["trainers"] for lease in leases if lease["unit"]) == 3, "two earlier trainers and the new one"


def test_no_unit_is_leased_while_shards_return_to_a_checkpoint(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(num_units=50, change=lambda settings: replace(settings, group_size=2))
    coordinator = cluster.until(lambda coordinator: num_complete(coordinator) >= 5)
    cluster.shards[0].alive = False
    cluster.shards.append(Shard(cluster, "new"))
    cluster.until(lambda coordinator: bool(coordinator.members.must_reload))
    trainer = ask(coordinator, "register", protocol=1, role="trainer", nonce="x")["incarnation"]
    lease = ask(coordinator, "lease", incarnation=trainer)
    assert lease["unit"] is None and lease["why"] == "all shards are returning to the last checkpoint"


def test_only_the_shard_that_died_is_restored(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(num_units=30)
    coordinator = cluster.until(lambda coordinator: num_complete(coordinator) >= 12)
    before = cluster.shards[1].incarnation
    cluster.shards[0].alive = False
    cluster.shards.append(Shard(cluster, "new"))
    cluster.run_to_end()
    cluster.check_exactly_once([30])
    assert cluster.shards[1].alive and cluster.shards[1].incarnation == before
    assert all(trainer.incarnation is not None and trainer.sequence > 3 for trainer in cluster.trainers)
    assert coordinator.work.counters.replayed > 0


def test_a_new_coordinator_keeps_its_members(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(num_units=30, change=lambda s: replace(s, checkpoint=CheckpointSettings(every_s=1e6)))
    first = cluster.until(lambda coordinator: coordinator.work.counters.given > 8)
    members = incarnations(first)
    term = first.term
    cluster.kill_coordinator()
    for _ in range(5):
        cluster.step()
    second = cluster.start_coordinator()
    assert second.term == term + 1
    held = {trainer.unit for trainer in cluster.trainers}
    cluster.until(lambda coordinator: coordinator.work.counters.given > 0)
    assert incarnations(second) == members
    cluster.run_to_end()
    cluster.check_exactly_once([30])
    assert len(cluster.shards) == 2 and len(cluster.trainers) == 2
    # Units that trainers held when the coordinator died were not leased to others as well.
    assert second.work.counters.replayed == 0, held


def test_no_unit_is_leased_before_earlier_members_send_a_heartbeat(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(num_units=30, trainers=2)
    cluster.until(lambda coordinator: coordinator.work.counters.given > 4)
    cluster.kill_coordinator()
    cluster.start_coordinator()
    silent, asking = cluster.trainers
    silent.alive = False
    end = cluster.clock() + 1.2
    assert cluster.coordinator is not None
    while cluster.clock() < end - 0.06:
        cluster.step()
        asking.unit = None
        assert cluster.coordinator.work.counters.given == 0
    for _ in range(40):
        cluster.step()
    assert cluster.coordinator.work.counters.given > 0


def test_a_new_coordinator_does_not_report_unheard_members_as_down(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(num_units=30)
    cluster.until(lambda coordinator: num_complete(coordinator) >= 3)
    cluster.kill_coordinator()
    coordinator = cluster.start_coordinator()

    def states() -> tuple[list[str], list[str]]:
        status = coordinator.status()
        return [one["state"] for one in status["shards"]], [one["state"] for one in status["trainers"]]

    assert states() == (["unheard", "unheard"], ["unheard", "unheard"])
    assert 'elasticrec_coordinator_shards{state="unheard"} 2' in render(coordinator.status())
    assert 'elasticrec_coordinator_trainers{state="unheard"} 2' in render(coordinator.status())
    cluster.shards[0].next_at = cluster.trainers[0].next_beat = 0.0
    cluster.shards[0].step()
    cluster.trainers[0].step()
    assert states() == (["serving", "unheard"], ["alive", "unheard"])
    cluster.clock.now += 1.2
    assert states() == (["down", "down"], ["silent", "silent"])


def test_a_second_coordinator_does_no_harm(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.step()
    before = {path: path.read_bytes() for path in sorted(cluster.run.path.rglob("*")) if path.is_file()}
    with pytest.raises(ConfigError, match="another coordinator holds the lock of this run"):
        Coordinator(cluster.run, cluster.settings, clock=cluster.clock)
    assert {path: path.read_bytes() for path in sorted(cluster.run.path.rglob("*")) if path.is_file()} == before
    cluster.run_to_end()


def test_the_run_of_another_job_is_refused(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.kill_coordinator()
    with pytest.raises(ConfigError, match="run belongs to another job, which differs in `job`"):
        Coordinator(cluster.run, replace(cluster.settings, job="job-2"), clock=cluster.clock)
    cluster.start_coordinator()


def test_a_replaced_coordinator_decides_nothing(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    assert cluster.coordinator is not None
    with pytest.raises(UnavailableError, match="term 1 is over: the role has seen term 2"):
        ask(cluster.coordinator, "register", protocol=1, role="trainer", nonce="a", term=2)
    (cluster.run.path / "coordinator" / "term-00000002").touch()
    with pytest.raises(UnavailableError, match="taken over this run"):
        ask(cluster.coordinator, "register", protocol=1, role="trainer", nonce="a")


def test_an_old_protocol_is_refused(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    assert cluster.coordinator is not None
    with pytest.raises(ConfigError, match="register: protocol: expected 1, got 0"):
        ask(cluster.coordinator, "register", protocol=0, role="trainer", nonce="a")


def test_trainers_are_needed_until_the_last_checkpoint(make_cluster: MakeCluster) -> None:
    """If a shard dies between the last push and the checkpoint, a trainer must replay its batches."""
    checkpoint = CheckpointSettings(every_s=1e6, retry_s=0.0)
    cluster = make_cluster(num_units=12, change=lambda s: replace(s, checkpoint=checkpoint))
    written: list[int] = []
    for shard in cluster.shards:
        shard._write = lambda command: written.append(1)  # type: ignore[method-assign, misc]
    for _ in range(200):
        cluster.step()
    assert written and cluster.coordinator is not None
    assert cluster.coordinator.work.is_finished() and not cluster.coordinator.is_finished
    assert not any(trainer.finished for trainer in cluster.trainers)
    cluster.shards[0].alive = False
    cluster.shards = [Shard(cluster, "a"), Shard(cluster, "b")]
    # Checkpoints that are written while the new shards catch up do not end the run.
    cluster.run_to_end()
    cluster.check_exactly_once([12])


def test_a_finished_run_stays_finished(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(change=lambda s: replace(s, stop_when_finished=True))
    cluster.run_to_end()
    cluster.kill_coordinator()
    coordinator = cluster.start_coordinator()
    answer = ask(coordinator, "register", protocol=1, role="ps", nonce="late")
    assert answer["commands"] == [{"command": "stop", "why": "finished"}]
    cluster.kill_coordinator()
    # With more epochs the run continues.
    cluster.settings = replace(cluster.settings, plan=replace(cluster.settings.plan, num_passes=2))
    cluster.shards = [Shard(cluster, "a"), Shard(cluster, "b")]
    cluster.trainers = [Trainer(cluster, "c")]
    cluster.start_coordinator()
    cluster.run_to_end()
    cluster.check_exactly_once([6, 12])


def test_data_that_vanishes_before_a_pass_stops_the_run(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(num_passes=2)
    (tmp_path / "train.txt").unlink()
    for _ in range(200):
        cluster.step()
    assert cluster.coordinator is not None
    status = cluster.coordinator.status()
    assert status["state"] == "failed" and "train.txt" in status["failure"]
    assert {shard.stopped for shard in cluster.shards} == {status["failure"]}


def test_a_shard_with_a_damaged_checkpoint_gets_the_previous_one(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(num_units=60)
    coordinator = cluster.until(lambda coordinator: coordinator.checkpoints.num_committed == 2)
    newest = coordinator.checkpoints.newest
    assert newest is not None
    cluster.shards[0].alive = False
    cluster.clock.now += 1.2
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
    cluster.clock.now += 1.2
    cluster.shards.append(Shard(cluster, "new"))
    cluster.run_to_end()
    cluster.check_exactly_once([60])


def test_checkpoints_without_a_journal_still_get_a_newer_term(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(num_units=60)
    for _ in range(2):
        cluster.kill_coordinator()
        coordinator = cluster.start_coordinator()
    coordinator = cluster.until(lambda coordinator: coordinator.checkpoints.num_committed == 1)
    newest = coordinator.checkpoints.newest
    assert newest is not None and newest.name == "ps-00000003-000001"
    cluster.kill_coordinator()
    shutil.rmtree(cluster.run.path / "coordinator")
    (cluster.run.checkpoints / "ps-of-mine").mkdir()
    coordinator = cluster.start_coordinator()
    assert coordinator.term == 4 and coordinator.checkpoints.newest is not None
    assert coordinator.checkpoints.newest.name == newest.name


def test_a_role_with_the_directory_of_another_run_is_refused(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(change=lambda settings: replace(settings, run_id="this"))
    assert cluster.coordinator is not None
    for role in ("ps", "trainer"):
        asked = {"protocol": 1, "role": role, "nonce": role}
        with pytest.raises(ConfigError, match="register: run: expected a role of this run, got a role with"):
            ask(cluster.coordinator, "register", **asked, run="other")
    assert not incarnations(cluster.coordinator)
    assert ask(cluster.coordinator, "register", protocol=1, role="ps", nonce="a", run="this")["incarnation"]
    assert ask(cluster.coordinator, "register", protocol=1, role="trainer", nonce="b")["incarnation"], (
        "the run is optional"
    )


def test_a_meeting_waits_for_a_trainer_that_may_have_a_unit(make_cluster: MakeCluster) -> None:
    """A new coordinator learns the units of a trainer from its first heartbeat."""
    cluster = make_cluster(num_units=30)
    cluster.until(lambda coordinator: num_complete(coordinator) >= 3)
    cluster.kill_coordinator()
    coordinator = cluster.start_coordinator()
    active, silent = cluster.trainers

    def meet() -> bool:
        for member in (*cluster.shards, active):
            ask(coordinator, "heartbeat", incarnation=member.incarnation, sequence=0)
        ask(coordinator, "heartbeat", incarnation=active.incarnation, sequence=0, units=[5], meeting=3)
        return bool(ask(coordinator, "meet", incarnation=active.incarnation, meeting=4)["go"])

    assert not meet()
    cluster.clock.now += 0.9
    assert not meet()
    ask(coordinator, "heartbeat", incarnation=silent.incarnation, sequence=0)
    assert meet(), "it has no unit"
    cluster.kill_coordinator()
    coordinator = cluster.start_coordinator()
    cluster.clock.now += 0.9
    assert not meet()
    cluster.clock.now += 0.4
    assert meet(), "its lease is over"


def test_with_groups_no_checkpoint_begins_before_earlier_trainers_send_a_heartbeat(make_cluster: MakeCluster) -> None:
    """A trainer may be within a group that the shards have not reported yet."""
    cluster = make_cluster(num_units=30, change=lambda settings: replace(settings, group_size=2))
    for _ in range(5):
        cluster.step()
    assert all(role.incarnation is not None for role in (*cluster.shards, *cluster.trainers))
    cluster.kill_coordinator()
    coordinator = cluster.start_coordinator()
    coordinator.checkpoints.request()

    def hear(*trainers: Trainer) -> str | None:
        for shard in cluster.shards:
            status = {"records": [[list(shard.owned), {"watermark": 2}]]}
            body = {"state": "serving", "address": "a", "boundaries": 1, "status": status}
            ask(coordinator, "heartbeat", incarnation=shard.incarnation, sequence=shard.sequence + 1, **body)
        for trainer in trainers:
            ask(coordinator, "heartbeat", incarnation=trainer.incarnation, sequence=trainer.sequence + 1)
        return coordinator.checkpoints.writing

    assert hear(cluster.trainers[0]) is None and coordinator.work.is_between_groups()
    assert hear(*cluster.trainers) is not None


def test_a_late_heartbeat_does_not_overwrite_a_newer_one(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(num_units=6)
    coordinator = cluster.until(lambda coordinator: num_complete(coordinator) >= 3)
    shard = cluster.shards[0]
    empty = {"records": [[list(shard.owned), {"watermark": 0, "complete": [], "open": {}, "boundaries": 0}]]}
    before = coordinator.work.figures()["complete"]
    body = {"address": "elsewhere", "state": "serving", "boundaries": 1, "status": empty}
    ask(cluster.coordinator, "heartbeat", incarnation=shard.incarnation, sequence=1, **body)
    assert coordinator.work.figures()["complete"] == before
    assert coordinator.status()["shards"][0]["address"] == shard.address


def test_members_that_left_are_not_waited_for(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(num_units=30)
    for _ in range(20):
        cluster.step()
    shard, trainer = cluster.shards[0], cluster.trainers[0]
    assert cluster.coordinator is not None
    for role in (shard, trainer):
        role.alive = False
        ask(cluster.coordinator, "heartbeat", incarnation=role.incarnation, sequence=1000, leaving=True)
    assert trainer.incarnation not in cluster.coordinator.work.leases().values()
    answer = ask(cluster.coordinator, "register", protocol=1, role="ps", nonce="next")
    assert answer["index"] == 0 and answer["incarnation"] != shard.incarnation
    with pytest.raises(FencedError, match="not a member"):
        ask(cluster.coordinator, "lease", incarnation=trainer.incarnation)


def test_only_finite_numbers_are_shown_as_figures(tmp_path: Path) -> None:
    coordinator = Coordinator(Run(tmp_path / "run"), settings_of(plan_of(tmp_path)), clock=Clock())
    trainer = ask(coordinator, "register", protocol=1, role="trainer", nonce="t")["incarnation"]
    body = {"incarnation": trainer, "sequence": 1, "figures": {"rate": 2.5, "bad": float("nan"), "deep": [1]}}
    ask(coordinator, "heartbeat", **body)
    status = coordinator.status()
    assert json.dumps(status, allow_nan=False) and status["trainers"][0]["figures"] == {"rate": 2.5}
    coordinator.close()


def test_units_without_data_are_skipped_by_all_members(make_cluster: MakeCluster) -> None:
    """Also by a coordinator and a shard that start after the unit was reported as missing."""
    cluster = make_cluster(
        change=lambda settings: replace(settings, plan=replace(settings.plan, on_missing="skip")),
        num_units=6,
        num_passes=2,
    )
    cluster.units_without_data = {1, 4, 8}
    coordinator = cluster.until(lambda one: set(one.passes.missing) == {1, 4})
    line = "unit 1 is lost, 8 bytes from 8 on (data.on_missing): train.txt: is gone"
    assert line in [text for _, text in coordinator.status()["passes"]["notes"]]
    cluster.kill_coordinator()
    cluster.shards[0].alive = False
    cluster.shards.append(Shard(cluster, "s2"))
    cluster.units_without_data = {8}
    cluster.start_coordinator()
    cluster.run_to_end()
    coordinator = cluster.coordinator
    assert coordinator is not None and set(coordinator.passes.missing) == {1, 4, 8}
    for shard in cluster.members():
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


def test_missing_data_fails_the_run_by_default(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.units_without_data = {0}
    with pytest.raises(ConfigError, match=r"unit 0: train.txt: is gone"):
        cluster.run_to_end()
