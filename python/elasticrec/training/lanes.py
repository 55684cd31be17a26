"""Strategy `async` on several cores: parallel lanes train batches of one stream.

Threads that share torch operations synchronize after each operation, dozens of times per batch, and any other process
on a core delays all of them. Each lane trains its own batches without synchronization; torch releases the interpreter
lock.
"""

import threading
from collections.abc import Callable, Iterator, Sequence

from elasticrec.config import Job
from elasticrec.config.train import ParameterServers
from elasticrec.training.clock import StageClock
from elasticrec.training.flight import Flight, Servers, Step
from elasticrec.training.groups import UnitBatch
from elasticrec.training.network import num_threads

# A step holds the interpreter lock for a small part of its time; more lanes would wait for it.
_MAX_LANES = 4
# Default per lane: one batch is pulled and one is being applied while another is trained.
_IN_FLIGHT_PER_LANE = 3


def num_lanes(job: Job) -> int:
    """Return the number of batches that a trainer of `async` steps at once; lanes share the threads of the network."""
    ps, threads = job.train.ps, num_threads(job)
    if ps.lanes is not None:
        return ps.lanes
    # A lane with one batch in flight would wait for its pull and its push.
    most = _MAX_LANES if ps.max_in_flight is None else min(_MAX_LANES, max(ps.max_in_flight // 2, 1))
    # One thread may be left over; the reader uses it.
    return max(lanes for lanes in range(1, most + 1) if threads - lanes * (threads // lanes) <= 1 and lanes <= threads)


class Lanes:
    """Runs one flight per step function, each in its own thread; the first in the caller's thread."""

    def __init__(
        self,
        servers: Servers,
        steps: Sequence[Step],
        done: Callable[[int], None],
        settings: ParameterServers,
        clock: StageClock,
    ) -> None:
        self._done, self._clock = done, clock
        limits = _split_evenly(settings.max_in_flight or _IN_FLIGHT_PER_LANE * len(steps), len(steps))
        self._flights = [
            Flight(servers, step, clock, limit=limit, dense_every=settings.sends_before_receive or min(limit, 2))
            for step, limit in zip(steps, limits, strict=True)
        ]
        self.most_in_flight = 0
        """The most batches that were in flight at once."""

    def run(self, batches: Iterator[UnitBatch]) -> None:
        """Train batches until all are acknowledged, and call `done` for every complete unit.

        After an error in one lane, the others finish the batches that they hold.
        """
        stream = _Stream(batches, self._done, self._clock)
        started: list[threading.Thread] = []
        try:
            for lane, flight in list(enumerate(self._flights))[1:]:
                thread = threading.Thread(target=_run_flight, args=(flight, stream), name=f"lane-{lane}")
                thread.start()
                started.append(thread)
            # The first lane runs here, because only the main thread receives signals.
            self._flights[0].run(stream)
        except BaseException as error:
            stream.fail(error)
        for thread in started:
            thread.join()
        self.most_in_flight = max(self.most_in_flight, stream.most_in_flight)
        failure, stream.failure = stream.failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                # Break the cycle of error and traceback, which would keep connections open.
                del failure


class _Stream:
    """Shares one iterator of batches between lanes; a lock also protects the connection to the coordinator."""

    def __init__(self, batches: Iterator[UnitBatch], done: Callable[[int], None], clock: StageClock) -> None:
        self._batches, self._done, self._clock = batches, done, clock
        self._lock = threading.Lock()
        # Number of batches in flight by unit; units in `_exhausted` have no further batches.
        self._in_flight: dict[int, int] = {}
        self._exhausted: set[int] = set()
        self.most_in_flight = 0
        self.failure: BaseException | None = None
        """The first error of a lane."""

    def take(self) -> UnitBatch | None:
        waiting = self._clock.now()
        with self._lock:
            self._clock.add("wait", self._clock.now() - waiting)
            batch = None if self.failure is not None else next(self._batches, None)
            if batch is None:
                return None
            unit = batch.batch.unit
            # The last batch of an earlier unit may have been skipped as already applied.
            self._exhausted |= self._in_flight.keys() - {unit}
            self._in_flight[unit] = self._in_flight.get(unit, 0) + 1
            self.most_in_flight = max(self.most_in_flight, sum(self._in_flight.values()))
            if batch.is_last:
                self._exhausted.add(unit)
            self._report_done()
            return batch

    def end(self, batch: UnitBatch) -> None:
        waiting = self._clock.now()
        with self._lock:
            self._clock.add("acknowledge", self._clock.now() - waiting)
            self._in_flight[batch.batch.unit] -= 1
            self._report_done()

    def _report_done(self) -> None:
        """Report units that have no batch in flight and no further batches."""
        for unit in [unit for unit in self._exhausted if not self._in_flight[unit]]:
            del self._in_flight[unit]
            self._exhausted.remove(unit)
            self._done(unit)

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self.failure = self.failure or error


def _run_flight(flight: Flight, stream: _Stream) -> None:
    try:
        flight.run(stream)
    except BaseException as error:
        stream.fail(error)


def _split_evenly(number: int, parts: int) -> list[int]:
    """Split a number into almost equal parts of at least 1."""
    assert parts <= number, "the configuration allows at most one lane per batch in flight"
    return [number // parts + (part < number % parts) for part in range(parts)]
