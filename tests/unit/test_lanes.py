"""Lanes: flights side by side over one stream, its ends and its errors."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticrec.config import Job, parse_job
from elasticrec.config.train import ParameterServers
from elasticrec.errors import ConfigError, UnavailableError
from elasticrec.training.clock import StageClock
from elasticrec.training.groups import Named
from elasticrec.training.lanes import Lanes, num_lanes

WAIT_S = 30


class Batch:
    """What lanes look at."""

    def __init__(self, unit: int, index: int) -> None:
        self.unit, self.index = unit, index


def units(*counts: int) -> Iterator[Named]:
    for unit, count in enumerate(counts):
        for index in range(count):
            yield Named(Batch(unit, index), is_last=index == count - 1)  # type: ignore[arg-type]


class World:
    """Servers that apply at once, and lanes that may be held up."""

    def __init__(self) -> None:
        self.stepped: list[tuple[int, int, int]] = []
        self.applied: set[tuple[int, int]] = set()
        self.done: list[int] = []
        self.dense: list[int] = []
        self.hold: dict[tuple[int, int], threading.Event] = {}

    def pull(self, batch: Any, *, dense: bool) -> Any:
        if dense:
            self.dense.append(batch.index)
        return batch

    def acknowledged(self, pushing: Any) -> tuple[bool, bool]:
        self.applied.add((pushing.unit, pushing.index))
        return False, False

    def step(self, lane: int, named: Named) -> Any:
        name = (named.batch.unit, named.batch.index)
        self.stepped.append((lane, *name))
        if name in self.hold:
            assert self.hold[name].wait(WAIT_S)
        return named.batch

    def lanes(self, count: int, **settings: Any) -> Lanes:
        def step_of(lane: int) -> Any:
            return lambda named, _: self.step(lane, named)

        steps = [step_of(lane) for lane in range(count)]
        return Lanes(self, steps, self.done.append, ParameterServers(**settings), StageClock(count))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_batch_is_stepped_once_and_every_unit_told_once(count: int) -> None:
    world = World()
    world.lanes(count).run(units(50, 1, 30, 7))
    assert sorted((unit, index) for _, unit, index in world.stepped) == sorted(world.applied)
    assert len(world.applied) == len(world.stepped) == 88
    assert sorted(world.done) == [0, 1, 2, 3]


def test_a_unit_is_done_when_the_batches_of_all_lanes_are_applied() -> None:
    """The last batch is applied long before one that another lane has."""
    world = World()
    world.hold[0, 0] = threading.Event()
    lanes = world.lanes(2, max_in_flight=2)
    seen: list[list[int]] = []

    def stream() -> Iterator[Named]:
        yield from units(6)
        # one lane took all of them but the first, and is back for more
        seen.append(list(world.done))
        assert len(world.applied) == 5
        world.hold[0, 0].set()

    lanes.run(stream())
    assert seen == [[]]
    assert world.done == [0]
    assert lanes.most == 2


def test_lanes_step_at_the_same_time() -> None:
    world = World()
    meeting = threading.Barrier(3)
    batches = iter(list(units(3)))

    def step(lane: int, named: Named) -> Any:
        meeting.wait(WAIT_S)
        return named.batch

    world.step = step  # type: ignore[method-assign]
    world.lanes(3, max_in_flight=3).run(batches)
    assert len(world.applied) == 3


def test_each_lane_asks_for_dense_values_of_its_own() -> None:
    """A lane that had the dense values of another one's pull would step an old network for ever."""
    for settings in ({"sends_before_receive": 3}, {}, {"max_in_flight": 2}):
        world = World()
        taken: dict[int, list[int]] = {}
        lanes = world.lanes(2, **settings)
        lanes.run(units(40))
        for lane, _, index in world.stepped:
            taken.setdefault(lane, []).append(index)
        every = {"sends_before_receive": 3}.get(next(iter(settings), ""), 1 if settings else 2)
        expected = {index for mine in taken.values() for index in mine[::every]}
        assert set(world.dense) == expected


@pytest.mark.parametrize("where", ["stream", "step", "first"])
def test_an_error_of_one_lane_ends_them_all_and_is_raised(where: str) -> None:
    world = World()
    before = threading.active_count()
    error = UnavailableError("ps shard 0: it is gone")

    def stream() -> Iterator[Named]:
        for at, one in enumerate(units(1000)):
            if where == "stream" and at == 20:
                raise error
            yield one

    step = world.step

    def failing(lane: int, named: Named) -> Any:
        if named.batch.index == {"step": 20, "first": 0}.get(where):
            raise error
        return step(lane, named)

    world.step = failing  # type: ignore[method-assign]
    with pytest.raises(UnavailableError) as raised:
        world.lanes(3).run(stream())
    assert raised.value is error
    assert threading.active_count() == before
    # the others end with the batches that they have
    assert len(world.stepped) < 1000
    assert world.done == []


def job(**train: Any) -> Job:
    raw = {"name": "a", "data": {"format": "slots", "train": ["a"], "slots": "0-3"}, "train": {"mode": "ps", **train}}
    return parse_job(raw, base=Path(), source="job.yaml")


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({"threads": 1}, 1),
        ({"threads": 2}, 2),
        ({"threads": 64}, 4),
        ({"threads": 64, "ps": {"lanes": 8}}, 8),
        ({"threads": 1, "ps": {"lanes": 3}}, 3),
        ({"threads": 4, "ps": {"max_in_flight": 1}}, 1),
        ({"threads": 4, "ps": {"max_in_flight": 3}}, 3),
        ({"threads": 4, "strategy": "sync"}, 1),
        ({"threads": 4, "strategy": "half_async", "ps": {"lanes": 3}}, 1),
    ],
)
def test_lanes_share_the_threads(train: dict[str, Any], expected: int) -> None:
    assert num_lanes(job(**train)) == expected


def test_more_lanes_than_batches_in_flight_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"`lanes`: expected at most `max_in_flight`, 2, got 3"):
        job(ps={"lanes": 3, "max_in_flight": 2})


def test_shares_are_of_the_time_of_all_lanes() -> None:
    clock = StageClock(4)
    for _ in range(4):
        clock.add("forward", clock.elapsed)
    assert 0.5 < clock.shares()["forward"] <= 1.0
