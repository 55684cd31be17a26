"""The rule of a rollout, case by case."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrec.publish.rollout.decide import Decision, Replica, RolloutState, decide, num_required


def store(*shards: list[tuple[int, ...]]) -> tuple[tuple[Replica, ...], ...]:
    """Return shards of replicas that hold these versions."""
    return tuple(
        tuple(Replica(shard, f"host{shard}:{number}", versions) for number, versions in enumerate(replicas))
        for shard, replicas in enumerate(shards)
    )


@pytest.mark.parametrize(
    ("replicas", "wanted", "expected"), [(1, None, 1), (2, None, 1), (3, None, 2), (3, 3, 3), (2, 3, 2), (3, 1, 1)]
)
def test_all_but_one_replica_and_at_least_one_must_hold_a_version(
    replicas: int, wanted: int | None, expected: int
) -> None:
    assert num_required(replicas, wanted) == expected


def test_a_version_is_offered_once_every_shard_has_enough_replicas_with_it() -> None:
    first = RolloutState(store([(1,), (1, 2)], [(1,), (1,)]), current=1, offerable=(1, 2))
    waits = decide(first)
    assert (waits.target, waits.offer) == (2, None)
    assert waits.text == "loading 2: 1 of 4 replicas have it"
    goes = decide(RolloutState(store([(1,), (1, 2)], [(1, 2), (1,)]), current=1, offerable=(1, 2)))
    assert (goes.target, goes.offer) == (2, 2)
    assert goes.text == "switched to 2, 2 of 4 replicas are behind"
    assert goes.late == ("shard 0 host0:0: has 1", "shard 1 host1:1: has 1")
    all_required = decide(RolloutState(store([(1,), (1, 2)], [(1, 2), (1,)]), current=1, offerable=(1, 2)), min_ready=2)
    assert all_required.offer is None


def test_waiting_versions_are_superseded() -> None:
    """Offer the newest version that all replicas have, while a newer one is loading; skip older versions."""
    state = RolloutState(store([(1, 2, 3)], [(1, 2, 3, 4)]), current=1, offerable=(1, 2, 3, 4))
    decision = decide(state)
    assert (decision.target, decision.offer) == (4, 3)
    assert decision.text == "switched to 3, loading 4: 1 of 2"


def test_a_replica_that_never_loads_is_named_and_does_not_block() -> None:
    broken = Replica(0, "host0:1", (1,), failed=2, why="cube/part-00000: sha-256 differs")
    state = RolloutState(((Replica(0, "host0:0", (1, 2)), broken),), current=1, offerable=(1, 2))
    assert decide(state).offer == 2
    assert decide(state).late == ("shard 0 host0:1: cannot load 2: cube/part-00000: sha-256 differs",)
    gone = Replica(0, "host0:1", is_there=False, why="connection refused")
    assert decide(RolloutState(((gone,),), 1, (1, 2))).late == ("shard 0 host0:1: connection refused",)
    assert decide(RolloutState(((gone,),), 1, (1, 2))).offer is None


def test_a_patient_rollout_waits_for_loading_replicas() -> None:
    """If the only replica with the version died, no replica would have it."""
    has, loading = Replica(0, "host0:0", (1, 2)), Replica(0, "host0:1", (1,), loading=2)

    def offer(other: Replica, current: int | None = 1) -> int | None:
        return decide(RolloutState(((has, other),), current, (1, 2)), is_patient=True).offer

    assert offer(loading) is None
    assert (
        decide(RolloutState(((has, loading),), 1, (1, 2)), is_patient=True).text == "loading 2: 1 of 2 replicas have it"
    )
    assert offer(Replica(0, "host0:1", (1, 2))) == 2
    # these replicas get no traffic anyway, or will not have the version
    assert offer(Replica(0, "host0:1", is_there=False)) == 2
    assert offer(Replica(0, "host0:1", (1,), failed=2, why="damaged")) == 2
    assert offer(Replica(0, "host0:1", ())) == 2
    # before the first offer all live replicas will get traffic
    assert offer(Replica(0, "host0:1", ()), current=None) is None
    # a version that both replicas have is offered first
    assert decide(RolloutState(((Replica(0, "a", (1, 2, 3)), has),), 1, (1, 2, 3)), is_patient=True).offer == 2


def test_a_rollback_holds() -> None:
    """A newer version is neither loaded nor offered; the wanted version is offered when it is loaded."""
    everywhere = store([(6, 7, 8)], [(6, 7, 8)])
    to_loaded = decide(RolloutState(everywhere, current=8, offerable=(6, 7, 8, 9), is_held=True, wanted=6))
    assert (to_loaded.target, to_loaded.offer) == (6, 6)
    there = decide(RolloutState(everywhere, current=6, offerable=(6, 7, 8, 9), is_held=True))
    assert (there.target, there.offer) == (6, None)
    assert there.text == "version 6 is current, held by a rollback: 2 of 2 replicas have it"
    to_older = decide(RolloutState(everywhere, current=8, offerable=(3, 8, 9), is_held=True, wanted=3))
    assert (to_older.target, to_older.offer) == (3, None)
    assert to_older.text == "loading 3: 0 of 2 replicas have it, held by a rollback"
    resumed = decide(RolloutState(store([(6, 9)]), current=6, offerable=(6, 7, 8, 9)))
    assert (resumed.target, resumed.offer) == (9, 9)


def test_a_version_that_the_gate_refused_is_never_offered() -> None:
    state = RolloutState(store([(1, 2)]), current=1, offerable=(1,))
    assert decide(state) == Decision(1, None, "version 1 is current: 1 of 1 replicas have it", ())
    # the gate was tightened after the offer
    assert decide(RolloutState(store([(1, 2)]), current=2, offerable=(1,))).target == 2


def test_without_a_version_it_waits() -> None:
    assert decide(RolloutState(store([()]), None, ())) == Decision(None, None, "waiting for the first version", ())
    first = decide(RolloutState(store([()]), None, (1,)))
    assert (first.target, first.offer) == (1, None)
    assert first.late == ("shard 0 host0:0: has nothing",)


@given(
    st.lists(st.lists(st.sets(st.integers(1, 6)), min_size=1, max_size=3), min_size=1, max_size=3),
    st.sets(st.integers(1, 6)),
    st.one_of(st.none(), st.integers(1, 6)),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 3)),
)
def test_an_offered_version_is_on_all_shards_and_never_reverts(
    held: list[list[set[int]]], offerable: set[int], current: int | None, is_held: bool, min_ready: int | None
) -> None:
    shards = store(*[[tuple(sorted(replica)) for replica in shard] for shard in held])
    state = RolloutState(shards, current, tuple(sorted(offerable)), is_held and current is not None)
    offer = decide(state, min_ready).offer
    if offer is not None:
        assert not state.is_held, "a held rollback without a wanted version offers nothing"
        assert offer in offerable and offer > (current or 0)
        for shard in held:
            assert sum(offer in replica for replica in shard) >= num_required(len(shard), min_ready)
