"""Leases: complete units, the order of units, and the reasons to wait."""

from typing import Any

import pytest

from elasticrec.coordinator.members import PartitionMap
from elasticrec.coordinator.work import Grant, NoWork, Work, WorkTiming
from elasticrec.errors import ModelError
from elasticrec.net.messages import OpenUnit, Record, Records
from support.fake_roles import Clock


def record(watermark: int = 0, complete: tuple[int, ...] = (), boundaries: int = 0, **opened: list[int]) -> Record:
    """Return a record; `u5=[0, 2]` stands for batches 0 and 2 of unit 5."""
    units = {int(unit[1:]): OpenUnit(batches=dict.fromkeys(batches, 7)) for unit, batches in opened.items()}
    return Record(watermark=watermark, complete=frozenset(complete), open=units, boundaries=boundaries)


class Setup:
    """Two shards with two partitions each, units in passes of ten."""

    def __init__(self, num_passes: int = 1) -> None:
        self.clock = Clock()
        timing = WorkTiming(lease_s=3.0, settle_s=2.0)
        self.work = Work(PartitionMap(num_partitions=4, servers=2), num_passes, timing, self.clock)
        self.work.add_pass(10)
        for index in range(2):
            self.start(index, incarnation=index + 1)

    def start(self, index: int, incarnation: int) -> None:
        self.work.start_shard(index, incarnation)
        self.work.set_is_up(index, True)

    def report(self, first: Any = None, second: Any = None) -> "Setup":
        """Report for both shards: one record for all partitions of a shard, or one for each."""
        for index, given in enumerate((first, second)):
            if given is not None:
                a, b = given if isinstance(given, tuple) else (given, given)
                self.work.report(index, self.records(index, a, b))
        return self

    @staticmethod
    def records(index: int, a: Record, b: Record) -> Records:
        return (((2 * index,), a), ((2 * index + 1,), b))

    def lease(self, trainer: int = 1, holds: tuple[int, ...] | None = None) -> int | None:
        held = tuple(unit for unit, holder in self.work.leases().items() if holder == trainer)
        found = self.work.lease(trainer, held if holds is None else holds)
        return found.unit if isinstance(found, Grant) else None

    def grant(self, trainer: int = 1) -> Grant:
        found = self.work.lease(trainer)
        assert isinstance(found, Grant)
        return found


def ready() -> Setup:
    return Setup().report(record(), record())


def test_no_unit_before_all_shards_have_reported() -> None:
    setup = Setup()
    assert setup.lease() is None
    setup.report(record())
    assert setup.lease() is None
    assert setup.report(None, record()).lease() == 0


def test_no_unit_while_a_shard_is_down() -> None:
    setup = ready()
    setup.work.set_is_up(1, False)
    assert setup.work.lease(1) == NoWork("shard 1 is down")
    setup.work.set_is_up(1, True)
    assert setup.lease() == 0


def test_units_are_leased_in_order_to_one_trainer_each() -> None:
    setup = ready()
    assert [setup.lease(trainer) for trainer in (1, 2, 3)] == [0, 1, 2]


def test_a_unit_is_not_complete_when_only_its_trainer_reports_it() -> None:
    setup = ready()
    assert setup.lease() == 0
    assert setup.work.done(1, 0)
    assert setup.work.figures()["settling"] == 1
    # The unit is neither leased again nor counted while the shards have time to report it.
    assert setup.lease(2) == 1
    assert setup.work.figures()["complete"] == 0
    setup.clock.now += 1.9
    assert setup.lease(3) == 2
    setup.clock.now += 0.2
    assert setup.lease(4) == 0, "the shards did not report it in time"
    assert setup.work.counters.unsettled == 1


def test_a_unit_is_complete_when_every_partition_has_it() -> None:
    setup = ready()
    setup.lease()
    setup.work.done(1, 0)
    setup.report(record(1), (record(1), record(0, u0=[0])))
    assert setup.work.figures()["complete"] == 0
    setup.report(None, record(1))
    assert setup.work.figures()["complete"] == 1 and setup.work.figures()["settling"] == 0
    setup.clock.now += 100
    assert setup.lease(2) == 1


def test_a_unit_that_is_given_back_comes_first() -> None:
    setup = ready()
    assert [setup.lease(trainer) for trainer in (1, 2, 3)] == [0, 1, 2]
    assert not setup.work.give_back(2, 0), "trainer 2 does not hold unit 0"
    assert setup.work.give_back(1, 0)
    assert [setup.lease(trainer) for trainer in (4, 5)] == [0, 3]


def test_a_lease_expires() -> None:
    setup = ready()
    assert [setup.lease(trainer) for trainer in (1, 2)] == [0, 1]
    setup.clock.now += 2.9
    assert setup.work.renew(2, [1]) == []
    setup.clock.now += 0.2
    assert setup.lease(3) == 0
    assert setup.work.counters.lapsed == 1
    # Trainer 1 wakes up, but trainer 3 holds its unit now.
    assert setup.work.renew(1, [0]) == [0]
    assert not setup.work.done(1, 0)
    assert setup.work.leases() == {0: 3, 1: 2}


def test_the_units_of_a_lost_trainer_are_free() -> None:
    setup = ready()
    assert [setup.lease(trainer) for trainer in (1, 2)] == [0, 1]
    setup.work.drop_trainer(1)
    assert setup.lease(3) == 0


def test_a_lost_response_is_sent_again() -> None:
    setup = ready()
    assert setup.lease(1, holds=()) == 0
    assert setup.lease(1, holds=()) == 0
    assert setup.lease(1, holds=(0,)) == 1
    assert setup.work.counters.given == 2


def test_batches_that_all_partitions_have_are_skipped() -> None:
    setup = ready()
    setup.grant()
    setup.work.give_back(1, 0)
    setup.report((record(u0=[0, 1, 3]), record(u0=[0, 3])), (record(1), record(u0=[0, 2, 3])))
    assert setup.grant().skip == (0, 3)
    setup.report(None, (record(1), record()))
    setup.work.give_back(1, 0)
    assert setup.grant().skip == (), "a partition has no batch of it"


def test_units_that_a_restored_shard_lacks_come_first() -> None:
    setup = ready()
    assert [setup.lease(trainer) for trainer in (1, 2)] == [0, 1]
    setup.report(record(2), record(2))
    assert [setup.lease(trainer) for trainer in (3, 4, 5)] == [2, 3, 4]
    setup.report(record(3, (4,)), record(3, (4,)))
    for trainer, unit in ((1, 0), (2, 1), (3, 2), (5, 4)):
        setup.work.done(trainer, unit)
    # Shard 1 is restored with unit 0 only; unit 3 is still being pushed.
    setup.start(1, incarnation=99)
    assert setup.lease(6) is None, "its records are not known"
    setup.report(None, record(1))
    assert setup.work.figures()["behind"] == 4
    assert [setup.lease(trainer) for trainer in (6, 7, 8)] == [1, 2, 4], "the missing units, in order"
    assert setup.lease(9) is None, "new units wait while others replay"
    for trainer, unit in ((4, 3), (6, 1), (7, 2)):
        setup.work.done(trainer, unit)
    setup.report(record(5), record(4))
    assert setup.lease(9) is None, "unit 4 is still being replayed"
    setup.report(None, record(5))
    assert setup.lease(9) == 5


def test_leases_continue_when_a_shard_is_restored() -> None:
    setup = ready()
    assert setup.lease(1) == 0
    setup.start(1, incarnation=99)
    setup.report(None, record())
    assert setup.work.leases() == {0: 1}
    assert setup.work.renew(1, [0]) == []


def test_old_records_of_a_shard_are_forgotten() -> None:
    setup = ready()
    setup.report(record(10, boundaries=1), record(10, boundaries=1))
    assert setup.work.is_finished()
    setup.start(0, incarnation=99)
    assert not setup.work.is_finished() and not setup.work.is_pass_complete()
    # When the same process registers again, its records stay.
    setup.report(record(10, boundaries=1))
    setup.start(0, incarnation=99)
    assert setup.work.is_finished()


def test_passes_and_their_boundaries() -> None:
    setup = Setup(num_passes=2).report(record(10, boundaries=1), record(10))
    assert not setup.work.is_pass_complete(), "a boundary is not applied"
    setup.report(None, (record(10, boundaries=1), record(9, boundaries=0)))
    assert not setup.work.is_pass_complete(), "a partition lacks a unit"
    setup.report(None, record(10, boundaries=1))
    assert setup.work.is_pass_complete() and not setup.work.is_finished()
    assert setup.lease() is None
    setup.work.add_pass(20)
    assert setup.lease() == 10
    setup.report(record(20, boundaries=2), record(20, boundaries=2))
    assert setup.work.lease(1, (10,)) == NoWork("all units are complete")


def test_units_after_a_boundary_wait_for_it() -> None:
    """A trainer with such a unit could only wait, and the units before the boundary might have no trainer."""
    setup = Setup(num_passes=2)
    setup.work.add_pass(20)
    setup.report(record(12, boundaries=1), record(8))
    assert [setup.lease(trainer) for trainer in (1, 2, 3)] == [8, 9, None]
    setup.report(None, record(10))
    assert setup.lease(3) is None, "the units are complete, but the boundary is not applied"
    setup.report(None, record(10, boundaries=1))
    assert setup.lease(3) == 10


def test_a_new_coordinator_learns_leased_units_from_the_shards() -> None:
    setup = Setup().report(record(2, (4,)), record(2, u5=[0]))
    assert setup.work.renew(7, [3]) == []
    assert setup.work.figures()["leased_ever"] == 6
    assert [setup.lease(trainer) for trainer in (1, 2, 3)] == [2, 4, 5]
    assert setup.lease(4) is None
    assert setup.work.renew(9, [11]) == [11], "unit 11 is not planned"


def test_reports_are_requested_while_trainers_wait() -> None:
    setup = ready()
    assert setup.lease(1) == 0
    setup.work.done(1, 0)
    assert not setup.work.wants_report(), "there are other units"
    for trainer in range(2, 11):
        assert setup.lease(trainer) == trainer - 1
    assert setup.work.wants_report()


@pytest.mark.parametrize("partitions", [(0,), (0, 1, 2), (0, 0, 1), ()])
def test_reports_must_have_each_partition_once(partitions: tuple[int, ...]) -> None:
    setup = ready()
    with pytest.raises(ModelError, match="shard 0: records: expected each partition of 0 to 1 once"):
        setup.work.report(0, ((partitions, record(3)),))
    assert setup.work.figures()["complete"] == 0


def test_reports_of_another_run_are_refused() -> None:
    with pytest.raises(ModelError, match="shard 0: records: expected units below 10, got unit 11"):
        Setup().report(record(3, (11,)))


def test_a_unit_without_data_is_not_leased() -> None:
    setup = ready()
    assert (setup.lease(1), setup.lease(2)) == (0, 1)
    setup.report(record(u1=[0, 1]), record())
    assert setup.work.num_applied(1) == 2
    setup.work.skip(1)
    assert setup.lease(2) == 2, "the unit is not leased, although the shards have not skipped it yet"
    assert setup.work.renew(2, [1, 2]) == [1], "its trainer drops it"
    setup.clock.now += 10
    assert [setup.lease(1), setup.lease(1), setup.lease(1)] == [0, 2, 3]
    # A new coordinator reads skipped units from the journal, before the shards report them.
    later = ready()
    later.work.skip(0)
    assert later.lease() is None, "new units wait until the shards have skipped it"
    later.report(record(1), record(1))
    assert later.lease() == 1
