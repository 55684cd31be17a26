"""Strategy `async` on several cores: flights side by side over one stream of batches.

Threads that share one operation of torch meet after each, dozens of times a batch, and whoever else needs a core holds
up all of them. Lanes step batches of their own and meet nobody: torch computes without the interpreter's lock.
"""

import threading
from collections.abc import Callable, Iterator, Sequence

from elasticrec.config import Job
from elasticrec.config.train import ParameterServers
from elasticrec.training.clock import StageClock
from elasticrec.training.flight import Flight, Servers, Step
from elasticrec.training.groups import UnitBatch
from elasticrec.training.network import num_threads

# The interpreter's lock is held for a small part of a step; with more lanes they wait for it.
_MOST_LANES = 4
# Of a lane, where the job says nothing: its rows come and its last push is applied while it steps.
_IN_FLIGHT = 3


def num_lanes(job: Job) -> int:
    """Return the number of batches that a trainer of `async` steps at once; lanes share the threads of the network."""
    ps, threads = job.train.ps, num_threads(job)
    if ps.lanes is not None:
        return ps.lanes
    # a lane with one batch in flight would wait for its rows and for its push
    most = _MOST_LANES if ps.max_in_flight is None else min(_MOST_LANES, max(ps.max_in_flight // 2, 1))
    # one thread may be left over, the reader has use for it
    return max(lanes for lanes in range(1, most + 1) if threads - lanes * (threads // lanes) <= 1 and lanes <= threads)


class Lanes:
    """As many flights as there are steps, each in a thread of its own; the first in the caller's."""

    def __init__(
        self,
        servers: Servers,
        steps: Sequence[Step],
        done: Callable[[int], None],
        settings: ParameterServers,
        clock: StageClock,
    ) -> None:
        self._done, self._clock = done, clock
        limits = _dealt(settings.max_in_flight or _IN_FLIGHT * len(steps), len(steps))
        self._flights = [
            Flight(servers, step, clock, limit=limit, dense_every=settings.sends_before_receive or min(limit, 2))
            for step, limit in zip(steps, limits, strict=True)
        ]
        self.most = 0
        """The most batches that were in flight at once."""

    def run(self, batches: Iterator[UnitBatch]) -> None:
        """Train on batches; all of them are acknowledged in the end, and `done` hears of every unit that came to its
        last batch. An error of one lane ends the others with the batches that they have."""
        stream = _Stream(batches, self._done, self._clock)
        started: list[threading.Thread] = []
        try:
            for lane, flight in list(enumerate(self._flights))[1:]:
                thread = threading.Thread(target=_fly, args=(flight, stream), name=f"lane-{lane}")
                thread.start()
                started.append(thread)
            # the caller's thread hears of signals
            self._flights[0].run(stream)
        except BaseException as error:
            stream.fail(error)
        for thread in started:
            thread.join()
        self.most = max(self.most, stream.most)
        failure, stream.failure = stream.failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                # an error that its own traceback holds would keep the connections open
                del failure


class _Stream:
    """One iterator for all lanes. One of them at a time takes a batch or tells of an end: the connection to the
    coordinator, through which units come and go, is one as well."""

    def __init__(self, batches: Iterator[UnitBatch], done: Callable[[int], None], clock: StageClock) -> None:
        self._batches, self._done, self._clock = batches, done, clock
        self._lock = threading.Lock()
        # Batches in flight by unit; of a unit in `_whole` no more will come.
        self._in_flight: dict[int, int] = {}
        self._whole: set[int] = set()
        self.most = 0
        self.failure: BaseException | None = None
        """What ended it before its end."""

    def take(self) -> UnitBatch | None:
        waiting = self._clock.now()
        with self._lock:
            self._clock.add("wait", self._clock.now() - waiting)
            named = None if self.failure is not None else next(self._batches, None)
            if named is None:
                return None
            unit = named.batch.unit
            # the last batch of one before may have been applied in an earlier run, and does not come
            self._whole |= self._in_flight.keys() - {unit}
            self._in_flight[unit] = self._in_flight.get(unit, 0) + 1
            self.most = max(self.most, sum(self._in_flight.values()))
            if named.is_last:
                self._whole.add(unit)
            self._tell()
            return named

    def end(self, named: UnitBatch) -> None:
        waiting = self._clock.now()
        with self._lock:
            self._clock.add("acknowledge", self._clock.now() - waiting)
            self._in_flight[named.batch.unit] -= 1
            self._tell()

    def _tell(self) -> None:
        """Of units of which nothing is in flight and nothing comes any more."""
        for unit in [unit for unit in self._whole if not self._in_flight[unit]]:
            del self._in_flight[unit]
            self._whole.remove(unit)
            self._done(unit)

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self.failure = self.failure or error


def _fly(flight: Flight, stream: _Stream) -> None:
    try:
        flight.run(stream)
    except BaseException as error:
        stream.fail(error)


def _dealt(number: int, parts: int) -> list[int]:
    """As equal as may be, none of them empty."""
    assert parts <= number, "the job was checked"
    return [number // parts + (part < number % parts) for part in range(parts)]
