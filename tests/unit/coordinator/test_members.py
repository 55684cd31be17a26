"""Members: two shards never apply to the same partition, and no process is registered twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrec.coordinator.members import Delay, Member, Members, PartitionMap, Timing
from elasticrec.errors import ConfigError
from elasticrec.journal import Entry
from elasticrec.net.messages import FencedError
from support.fake_roles import Clock

TIMING = Timing(lease_s=3.0, margin_s=0.5, forget_s=60.0)


class Setup:
    def __init__(self, servers: int = 2) -> None:
        self.clock, self.journal = Clock(), list[Entry]()
        self.members = Members(TIMING, self.clock, self.journal.append)
        self.members.set_map(servers, 8)

    def restored(self) -> Members:
        """Return the members that a new coordinator reads from the journal."""
        members = Members(TIMING, self.clock, self.journal.append)
        for entry in list(self.journal):
            members.replay(entry)
        return members

    def shard(self, nonce: str, index: int | None = None) -> Member:
        member = self.members.register("ps", nonce, index)
        assert isinstance(member, Member)
        return member


@given(partitions=st.integers(1, 300), data=st.data())
def test_every_partition_has_one_shard(partitions: int, data: st.DataObject) -> None:
    servers = data.draw(st.integers(1, partitions))
    found = PartitionMap(partitions, servers)
    assert [one for index in range(servers) for one in found.owned(index)] == list(range(partitions))
    assert all(len(found.owned(index)) for index in range(servers))


@pytest.mark.parametrize("servers", [0, -1, 9])
def test_an_impossible_map_is_refused(servers: int) -> None:
    with pytest.raises(ConfigError, match=f"servers: expected 1 to 8, the number of partitions, got {servers}"):
        PartitionMap(8, servers)


def test_indexes_are_assigned_in_order() -> None:
    setup = Setup()
    assert [setup.shard(nonce).index for nonce in "ab"] == [0, 1]
    wait = setup.members.register("ps", "c")
    assert isinstance(wait, Delay) and "all 2 shards are taken" in wait.why
    trainers = [setup.members.register("trainer", nonce) for nonce in "ab"]
    assert [member.index for member in trainers if isinstance(member, Member)] == [0, 1]
    with pytest.raises(ConfigError, match="index: expected a shard below 2, got 2"):
        setup.members.register("ps", "d", 2)


def test_a_silent_shard_is_replaced_after_its_lease_and_the_margin() -> None:
    setup = Setup()
    first = setup.shard("a", 0)
    setup.clock.now += 2.0
    setup.members.heartbeat(first.incarnation)
    setup.clock.now += 3.4
    wait = setup.members.register("ps", "b", 0)
    assert isinstance(wait, Delay) and wait.seconds == pytest.approx(0.1)
    setup.clock.now += 0.1
    second = setup.shard("b", 0)
    assert (second.index, second.incarnation != first.incarnation) == (0, True)
    with pytest.raises(FencedError, match="it was replaced by another process"):
        setup.members.heartbeat(first.incarnation)
    with pytest.raises(FencedError, match="it never registered"):
        setup.members.heartbeat(12345)


def test_a_silent_shard_that_was_not_replaced_continues() -> None:
    setup = Setup()
    shard = setup.shard("a")
    setup.clock.now += 100
    assert not setup.members.is_alive(shard)
    assert setup.members.heartbeat(shard.incarnation) is shard
    assert setup.members.is_alive(shard)


def test_a_repeated_registration_gets_the_same_index() -> None:
    setup = Setup()
    first = setup.shard("a")
    assert setup.shard("a") is first
    assert len([entry for entry in setup.journal if entry["kind"] == "member"]) == 1
    assert setup.restored().register("ps", "a") == Member(
        "ps", 0, first.incarnation, "a", until=setup.clock() + 3.5, is_heard=True
    )


def test_changes_are_journaled_before_they_take_effect() -> None:
    def fail(entry: Entry) -> None:
        if entry["kind"] == "member":
            raise OSError("full")

    members = Members(TIMING, Clock(), fail)
    members.set_map(2, 8)
    with pytest.raises(OSError, match="full"):
        members.register("ps", "a")
    assert members.shard(0) is None


def test_incarnations_are_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([7, 7, 0, 7, 8, 7, 8, 9])
    monkeypatch.setattr("elasticrec.coordinator.members.secrets.randbits", lambda bits: next(drawn))
    setup = Setup()
    assert [setup.shard(nonce).incarnation for nonce in "ab"] == [7, 8]
    setup.clock.now += 10
    members = setup.restored()
    setup.clock.now += 10
    third = members.register("ps", "c")
    assert isinstance(third, Member) and third.incarnation == 9


def test_a_new_coordinator_waits_for_leases_of_earlier_members() -> None:
    setup = Setup()
    shard = setup.shard("a", 0)
    trainer = setup.members.register("trainer", "t")
    assert isinstance(trainer, Member)
    # The previous coordinator may have heard from them a moment ago.
    setup.clock.now += 50
    members = setup.restored()
    assert [member.name for member in members.unheard()] == ["shard 0", "trainer 0"]
    assert isinstance(members.register("ps", "b", 0), Delay)
    assert members.heartbeat(shard.incarnation).index == 0
    setup.clock.now += 3.4
    assert [member.name for member in members.unheard()] == ["trainer 0"]
    setup.clock.now += 0.2
    assert members.unheard() == []


def test_a_member_that_left_is_removed() -> None:
    setup = Setup()
    shard, trainer = setup.shard("a", 0), setup.members.register("trainer", "t")
    assert isinstance(trainer, Member)
    setup.members.leave(shard.incarnation)
    setup.members.leave(shard.incarnation)
    assert setup.shard("b", 0).index == 0
    setup.clock.now += 63.4
    assert setup.members.forget() == []
    setup.clock.now += 0.2
    assert setup.members.forget() == [trainer]
    assert [member.name for member in setup.restored().unheard()] == ["shard 0"]


def test_a_new_map_waits_for_leases_of_the_old_one() -> None:
    setup = Setup()
    old = setup.shard("a", 0)
    setup.shard("b", 1)
    setup.members.set_map(4)
    assert setup.members.map == PartitionMap(8, 4, epoch=2)
    with pytest.raises(FencedError):
        setup.members.heartbeat(old.incarnation)
    for members in (setup.members, setup.restored()):
        assert isinstance(members.register("ps", "c", 3), Delay), "old shards may still apply"
    setup.members.leave(old.incarnation)
    assert isinstance(setup.members.register("ps", "c", 3), Delay)
    setup.clock.now += 3.5
    assert setup.shard("c", 3).index == 3
    assert setup.restored().map.epoch == 2
