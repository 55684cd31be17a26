"""Strategy `sync`: the units of a group are trained step by step, all batches of a step before any of the next.

A step is applied when every server has all its pushes (`crates/ps/src/steps.rs`). The units of a trainer that died are
leased to a trainer that is waiting for the step; it continues them from the current step of the group.
"""

from collections.abc import Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass

from elasticrec.data.units import Unit
from elasticrec.errors import UnavailableError
from elasticrec.net.messages import UnitLease
from elasticrec.training.groups import UnitBatch
from elasticrec.training.strategies.base import Strategy

_WAIT_S = 0.2
_COMPLETE = 2**32 - 1

Group = tuple[int, int]
"""The first unit and the number of units."""


@dataclass
class _OpenUnit:
    """A unit in training."""

    unit: Unit
    batches: Generator[UnitBatch]
    next: UnitBatch | None
    """The batch of the next step, or None at the end of the unit."""


class Sync(Strategy):
    """Trains the units of one group that this trainer holds."""

    name = "sync"

    def run(self, lease: UnitLease) -> None:
        """Run steps until the units are done."""
        self._group = _group_of(lease)
        self._open: list[_OpenUnit] = []
        self._leases = [lease]
        with ExitStack() as stack:
            self._stack = stack
            while more := self.trainer.lease():
                self._leases.append(more)
            self._step = self._find_step()
            self._open_units()
            while self._open:
                self._run_step()

    def _find_step(self) -> int:
        """Return the steps of the group that all servers have applied; commit a step that only some have."""
        while True:
            applied = [steps for steps, _ in self.servers.step_status(self._group, 0, 0.0)]
            if min(applied) == max(applied):
                return applied[0]
            # A server that applied the step proves that every server has all its pushes.
            self.servers.commit(self._group[0], min(applied) + 1)

    def _open_units(self) -> list[_OpenUnit]:
        """Open the leased units at the current step."""
        opened = []
        for lease in self._leases:
            if _group_of(lease) != self._group:
                raise UnavailableError(f"unit {lease['unit']['id']}: belongs to another group, the run was rolled back")
            unit = Unit.of(lease["unit"])
            batches = self.trainer.batches(unit)
            self._stack.enter_context(closing(batches))
            found = next((one for one in batches if one.batch.index >= self._step), None)
            running = _OpenUnit(unit, batches, found)
            if found is None or self._step == _COMPLETE:
                self.trainer.report_done(unit.id)
            else:
                opened.append(running)
        self._leases = []
        self._open += opened
        return opened

    def _run_step(self) -> None:
        self._push(self._open)
        while not all(is_full for _, is_full in self.servers.step_status(self._group, self._step, _WAIT_S)):
            # The trainer of the missing batches may have died.
            if more := self.trainer.lease(waiting=True):
                self._leases.append(more)
                self._push(self._open_units())
        self._step += 1
        ended = [running for running in self._open if running.next is not None and running.next.is_last]
        for running in self._open:
            running.next = next(running.batches, None)
        if ended:
            self.servers.commit(self._group[0], self._step)
            self._open = [running for running in self._open if running.next is not None]
            for running in ended:
                self.trainer.report_done(running.unit.id)

    def _push(self, running: list[_OpenUnit]) -> None:
        """Train the batches of this step, on the rows as they were before it."""
        pushed, after = [], (self._group[0], self._step)
        for one in running:
            batch = one.next
            assert batch is not None, "only open units are pushed"
            pulling = self.servers.pull(batch.batch, dense=True, after=after)
            pushed.append(self.network.step(self.servers, one.unit.seen, batch, pulling, group=self._group))
        for pushing in pushed:
            self.servers.wait_for_ack(pushing)


def _group_of(lease: UnitLease) -> Group:
    assert lease["group"] is not None, "a job with strategy `sync` has groups"
    return (lease["group"][0], lease["group"][1])
