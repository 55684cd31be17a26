"""Batches in flight, and the stream of units that they come from: the order of pulls, pushes and leases."""

from collections.abc import Iterator
from typing import Any

import pytest

from elasticrec.config.train import ParameterServers
from elasticrec.training.clock import StageClock
from elasticrec.training.groups import UnitBatch
from elasticrec.training.lanes import Lanes
from elasticrec.training.unit_stream import UnitSource, UnitStream


class Batch:
    """The attributes of a batch that lanes use."""

    def __init__(self, unit: int, index: int) -> None:
        self.unit, self.index = unit, index


class FakeServers:
    """Fake servers and a fake trainer that record events."""

    def __init__(self, **settings: Any) -> None:
        self.settings = ParameterServers(**settings)
        self.events: list[str] = []

    def pull(self, batch: Any, *, dense: bool) -> Any:
        self.events.append(f"pull {batch.index}{' dense' if dense else ''}")
        return batch

    def wait_for_ack(self, pushing: Any) -> tuple[bool, bool]:
        self.events.append(f"acknowledged {pushing.index}")
        return False, False

    def fly(self, batches: Iterator[UnitBatch]) -> list[str]:
        def step(named: UnitBatch, pulling: Any) -> Any:
            assert pulling is named.batch
            self.events.append(f"step {named.batch.index}")
            return pulling

        def done(unit: int) -> None:
            self.events.append(f"done {unit}")

        lanes = Lanes(self, [step], done, self.settings, StageClock())
        lanes.run(batches)
        assert lanes.most_in_flight <= (self.settings.max_in_flight or 3)
        return self.events


def unit_of(unit: int, count: int) -> Iterator[UnitBatch]:
    for index in range(count):
        yield UnitBatch(Batch(unit, index), is_last=index == count - 1)  # type: ignore[arg-type]


def test_one_batch_in_flight_is_never_stale() -> None:
    one, two = (
        ["pull 0 dense", "step 0", "acknowledged 0"],
        ["pull 1 dense", "step 1", "acknowledged 1", "done 7"],
    )
    assert FakeServers(max_in_flight=1).fly(unit_of(7, 2)) == [*one, *two]


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
def test_dense_values_are_pulled_every_sends_before_receive_pushes(settings: dict[str, int], dense: list[int]) -> None:
    events = FakeServers(**settings).fly(unit_of(0, 5))
    assert [text for text in events if text.endswith("dense")] == [f"pull {index} dense" for index in dense]


def test_a_unit_is_done_when_its_last_push_is_acknowledged() -> None:
    def both() -> Iterator[UnitBatch]:
        yield from unit_of(1, 2)
        yield from unit_of(2, 3)

    events = FakeServers().fly(both())
    assert [text for text in events if text.startswith("done")] == ["done 1", "done 2"]
    assert events[events.index("done 1") - 1] == "acknowledged 1"
    assert events.count("pull 0 dense") + events.count("pull 0") == 2
    # the first batch of the second unit did not wait for the end of the first unit
    assert events.index("done 1") > len(events) - 1 - events[::-1].index("pull 0 dense")


class Reader:
    """A reader of the batches of a unit; `opened` lists the units with an open reader."""

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
    """Returns the batch of a unit without records."""

    def empty(self, unit: int) -> Any:
        return Batch(unit, 0)


class Leases:
    """Leases units 3, 1 and 0, then none; the id of a unit is also its number of batches."""

    def __init__(self, **skip: list[int]) -> None:
        self.left = [self.answer(1), self.answer(0)]
        self.first = self.answer(3, **skip)
        self.opened: list[int] = []
        self.num_leases = 0
        self.stream = UnitStream(
            UnitSource(self.lease, lambda unit: Reader(unit.id, self.opened), lambda _, reader: iter(reader), Parser()),  # type: ignore[arg-type]
            self.first,
        )

    def answer(self, unit: int, skip: list[int] | None = None) -> dict[str, Any]:
        fields = {"path": "f", "start": 0, "end": 1, "epoch": unit + 10, "size": 1, "modified_ns": 1, "cut": ""}
        return {"unit": {"id": unit, **fields}, "skip": skip or []}

    def lease(self) -> dict[str, Any] | None:
        self.num_leases += 1
        return self.left.pop(0) if self.left else None


def test_the_next_unit_is_read_before_the_last_batch_is_trained() -> None:
    leases = Leases()
    batches = leases.stream.run()
    seen = [(one.batch.unit, one.batch.index, one.is_last) for one in (next(batches), next(batches))]
    assert (seen, leases.num_leases, leases.opened) == ([(3, 0, False), (3, 1, False)], 0, [3])
    assert next(batches).is_last
    assert (leases.num_leases, leases.opened) == (1, [3, 1])
    rest = [(one.batch.unit, one.batch.index, one.is_last, leases.stream.seen_of(one.batch)) for one in batches]
    # a unit without records has one batch without samples
    assert rest == [(1, 0, True, 11), (0, 0, True, 10)]
    assert (leases.num_leases, leases.opened) == (3, [])


def test_applied_batches_are_skipped_and_the_next_unit_follows() -> None:
    leases = Leases(skip=[0, 2])
    assert [(one.batch.unit, one.batch.index) for one in leases.stream.run()] == [(3, 1), (1, 0), (0, 0)]


def test_closing_the_stream_closes_its_readers() -> None:
    leases = Leases()
    batches = leases.stream.run()
    for _ in range(3):
        next(batches)
    assert leases.opened == [3, 1]
    batches.close()
    assert leases.opened == []
