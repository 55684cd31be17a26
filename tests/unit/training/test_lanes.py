"""Lanes: batches in flight in parallel over one stream, its end and its errors."""

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elasticrec.config import Job, parse_job
from elasticrec.config.train import ParameterServers
from elasticrec.errors import ConfigError, UnavailableError
from elasticrec.training.clock import StageClock
from elasticrec.training.groups import UnitBatch
from elasticrec.training.lanes import Lanes
from elasticrec.training.remote import make_networks
from elasticrec.training.strategies import find_strategy

WAIT_S = 30


class Batch:
    """The attributes of a batch that lanes use."""

    def __init__(self, unit: int, index: int) -> None:
        self.unit, self.index = unit, index


def units(*counts: int) -> Iterator[UnitBatch]:
    for unit, count in enumerate(counts):
        for index in range(count):
            yield UnitBatch(Batch(unit, index), is_last=index == count - 1)  # type: ignore[arg-type]


class FakeServers:
    """Fake servers that apply pushes at once, and steps that may block."""

    def __init__(self) -> None:
        self.stepped: list[tuple[int, int, int]] = []
        self.applied: set[tuple[int, int]] = set()
        self.done: list[int] = []
        self.dense: list[int] = []
        self.blocked: dict[tuple[int, int], threading.Event] = {}
        self.step_s = 0.0

    def pull(self, batch: Any, *, dense: bool) -> Any:
        if dense:
            self.dense.append(batch.index)
        return batch

    def wait_for_ack(self, pushing: Any) -> tuple[bool, bool]:
        self.applied.add((pushing.unit, pushing.index))
        return False, False

    def step(self, lane: int, named: UnitBatch) -> Any:
        name = (named.batch.unit, named.batch.index)
        self.stepped.append((lane, *name))
        # a step takes a while, so that a failed lane has time to report
        threading.Event().wait(self.step_s)
        if name in self.blocked:
            assert self.blocked[name].wait(WAIT_S)
        return named.batch

    def lanes(self, count: int, **settings: Any) -> Lanes:
        def step_of(lane: int) -> Any:
            return lambda named, _: self.step(lane, named)

        steps = [step_of(lane) for lane in range(count)]
        return Lanes(self, steps, self.done.append, ParameterServers(**settings), StageClock(count))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_batch_is_trained_once_and_every_unit_reported_once(count: int) -> None:
    servers = FakeServers()
    servers.lanes(count).run(units(50, 1, 30, 7))
    assert sorted((unit, index) for _, unit, index in servers.stepped) == sorted(servers.applied)
    assert len(servers.applied) == len(servers.stepped) == 88
    assert sorted(servers.done) == [0, 1, 2, 3]


def test_a_unit_is_done_when_the_batches_of_all_lanes_are_applied() -> None:
    """The last batch is applied long before a batch of another lane."""
    servers = FakeServers()
    servers.blocked[0, 0] = threading.Event()
    lanes = servers.lanes(2, max_in_flight=2)
    seen: list[list[int]] = []

    def stream() -> Iterator[UnitBatch]:
        yield from units(6)
        # one lane trained all batches but the first and asks for the next one
        seen.append(list(servers.done))
        assert len(servers.applied) == 5
        servers.blocked[0, 0].set()

    lanes.run(stream())
    assert seen == [[]]
    assert servers.done == [0]
    assert lanes.most_in_flight == 2


def test_lanes_step_at_the_same_time() -> None:
    servers = FakeServers()
    barrier = threading.Barrier(3)
    batches = iter(list(units(3)))

    def step(lane: int, named: UnitBatch) -> Any:
        barrier.wait(WAIT_S)
        return named.batch

    servers.step = step  # type: ignore[method-assign]
    servers.lanes(3, max_in_flight=3).run(batches)
    assert len(servers.applied) == 3


def test_each_lane_pulls_its_own_dense_values() -> None:
    """A lane that relied on the dense values pulled by another lane would never update its own network."""
    for settings in ({"sends_before_receive": 3}, {}, {"max_in_flight": 2}):
        servers = FakeServers()
        indices: dict[int, list[int]] = {}
        lanes = servers.lanes(2, **settings)
        lanes.run(units(40))
        for lane, _, index in servers.stepped:
            indices.setdefault(lane, []).append(index)
        every = {"sends_before_receive": 3}.get(next(iter(settings), ""), 1 if settings else 2)
        expected = {index for own in indices.values() for index in own[::every]}
        assert set(servers.dense) == expected


def test_a_unit_whose_last_batch_is_skipped_is_done_when_the_next_unit_begins() -> None:
    """After the death of a trainer, batches applied on all servers are skipped; only an earlier batch is trained."""
    servers = FakeServers()
    done_seen: list[list[int]] = []

    def stream() -> Iterator[UnitBatch]:
        yield UnitBatch(Batch(5, 2), is_last=False)  # type: ignore[arg-type]
        first, *rest = units(4)
        yield first
        done_seen.append(list(servers.done))
        yield from rest

    servers.lanes(1, max_in_flight=1).run(stream())
    assert done_seen == [[5]]
    assert servers.done == [5, 0]


def test_units_are_leased_and_reported_by_one_lane_at_a_time() -> None:
    """Leases and reports share one connection to the coordinator."""
    servers = FakeServers()
    busy = threading.Lock()

    def check_exclusive() -> None:
        assert busy.acquire(blocking=False)
        threading.Event().wait(0.001)
        busy.release()

    def stream() -> Iterator[UnitBatch]:
        for one in units(*[2] * 40):
            check_exclusive()
            yield one

    done = servers.done.append

    def report_done(unit: int) -> None:
        check_exclusive()
        done(unit)

    lanes = servers.lanes(4)
    lanes._done = report_done
    lanes.run(stream())
    assert sorted(servers.done) == list(range(40))


class PlantedError(UnavailableError):
    """An error whose traceback references the failed run."""


def test_an_error_is_released_after_it_was_raised() -> None:
    """A connection closes with the last reference to its client, without a garbage collection."""
    servers = FakeServers()

    def failing(lane: int, named: UnitBatch) -> Any:
        raise PlantedError("gone")

    servers.step = failing  # type: ignore[method-assign]
    gc.disable()
    try:
        with contextlib.suppress(PlantedError):
            servers.lanes(2).run(units(10))
        alive = weakref.ref(servers)
        del servers, failing
        assert alive() is None
    finally:
        gc.enable()


def test_a_lane_that_cannot_start_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    servers, start = FakeServers(), threading.Thread.start
    servers.step_s = 0.001

    def failing(thread: threading.Thread) -> None:
        if thread.name == "lane-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", failing)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        servers.lanes(4).run(units(100_000))
    assert lanes_alive() == []
    assert len(servers.stepped) < 100_000


def lanes_alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lane-")]


@pytest.mark.parametrize("where", ["stream", "step", "first"])
def test_an_error_in_one_lane_ends_all_lanes(where: str) -> None:
    servers = FakeServers()
    servers.step_s = 0.001
    error = UnavailableError("ps shard 0: it is gone")

    def stream() -> Iterator[UnitBatch]:
        for at, one in enumerate(units(100_000)):
            if where == "stream" and at == 20:
                raise error
            yield one

    step = servers.step

    def failing(lane: int, named: UnitBatch) -> Any:
        if named.batch.index == {"step": 20, "first": 0}.get(where):
            raise error
        return step(lane, named)

    servers.step = failing  # type: ignore[method-assign]
    with pytest.raises(UnavailableError) as raised:
        servers.lanes(3).run(stream())
    assert raised.value is error
    assert lanes_alive() == []
    # the other lanes end after their current batches
    assert len(servers.stepped) < 50_000
    assert servers.done == []


def job(**train: Any) -> Job:
    raw = {"name": "a", "data": {"format": "slots", "train": ["a"], "slots": "0-3"}, "train": {"mode": "ps", **train}}
    return parse_job(raw, base=Path(), source="job.yaml")


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({"threads": 1}, 1),
        ({"threads": 2}, 2),
        ({"threads": 5}, 4),
        ({"threads": 6}, 3),
        ({"threads": 7}, 3),
        ({"threads": 10}, 3),
        ({"threads": 11}, 2),
        ({"threads": 64}, 4),
        ({"threads": 64, "ps": {"lanes": 8}}, 8),
        ({"threads": 1, "ps": {"lanes": 3}}, 3),
        ({"threads": 4, "ps": {"max_in_flight": 1}}, 1),
        ({"threads": 4, "ps": {"max_in_flight": 3}}, 1),
        ({"threads": 4, "ps": {"max_in_flight": 4}}, 2),
        ({"threads": 1, "ps": {"max_in_flight": 9}}, 1),
        ({"threads": 4, "strategy": "sync"}, 1),
        ({"threads": 4, "strategy": "half_async", "ps": {"lanes": 3}}, 1),
    ],
)
def test_lanes_share_the_threads(train: dict[str, Any], expected: int) -> None:
    parsed = job(**train)
    assert find_strategy(parsed.train.strategy).num_lanes(parsed) == expected


def test_more_lanes_than_batches_in_flight_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"`lanes`: expected at most `max_in_flight`, 2, got 3"):
        job(ps={"lanes": 3, "max_in_flight": 2})


def test_shares_refer_to_the_time_of_all_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("elasticrec.training.clock.time", SimpleNamespace(perf_counter=lambda: now[0]))
    clock = StageClock(4)
    with clock.stage("forward"):
        now[0] += 6
    with clock.stage("idle", clock.lanes):
        now[0] += 4
    assert clock.shares() == {"forward": 6 / 40, "idle": 16 / 40}
    assert clock.lap() == clock.shares()


def test_networks_of_lanes_share_the_threads_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    one, two = make_networks(job(threads=5), StageClock(2))
    assert threads == [2, 2]
    assert torch.equal(one.dense.values, two.dense.values)
    one.dense.values.zero_()
    assert two.dense.values.any()
    assert [any(bool(one.any()) for one in network.model.parameters()) for network in (one, two)] == [False, True]
