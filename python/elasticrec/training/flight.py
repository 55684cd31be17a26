"""Strategy `async`: keep several batches in flight between a trainer and its servers."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from elasticrec import _core
from elasticrec.training.clock import StageClock
from elasticrec.training.groups import UnitBatch


class Servers(Protocol):
    """The parameter servers, as a flight uses them."""

    def pull(self, batch: _core.Batch, *, dense: bool) -> _core.PullTicket:
        """Request the rows of a batch without waiting."""

    def wait_for_ack(self, pushing: _core.PushTicket) -> tuple[bool, bool]:
        """Wait until a push is applied."""


class BatchSource(Protocol):
    """A source of batches that records when they are done."""

    def take(self) -> UnitBatch | None:
        """Return the next batch, or None at the end."""

    def end(self, batch: UnitBatch) -> None:
        """Note that all servers have applied the push of a batch."""


Step = Callable[[UnitBatch, _core.PullTicket], _core.PushTicket]


class Flight:
    """Keeps at most `limit` batches between their pull and the acknowledgement of their push.

    With 1, a batch is pulled after the previous push was applied, as in local training. With 2, a batch is pulled while
    the previous one is trained. With 3, a push is also applied while the next batch is trained. Dense values are pulled
    with every `dense_every`th batch; in between the network is stale by that many batches.
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

    def run(self, batches: BatchSource) -> None:
        """Train all batches and wait for their acknowledgements."""
        ahead = min(self._limit - 1, 1)
        while True:
            while len(self._pulled) + len(self._pushed) >= self._limit:
                self._advance(batches)
            batch = batches.take()
            if batch is None:
                break
            with self._clock.stage("pull"):
                wants_dense = self._num_pulls % self._dense_every == 0
                self._pulled.append((batch, self._servers.pull(batch.batch, dense=wants_dense)))
                self._num_pulls += 1
            if len(self._pulled) > ahead:
                self._take_step()
        while self._pulled:
            self._take_step()
        while self._pushed:
            self._advance(batches)

    def _advance(self, batches: BatchSource) -> None:
        if self._pushed:
            batch, pushing = self._pushed.popleft()
            with self._clock.stage("acknowledge"):
                self._servers.wait_for_ack(pushing)
            batches.end(batch)
        else:
            self._take_step()

    def _take_step(self) -> None:
        batch, pulling = self._pulled.popleft()
        self._pushed.append((batch, self._step(batch, pulling)))
