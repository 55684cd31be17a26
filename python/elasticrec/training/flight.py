"""Batches in flight between a trainer and its parameter servers: pulled ahead, stepped in order, acknowledged later."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from elasticrec import _core


@dataclass(frozen=True)
class Named:
    """A batch, and whether no other one of its unit comes behind it."""

    batch: _core.Batch
    is_last: bool


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
    one before is stepped; with 3 that one's push is applied while the next is stepped.
    """

    def __init__(self, servers: Servers, step: Step, limit: int) -> None:
        self._servers = servers
        self._step = step
        self._limit = limit
        self._pulled: deque[tuple[Named, _core.Pulling]] = deque()
        self._pushed: deque[_core.Pushing] = deque()
        self.most = 0
        """The most that were in flight at once."""

    def run(self, batches: Iterable[Named]) -> None:
        """Train on batches; all of them are acknowledged in the end."""
        ahead = min(self._limit - 1, 1)
        for named in batches:
            while len(self._pulled) + len(self._pushed) >= self._limit:
                self._advance()
            self._pulled.append((named, self._servers.pull(named.batch, dense=True)))
            self.most = max(self.most, len(self._pulled) + len(self._pushed))
            if len(self._pulled) > ahead:
                self._take_step()
        while self._pulled:
            self._take_step()
        while self._pushed:
            self._advance()

    def _advance(self) -> None:
        if self._pushed:
            self._servers.acknowledged(self._pushed.popleft())
        else:
            self._take_step()

    def _take_step(self) -> None:
        self._pushed.append(self._step(*self._pulled.popleft()))
