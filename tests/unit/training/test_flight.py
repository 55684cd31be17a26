"""Batches in flight, and the stream of units that they come from: what is asked for, when, and what is told of it."""

from collections.abc import Iterator
from typing import Any

import pytest

from elasticrec.config.train import ParameterServers
from elasticrec.training.clock import StageClock
from elasticrec.training.groups import UnitBatch
from elasticrec.training.lanes import Lanes
from elasticrec.training.unit_stream import UnitSource, UnitStream


class Batch:
    """What a flight looks at."""

    def __init__(self, unit: int, index: int) -> None:
        self.unit, self.index = unit, index


class World:
    """Servers and a trainer that only write down what happens."""

    def __init__(self, **settings: Any) -> None:
        self.settings = ParameterServers(**settings)
        self.happened: list[str] = []

    def pull(self, batch: Any, *, dense: bool) -> Any:
        self.happened.append(f"pull {batch.index}{' dense' if dense else ''}")
        return batch

    def wait_for_ack(self, pushing: Any) -> tuple[bool, bool]:
        self.happened.append(f"acknowledged {pushing.index}")
        return False, False

    def fly(self, batches: Iterator[UnitBatch]) -> list[str]:
        def step(named: UnitBatch, pulling: Any) -> Any:
            assert pulling is named.batch
            self.happened.append(f"step {named.batch.index}")
            return pulling

        def done(unit: int) -> None:
            self.happened.append(f"done {unit}")

        lanes = Lanes(self, [step], done, self.settings, StageClock())
        lanes.run(batches)
        assert lanes.most <= (self.settings.max_in_flight or 3)
        return self.happened


def unit_of(unit: int, count: int) -> Iterator[UnitBatch]:
    for index in range(count):
        yield UnitBatch(Batch(unit, index), is_last=index == count - 1)  # type: ignore[arg-type]


def test_one_batch_in_flight_is_never_stale() -> None:
    one, two = (
        ["pull 0 dense", "step 0", "acknowledged 0"],
        ["pull 1 dense", "step 1", "acknowledged 1", "done 7"],
    )
    assert World(max_in_flight=1).fly(unit_of(7, 2)) == [*one, *two]


@pytest.mark.parametrize(
    ("settings", "dense"),
    [
        ({}, [0, 2, 4]),
        ({"max_in_flight": 2}, [0, 2, 4]),
        ({"max_in_flight": 1}, [0, 1, 2, 3, 4]),
        ({"sends_before_receive": 1}, [0, 1, 2, 3, 4]),
        ({"sends_before_receive": 3}, [0, 3]),
        ({"sends_before_receive": 3, "max_in_flight": 1}, [0, 3]),
    ],
)
def test_dense_values_are_asked_for_after_so_many_pushes(settings: dict[str, int], dense: list[int]) -> None:
    happened = World(**settings).fly(unit_of(0, 5))
    assert [text for text in happened if text.endswith("dense")] == [f"pull {index} dense" for index in dense]


def test_a_unit_is_done_when_its_last_push_is_acknowledged_and_the_next_is_under_way() -> None:
    def both() -> Iterator[UnitBatch]:
        yield from unit_of(1, 2)
        yield from unit_of(2, 3)

    happened = World().fly(both())
    assert [text for text in happened if text.startswith("done")] == ["done 1", "done 2"]
    assert happened[happened.index("done 1") - 1] == "acknowledged 1"
    assert happened.count("pull 0 dense") + happened.count("pull 0") == 2
    # the second unit's first batch did not wait for the end of the first unit
    assert happened.index("done 1") > len(happened) - 1 - happened[::-1].index("pull 0 dense")


class Reader:
    """The batches of a unit; `opened` has those that are open."""

    opened: list[int]

    def __init__(self, unit: int, opened: list[int]) -> None:
        self._unit, self.opened = unit, opened
        opened.append(unit)
        self._batches = iter([Batch(unit, index) for index in range(unit)])

    def __iter__(self) -> Any:
        return self._batches

    def close(self) -> None:
        self.opened.remove(self._unit)


class Parser:
    """Of a unit without a record."""

    def empty(self, unit: int) -> Any:
        return Batch(unit, 0)


class Leases:
    """Units 3, 1, 0 and no more; a unit's number is that of its batches."""

    def __init__(self, **skip: list[int]) -> None:
        self.left = [self.answer(1), self.answer(0)]
        self.first = self.answer(3, **skip)
        self.opened: list[int] = []
        self.asked = 0
        self.stream = UnitStream(
            UnitSource(self.lease, lambda unit: Reader(unit.id, self.opened), lambda _, reader: iter(reader), Parser()),  # type: ignore[arg-type]
            self.first,
        )

    def answer(self, unit: int, skip: list[int] | None = None) -> dict[str, Any]:
        place = {"path": "f", "start": 0, "end": 1, "epoch": unit + 10, "size": 1, "modified_ns": 1, "cut": ""}
        return {"unit": {"id": unit, **place}, "skip": skip or []}

    def lease(self) -> dict[str, Any] | None:
        self.asked += 1
        return self.left.pop(0) if self.left else None


def test_the_next_unit_is_read_before_the_last_batch_is_trained() -> None:
    leases = Leases()
    batches = leases.stream.run()
    seen = [(one.batch.unit, one.batch.index, one.is_last) for one in (next(batches), next(batches))]
    assert (seen, leases.asked, leases.opened) == ([(3, 0, False), (3, 1, False)], 0, [3])
    assert next(batches).is_last
    assert (leases.asked, leases.opened) == (1, [3, 1])
    rest = [(one.batch.unit, one.batch.index, one.is_last, leases.stream.seen_of(one.batch)) for one in batches]
    # a unit without records has one batch without samples
    assert rest == [(1, 0, True, 11), (0, 0, True, 10)]
    assert (leases.asked, leases.opened) == (3, [])


def test_applied_batches_are_skipped_and_the_next_unit_follows() -> None:
    leases = Leases(skip=[0, 2])
    assert [(one.batch.unit, one.batch.index) for one in leases.stream.run()] == [(3, 1), (1, 0), (0, 0)]


def test_readers_end_with_the_stream() -> None:
    leases = Leases()
    batches = leases.stream.run()
    for _ in range(3):
        next(batches)
    assert leases.opened == [3, 1]
    batches.close()
    assert leases.opened == []
