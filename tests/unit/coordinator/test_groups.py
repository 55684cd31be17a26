"""Groups of `sync` and meetings of `half_async` at the coordinator."""

from collections.abc import Callable

import pytest

from elasticrec.coordinator.meetings import Meetings
from elasticrec.coordinator.members import Members, PartitionMap, Timing
from elasticrec.coordinator.work import Grant, NoWork, Work, WorkTiming
from elasticrec.net.messages import OpenUnit, Record


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def report(work: Work, *shards: Record) -> None:
    for index, record in enumerate(shards):
        work.report(index, (((2 * index, 2 * index + 1), record),))


@pytest.fixture
def work() -> Work:
    """Return the work of two shards, with groups of three units and a pass of seven."""
    work = Work(PartitionMap(4, 2), 2, WorkTiming(), Clock(), group_size=3)
    work.add_pass(7)
    for index in range(2):
        work.start_shard(index, 100 + index)
        work.set_is_up(index, True)
    report(work, Record(), Record())
    return work


def units(work: Work, trainer: int, share: int | None = None) -> list[int]:
    """Lease units until there are no more for a trainer."""
    found: list[int] = []
    while isinstance(grant := work.lease(trainer, found, share), Grant):
        found.append(grant.unit)
    return found


def test_groups_end_with_their_pass(work: Work) -> None:
    work.add_pass(12)
    groups = [work.group_of(unit) for unit in range(12)]
    assert groups == [range(3)] * 3 + [range(3, 6)] * 3 + [range(6, 7)] + [range(7, 10)] * 3 + [range(10, 12)] * 2


def test_trainers_share_a_group_and_take_the_rest_when_they_wait(work: Work) -> None:
    assert units(work, 1, share=2) == [0, 1]
    assert units(work, 2, share=2) == [2]
    assert isinstance(work.lease(1, [0, 1]), NoWork)
    work.drop_trainer(2)
    assert isinstance(work.lease(1, [0, 1], share=2), NoWork), "trainer 1 has its share"
    grant = work.lease(1, [0, 1])
    assert isinstance(grant, Grant) and grant.unit == 2


def test_a_group_is_complete_on_all_shards_before_the_next_begins(work: Work) -> None:
    assert units(work, 1) == [0, 1, 2]
    assert not work.is_between_groups()
    for unit in range(3):
        work.done(1, unit)
    report(work, Record(watermark=3), Record(watermark=2))
    assert isinstance(work.lease(1), NoWork)
    assert not work.is_between_groups()
    report(work, Record(watermark=3), Record(watermark=3))
    assert work.is_between_groups()
    assert units(work, 1) == [3, 4, 5]
    assert not work.is_between_groups()


@pytest.mark.parametrize(
    "record",
    [Record(watermark=4), Record(watermark=3, complete=frozenset({4})), Record(watermark=3, open={3: OpenUnit()})],
)
def test_an_open_group_is_not_between_groups(work: Work, record: Record) -> None:
    report(work, record, record)
    assert not work.is_between_groups()


def test_new_units_of_a_group_are_leased_beside_replayed_ones(work: Work) -> None:
    """A step needs all units of its group: waiting for some of them first would never end."""
    assert isinstance(work.lease(1), Grant)
    for index in range(2):
        work.start_shard(index, 200 + index)
        work.set_is_up(index, True)
    work.drop_trainer(1)
    report(work, Record(), Record())
    assert units(work, 1) == [0, 1, 2]


def test_a_complete_unit_is_not_held_again(work: Work) -> None:
    """A heartbeat may arrive after the end of a unit that it names."""
    assert isinstance(work.lease(1), Grant)
    work.done(1, 0)
    report(work, Record(complete=frozenset({0, 1})), Record(complete=frozenset({0, 1})))
    report(work, Record(watermark=1), Record(watermark=1))
    work.renew(1, [0])
    assert work.leases() == {}


def make_members(clock: Callable[[], float], entries: list[dict[str, object]]) -> Members:
    members = Members(Timing(), clock, entries.append)
    members.set_map(3, 6)
    return members


def test_shards_return_to_a_checkpoint_together() -> None:
    clock = Clock()
    entries: list[dict[str, object]] = []
    members = make_members(clock, entries)
    first = [members.register("ps", f"first {index}", index) for index in range(3)]
    assert members.must_reload == set(), "a new run has no checkpoint to return to"
    clock.now = 100.0
    members.register("ps", "second 1", 1)
    assert members.must_reload == {0, 2}
    members.register("ps", "first 0", 0)
    assert members.must_reload == {0, 2}, "a repeated request is not a new process"
    # A new coordinator reads this from the journal.
    later = Members(Timing(), clock, lambda entry: None)
    for entry in entries:
        later.replay(entry)
    assert later.must_reload == {0, 2}
    for index in (0, 2):
        members.leave(first[index].incarnation)  # type: ignore[union-attr]
        members.register("ps", f"second {index}", index)
    assert members.must_reload == set()
    clock.now = 200.0
    members.register("ps", "third 0", 0)
    assert members.must_reload == {1, 2}
    members.set_map(2)
    assert members.must_reload == set()


def test_trainers_meet() -> None:
    meetings = Meetings()
    one, two = meetings.join(1, {1}), meetings.join(2, {1, 2})
    assert (one, two) == (0, 0)
    assert not meetings.arrive(1, 1, {1, 2})
    assert not meetings.arrive(1, 1, {1, 2}), "trainer 2 has not arrived"
    assert meetings.arrive(2, 1, {1, 2})
    assert meetings.arrive(1, 1, {1, 2})
    assert (meetings.figures.attended, meetings.figures.most_ahead) == (2, 1)


def test_trainers_without_a_unit_delay_no_meeting() -> None:
    meetings = Meetings()
    meetings.join(1, {1})
    meetings.join(2, {1, 2})
    assert not meetings.arrive(1, 1, {1, 2})
    # The lease of the other trainer expired.
    assert meetings.arrive(1, 1, {1})
    for number in range(2, 10):
        assert meetings.arrive(1, number, {1})
    # It rejoins at the meeting that the first trainer has reached.
    assert meetings.join(2, {1, 2}) == 9
    assert meetings.join(3, {1, 2, 3}) == 9
    assert not meetings.arrive(2, 10, {1, 2, 3})
    meetings.forget(3)
    assert not meetings.arrive(2, 10, {1, 2})
    assert meetings.arrive(1, 10, {1, 2})
    assert meetings.figures.most_ahead == 1


def test_a_new_coordinator_restores_the_meetings() -> None:
    meetings = Meetings()
    meetings.restore(1, 56)
    meetings.restore(2, 57)
    meetings.restore(2, 3)
    assert not meetings.arrive(2, 57, {1, 2}), "trainer 1 is behind"
    assert meetings.join(3, {1, 2, 3}) == 56
    assert not meetings.arrive(1, 57, {1, 2, 3})
    assert meetings.arrive(3, 57, {1, 2, 3}) and meetings.arrive(2, 57, {1, 2, 3})
    assert meetings.figures.most_ahead == 1
