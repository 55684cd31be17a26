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
from elasticrec.training.groups import Named
from elasticrec.training.network import num_threads

# The interpreter's lock is held for a small part of a step; with more lanes they wait for it.
_MOST_LANES = 4
# Of a lane, where the job says nothing: its rows come and its last push is applied while it steps.
_IN_FLIGHT = 3


def num_lanes(job: Job) -> int:
    """Batches that a trainer steps at once; the threads of the network are dealt out to them."""
    ps = job.train.ps
    if job.train.strategy != "async":
        return 1
    return ps.lanes or min(num_threads(job), _MOST_LANES, ps.max_in_flight or _MOST_LANES)


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

    def run(self, batches: Iterator[Named]) -> None:
        """Train on batches; all of them are acknowledged in the end, and `done` hears of every unit that came to its
        last batch. An error of one lane ends the others with the batches that they have."""
        stream = _Stream(batches, self._done, self._clock)
        first, *others = (
            threading.Thread(target=_fly, args=(flight, stream), name=f"lane-{lane}")
            for lane, flight in enumerate(self._flights)
        )
        for thread in others:
            thread.start()
        # its own thread hears of signals
        first.run()
        for thread in others:
            thread.join()
        self.most = max(self.most, stream.most)
        if stream.failure is not None:
            raise stream.failure


class _Stream:
    """One iterator for all lanes. One of them at a time takes a batch or tells of an end: the connection to the
    coordinator, through which units come and go, is one as well."""

    def __init__(self, batches: Iterator[Named], done: Callable[[int], None], clock: StageClock) -> None:
        self._batches, self._done, self._clock = batches, done, clock
        self._lock = threading.Lock()
        # Batches in flight by unit; of a unit in `_whole` no more will come.
        self._in_flight: dict[int, int] = {}
        self._whole: set[int] = set()
        self.most = 0
        self.failure: BaseException | None = None
        """What ended it before its end."""

    def take(self) -> Named | None:
        with self._clock.stage("wait"):
            self._lock.acquire()
        try:
            named = None if self.failure is not None else next(self._batches, None)
            if named is not None:
                unit = named.batch.unit
                self._in_flight[unit] = self._in_flight.get(unit, 0) + 1
                self.most = max(self.most, sum(self._in_flight.values()))
                if named.is_last:
                    self._whole.add(unit)
            return named
        finally:
            self._lock.release()

    def end(self, named: Named) -> None:
        unit = named.batch.unit
        with self._lock:
            self._in_flight[unit] -= 1
            if not self._in_flight[unit] and unit in self._whole:
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
    return [max(number // parts + (part < number % parts), 1) for part in range(parts)]
