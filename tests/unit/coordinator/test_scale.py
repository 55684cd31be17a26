"""Scaling the shards and trainers of an active run: the order of events, and failures in between."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elasticrec.coordinator.coordinator import Coordinator
from elasticrec.coordinator.rate import Rate
from elasticrec.errors import ConfigError
from support.fake_roles import NUM_PARTITIONS, FakeCluster, Shard, Trainer, ask, plan_of, seeded, settings_of


class LaunchedCluster(FakeCluster):
    """A run with a launcher, which keeps the wanted numbers of shards and trainers."""

    started = 0

    def launch(self) -> None:
        if self.coordinator is None:
            return
        wanted = self.coordinator.wanted
        live = [shard for shard in self.shards if shard.alive and self.clock() >= shard.paused_until]
        # Shards of the old map are needed until the partitions have moved.
        while len(live) < max(wanted.servers, self.coordinator.members.map.servers):
            live.append(Shard(self, self._nonce()))
            self.shards.append(live[-1])
        self.trainers = [trainer for trainer in self.trainers if trainer.alive]
        while len(self.trainers) < wanted.trainers:
            self.trainers.append(Trainer(self, self._nonce()))

    def _nonce(self) -> str:
        self.started += 1
        return f"new{self.started}"


MakeCluster = Callable[..., LaunchedCluster]


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[MakeCluster]:
    clusters: list[LaunchedCluster] = []

    def make(num_units: int = 40, **changes: object) -> LaunchedCluster:
        plan = plan_of(tmp_path, num_units=num_units)
        settings = replace(settings_of(plan, checkpoint_every_s=1e6, trainers=2), **changes)  # type: ignore[arg-type]
        cluster = LaunchedCluster(tmp_path, lambda _: settings, plan)
        clusters.append(cluster)
        cluster.start_coordinator()
        cluster.launch()
        return cluster

    yield make
    for cluster in clusters:
        cluster.kill_coordinator()


def has_units(number: int) -> Callable[[Coordinator], bool]:
    return lambda coordinator: (coordinator.work.figures()["complete"] or 0) >= number


def has_servers(number: int) -> Callable[[Coordinator], bool]:
    """Return a condition: a map has this number of shards, and all serve."""

    def reached(coordinator: Coordinator) -> bool:
        states = [shard["state"] for shard in coordinator.status()["shards"]]
        return states == ["serving"] * number

    return reached


def test_no_unit_is_leased_during_a_move(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    coordinator = cluster.until(has_units(8))
    given = coordinator.work.counters.given
    answer = ask(coordinator, "scale", servers=3)
    assert answer["wanted"] == {"servers": 3, "trainers": 2} and answer["servers"] == 2, "the map is still the old one"
    assert coordinator.checkpoints.newest is None
    asked = ask(coordinator, "register", protocol=1, role="trainer", nonce="x")
    lease = ask(coordinator, "lease", incarnation=asked["incarnation"])
    assert lease["unit"] is None and lease["why"] == "scaling from 2 to 3 servers"
    early = ask(coordinator, "register", protocol=1, role="ps", nonce="y", index=2)
    assert early["incarnation"] is None and early["why"] == "the partitions are moving to 3 shards"
    cluster.until(lambda coordinator: coordinator.members.map.servers == 3, cluster.launch)
    assert coordinator.work.counters.given == given
    newest = coordinator.checkpoints.newest
    assert newest is not None and newest.manifest["map_epoch"] == 1
    begun = cluster.clock()
    cluster.until(has_servers(3), cluster.launch)
    assert cluster.clock() - begun < 2
    # The checkpoint contains every push.
    assert coordinator.work.figures()["behind"] == 0
    cluster.run_to_end(cluster.launch)
    cluster.check_exactly_once([40])
    assert coordinator.work.counters.replayed == 0


def test_a_move_does_not_wait_for_a_long_unit(make_cluster: MakeCluster) -> None:
    """The part of a long unit that is after the checkpoint is replayed."""
    cluster = make_cluster()
    coordinator = cluster.until(has_units(8))
    unit = coordinator.work.figures()["leased_ever"] or 0
    coordinator.work.renew(cluster.trainers[0].incarnation or 0, [unit])
    cluster.trainers[0].unit, cluster.trainers[0].todo = unit, [0] * 1000
    ask(coordinator, "scale", servers=1)
    begun = cluster.clock()
    cluster.until(lambda coordinator: coordinator.members.map.servers == 1, cluster.launch)
    assert 2 <= cluster.clock() - begun < 4
    cluster.run_to_end(cluster.launch)
    cluster.check_exactly_once([40])


def test_with_sync_the_servers_change_between_two_groups(make_cluster: MakeCluster) -> None:
    """All shards save at the same step, so the remaining units of a group that has begun are still leased."""
    cluster = make_cluster(num_units=41, group_size=3)
    coordinator = cluster.until(lambda coordinator: coordinator.work.counters.given == 10)
    assert not coordinator.work.is_between_groups(), "unit 9 begins a group"
    ask(coordinator, "scale", servers=3)
    cluster.until(lambda coordinator: coordinator.members.map.servers == 3, cluster.launch, limit_s=20)
    assert coordinator.work.counters.given == 12
    cluster.run_to_end(cluster.launch)
    cluster.check_exactly_once([41])


def test_shards_of_the_old_map_are_fenced(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    coordinator = cluster.until(has_units(8))
    hung = cluster.shards[0]
    ask(coordinator, "scale", servers=3)
    cluster.until(lambda coordinator: coordinator.members.map.servers == 3)
    hung.paused_until = cluster.clock() + 1e9
    answer = ask(coordinator, "register", protocol=1, role="ps", nonce="x")
    assert answer["incarnation"] is None and "previous map" in answer["why"] and answer["epoch"] == 2
    # `FakeCluster.note_start` asserts that no two shards may apply to the same partition.
    cluster.until(has_servers(3), cluster.launch)
    hung.paused_until = 0.0
    cluster.step()
    assert not hung.alive
    cluster.run_to_end(cluster.launch)
    cluster.check_exactly_once([40])


def test_scaling_up_and_down(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(num_units=80)
    for number, servers in enumerate((3, 1, 2), 1):
        coordinator = cluster.until(has_units(15 * number), cluster.launch)
        ask(coordinator, "scale", servers=servers)
        cluster.until(has_servers(servers), cluster.launch)
    cluster.run_to_end(cluster.launch)
    cluster.check_exactly_once([80])
    assert cluster.coordinator is not None and cluster.coordinator.members.map.epoch == 4


def test_a_new_request_replaces_a_move_in_progress(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    coordinator = cluster.until(has_units(8))
    ask(coordinator, "scale", servers=3)
    cluster.step()
    ask(coordinator, "scale", servers=1)
    cluster.until(has_servers(1), cluster.launch)
    assert coordinator.members.map.epoch == 2, "the move to three servers was never begun"
    ask(coordinator, "scale", servers=4)
    cluster.step()
    ask(coordinator, "scale", servers=1)
    assert coordinator.status()["moving_to"] is None
    cluster.run_to_end(cluster.launch)
    cluster.check_exactly_once([40])
    assert coordinator.members.map.epoch == 2


@pytest.mark.parametrize("seed", range(8))
def test_any_role_may_die_while_the_servers_change(make_cluster: MakeCluster, seed: int) -> None:
    cluster = make_cluster(num_units=60)
    chance = seeded(seed)
    requests = [cluster.clock() + 1.0 * number for number in range(1, 8)]
    down_until = 0.0

    def disturb() -> None:
        nonlocal down_until
        coordinator = cluster.coordinator
        if coordinator is None:
            if cluster.clock() >= down_until:
                cluster.start_coordinator()
        elif requests and cluster.clock() >= requests[0] and not coordinator.is_finished:
            requests.pop(0)
            ask(coordinator, "scale", servers=chance.randint(1, NUM_PARTITIONS), trainers=chance.randint(1, 3))
        elif requests and chance.random() < 0.03:
            cluster.kill_coordinator()
            down_until = cluster.clock() + chance.uniform(0.0, 2.0)
        if requests and chance.random() < 0.03:
            chance.choice(cluster.shards).alive = False
        if requests and chance.random() < 0.02:
            chance.choice(cluster.shards).paused_until = cluster.clock() + chance.uniform(0.5, 3.0)
        cluster.launch()

    cluster.run_to_end(disturb)
    cluster.check_exactly_once([60])


def test_a_new_coordinator_continues_the_move(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    coordinator = cluster.until(has_units(8))
    ask(coordinator, "scale", servers=4, trainers=1)
    cluster.kill_coordinator()
    coordinator = cluster.start_coordinator()
    assert coordinator.status()["wanted"] == {"servers": 4, "trainers": 1}
    assert coordinator.members.map.servers == 2
    cluster.until(has_servers(4), cluster.launch)
    cluster.run_to_end(cluster.launch)
    cluster.check_exactly_once([40])


def test_a_changed_job_overrides_the_last_request(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.until(has_units(8))
    for servers, request, expected in ((2, None, 2), (3, None, 3), (3, 1, 1), (3, None, 1), (2, None, 2)):
        cluster.kill_coordinator()
        cluster.settings = replace(cluster.settings, servers=servers)
        coordinator = cluster.start_coordinator()
        if request is not None:
            ask(coordinator, "scale", servers=request)
        assert coordinator.wanted.servers == expected
    cluster.until(has_servers(2), cluster.launch)
    cluster.run_to_end(cluster.launch)
    cluster.check_exactly_once([40])


def test_a_move_without_a_checkpoint_is_given_up(make_cluster: MakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    cluster = make_cluster()
    coordinator = cluster.until(has_units(8))
    failed = {"state": "failed", "error": "no space left on device"}
    for shard in cluster.shards:
        shard._write = lambda command, shard=shard: setattr(  # type: ignore[method-assign, misc]
            shard, "snapshot", {"checkpoint": command["checkpoint"], "incarnation": shard.incarnation, **failed}
        )
    ask(coordinator, "scale", servers=3)
    cluster.until(lambda coordinator: coordinator.wanted.servers == 2, cluster.launch, limit_s=10)
    assert "servers: not scaled from 2 to 3: the checkpoint could not be written" in caplog.messages
    cluster.until(has_units(20), cluster.launch)


@pytest.mark.parametrize(
    ("numbers", "error"),
    [
        ({}, "scale: expected a number of servers or of trainers, got neither"),
        ({"servers": 0}, "servers: expected 1 to 5, the number of partitions, got 0"),
        ({"servers": 6}, "servers: expected 1 to 5, the number of partitions, got 6"),
        ({"trainers": 0}, "trainers: expected 1 to 65536, got 0"),
        ({"servers": 1, "trainers": -1}, "trainers: expected 1 to 65536, got -1"),
    ],
)
def test_impossible_numbers_are_refused(make_cluster: MakeCluster, numbers: dict[str, int], error: str) -> None:
    cluster = make_cluster()
    assert cluster.coordinator is not None
    before = (cluster.run.path / "coordinator/journal.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=error):
        ask(cluster.coordinator, "scale", **numbers)
    assert (cluster.run.path / "coordinator/journal.jsonl").read_bytes() == before


def test_a_finished_run_is_not_scaled(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(num_units=4)
    cluster.run_to_end()
    assert cluster.coordinator is not None
    with pytest.raises(ConfigError, match="scale: the run is finished, expected it to be running"):
        ask(cluster.coordinator, "scale", servers=1)


def test_rate() -> None:
    rate = Rate(window_s=5.0)
    assert rate.per_s(0.0) == 0.0
    for second in range(20):
        rate.add(float(second), 100 * second)
    rate.add(19.5, "many")
    assert rate.per_s(19.0) == 100.0
    assert rate.per_s(30.0) == 0.0, "no counter within the window"
    rate.add(31.0, 5)
    assert rate.per_s(31.0) == 0.0, "a new process counts from zero"
