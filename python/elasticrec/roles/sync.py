"""Strategy `sync` in a trainer: units of a group are run step by step, all batches of a step before any of the next.

A step is applied when every server has all its pushes (`crates/ps/src/steps.rs`). Units of a trainer that dies are
leased to one that waits for them, which runs them from the step at which the group is.
"""

from collections.abc import Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Protocol

from elasticrec import _core
from elasticrec.data.units import Unit
from elasticrec.errors import UnavailableError
from elasticrec.roles.place import Answer
from elasticrec.training.groups import Named
from elasticrec.training.remote import RemoteNetwork

_WAIT_S = 0.2
_COMPLETE = 2**32 - 1

Group = tuple[int, int]
"""The first unit, and how many there are."""


class Units(Protocol):
    """What steps need of the trainer's process."""

    network: RemoteNetwork

    def lease(self, *, waiting: bool = False) -> Answer | None:
        """Another unit, or None if there is none for now."""

    def done(self, unit: int) -> None:
        """All of a unit is applied."""

    def batches(self, unit: Unit) -> Generator[Named]:
        """The batches of a unit, named."""


@dataclass
class _Running:
    """A unit that is being run."""

    unit: Unit
    batches: Generator[Named]
    next: Named | None
    """The batch of the step to come, or None when it has ended."""


class SyncGroup:
    """The units of one group that this trainer has."""

    def __init__(self, units: Units, servers: _core.PsClient, first: Answer) -> None:
        self._units, self._servers = units, servers
        self._group: Group = (first["group"][0], first["group"][1])
        self._running: list[_Running] = []
        self._step = 0
        self._answers = [first]
        self.num_steps = 0

    def run(self) -> None:
        """Run steps until the units are done. A lost server raises `UnavailableError`: the units are given back."""
        with ExitStack() as stack:
            self._stack = stack
            while more := self._units.lease():
                self._answers.append(more)
            self._step = self._find_step()
            self._open_units()
            while self._running:
                self._run_step()

    def _find_step(self) -> int:
        """How many steps of the group are applied, everywhere: one that is not is committed if a server has it."""
        while True:
            applied = [steps for steps, _ in self._servers.meet(self._group, 0, 0.0)]
            if min(applied) == max(applied):
                return applied[0]
            # one server has applied it, so that all have all of it
            self._servers.commit(self._group[0], min(applied) + 1)

    def _open_units(self) -> list[_Running]:
        """Begin units that were leased, at the present step."""
        opened = []
        for answer in self._answers:
            if (answer["group"][0], answer["group"][1]) != self._group:
                raise UnavailableError(f"unit {answer['unit']['id']}: of another group, the run went back")
            unit = Unit(**answer["unit"])
            batches = self._units.batches(unit)
            self._stack.enter_context(closing(batches))
            found = next((named for named in batches if named.batch.index >= self._step), None)
            running = _Running(unit, batches, found)
            if found is None or self._step == _COMPLETE:
                self._units.done(unit.id)
            else:
                opened.append(running)
        self._answers = []
        self._running += opened
        return opened

    def _run_step(self) -> None:
        self._push(self._running)
        while not all(is_full for _, is_full in self._servers.meet(self._group, self._step, _WAIT_S)):
            # whoever had the rest may be gone
            if more := self._units.lease(waiting=True):
                self._answers.append(more)
                self._push(self._open_units())
        self._step += 1
        self.num_steps += 1
        ended = [running for running in self._running if running.next is not None and running.next.is_last]
        for running in self._running:
            running.next = next(running.batches, None)
        if ended:
            self._servers.commit(self._group[0], self._step)
            self._running = [running for running in self._running if running.next is not None]
            for running in ended:
                self._units.done(running.unit.id)

    def _push(self, running: list[_Running]) -> None:
        """Run the batches of this step, on the rows of before it."""
        pushed, after = [], (self._group[0], self._step)
        for one in running:
            named = one.next
            assert named is not None, "a unit that has ended does not run"
            pulling = self._servers.pull(named.batch, dense=True, after=after)
            pushed.append(self._units.network.step(self._servers, one.unit.seen, named, pulling, group=self._group))
        for pushing in pushed:
            self._servers.acknowledged(pushing)
