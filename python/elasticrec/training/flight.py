"""Strategy `async`: batches in flight between a trainer and its servers, pulled ahead, stepped in order, acknowledged
later."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from elasticrec import _core
from elasticrec.training.clock import StageClock
from elasticrec.training.groups import UnitBatch


class Servers(Protocol):
    """What a flight needs of the parameter servers."""

    def pull(self, batch: _core.Batch, *, dense: bool) -> _core.PullTicket:
        """Ask for the rows of a batch, without waiting."""

    def wait_for_ack(self, pushing: _core.PushTicket) -> tuple[bool, bool]:
        """Wait until a push is applied."""


class Batches(Protocol):
    """Where the batches of a flight come from, and who hears of their end."""

    def take(self) -> UnitBatch | None:
        """The next one; none if there are no more."""

    def end(self, named: UnitBatch) -> None:
        """All servers have applied what this one learned."""


Step = Callable[[UnitBatch, _core.PullTicket], _core.PushTicket]


class Flight:
    """At most `limit` batches between the pull and the acknowledgement of their push.

    With 1 a batch is pulled after the push before it was applied, as in local training; with 2 its rows come while the
    one before is stepped; with 3 that one's push is applied while the next is stepped. Dense values come with the first
    batch and then with every `dense_every`th: in between the network is that much older than the rows.
    """

    def __init__(self, servers: Servers, step: Step, clock: StageClock, *, limit: int, dense_every: int) -> None:
        self._servers = servers
        self._step = step
        self._clock = clock
        self._limit = limit
        self._dense_every = dense_every
        self._num_pulls = 0
        self._pulled: deque[tuple[UnitBatch, _core.PullTicket]] = deque()
        self._pushed: deque[tuple[UnitBatch, _core.PushTicket]] = deque()

    def run(self, batches: Batches) -> None:
        """Train on batches; all of them are acknowledged in the end."""
        ahead = min(self._limit - 1, 1)
        while True:
            while len(self._pulled) + len(self._pushed) >= self._limit:
                self._advance(batches)
            named = batches.take()
            if named is None:
                break
            with self._clock.stage("pull"):
                wants_dense = self._num_pulls % self._dense_every == 0
                self._pulled.append((named, self._servers.pull(named.batch, dense=wants_dense)))
                self._num_pulls += 1
            if len(self._pulled) > ahead:
                self._take_step()
        while self._pulled:
            self._take_step()
        while self._pushed:
            self._advance(batches)

    def _advance(self, batches: Batches) -> None:
        if self._pushed:
            named, pushing = self._pushed.popleft()
            with self._clock.stage("acknowledge"):
                self._servers.wait_for_ack(pushing)
            batches.end(named)
        else:
            self._take_step()

    def _take_step(self) -> None:
        named, pulling = self._pulled.popleft()
        self._pushed.append((named, self._step(named, pulling)))
