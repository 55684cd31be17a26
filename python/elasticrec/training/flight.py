"""Strategy `async`: batches in flight between a trainer and its servers, pulled ahead, stepped in order, acknowledged
later."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from elasticrec import _core
from elasticrec.config.train import ParameterServers
from elasticrec.training.clock import StageClock
from elasticrec.training.groups import Named


class Servers(Protocol):
    """What a flight needs of the parameter servers."""

    def pull(self, batch: _core.Batch, *, dense: bool) -> _core.Pulling:
        """Ask for the rows of a batch, without waiting."""

    def acknowledged(self, pushing: _core.Pushing) -> tuple[bool, bool]:
        """Wait until a push is applied."""


Step = Callable[[Named, _core.Pulling], _core.Pushing]


class Flight:
    """At most `limit` batches between the pull and the acknowledgement of their push.

    With 1 a batch is pulled after the push before it was applied, as in local training; with 2 its rows come while the
    one before is stepped; with 3 that one's push is applied while the next is stepped. Dense values come with the first
    batch and then after so many pushes as the settings say: in between the network is that much older than the rows.
    """

    def __init__(
        self,
        servers: Servers,
        step: Step,
        done: Callable[[int], None],
        settings: ParameterServers,
        clock: StageClock,
    ) -> None:
        self._servers = servers
        self._step = step
        self._done = done
        self._clock = clock
        self._limit = settings.max_in_flight
        self._dense_every = settings.dense_every
        self._num_pulls = 0
        self._pulled: deque[tuple[Named, _core.Pulling]] = deque()
        self._pushed: deque[tuple[Named, _core.Pushing]] = deque()
        self.most = 0
        """The most that were in flight at once."""

    def run(self, batches: Iterable[Named]) -> None:
        """Train on batches; all of them are acknowledged in the end, and `done` hears of every last one of a unit."""
        ahead = min(self._limit - 1, 1)
        for named in batches:
            while len(self._pulled) + len(self._pushed) >= self._limit:
                self._advance()
            with self._clock.stage("pull"):
                wants_dense = self._num_pulls % self._dense_every == 0
                self._pulled.append((named, self._servers.pull(named.batch, dense=wants_dense)))
                self._num_pulls += 1
            self.most = max(self.most, len(self._pulled) + len(self._pushed))
            if len(self._pulled) > ahead:
                self._take_step()
        while self._pulled:
            self._take_step()
        while self._pushed:
            self._advance()

    def _advance(self) -> None:
        if self._pushed:
            named, pushing = self._pushed.popleft()
            with self._clock.stage("acknowledge"):
                self._servers.acknowledged(pushing)
            if named.is_last:
                self._done(named.batch.unit)
        else:
            self._take_step()

    def _take_step(self) -> None:
        named, pulling = self._pulled.popleft()
        self._pushed.append((named, self._step(named, pulling)))
