"""Stream the batches of consecutive units without a gap.

When a reader yields the last batch of a unit, the next unit is leased and opened: it is read while the network still
trains the last batches of the unit before.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial

from elasticrec import _core
from elasticrec.data.batches import Batches
from elasticrec.data.units import Unit
from elasticrec.net.messages import UnitLease
from elasticrec.training.groups import UnitBatch, split_batches


@dataclass(frozen=True)
class UnitSource:
    """Functions that lease and read units."""

    lease: Callable[[], UnitLease | None]
    """Lease another unit on the same servers; None if there is none for now."""
    begin: Callable[[Unit], Batches]
    """Start to read a unit."""
    take: Callable[[Unit, Batches], Iterator[_core.Batch]]
    """Yield the batches of a reader."""
    parser: _core.Parser


@dataclass(frozen=True)
class _OpenUnit:
    """A unit being read."""

    unit: Unit
    skip: frozenset[int]
    batches: Batches


class UnitStream:
    """Yields the batches that some server has not applied, until no other unit can be leased."""

    def __init__(self, source: UnitSource, first: UnitLease) -> None:
        self._source = source
        self._first = first
        self._seen: dict[int, int] = {}

    def seen_of(self, batch: _core.Batch) -> int:
        """Return the data time of a batch that was yielded."""
        return self._seen[batch.unit]

    def run(self) -> Generator[UnitBatch]:
        """Yield the batches in order."""
        opened: list[_OpenUnit] = [self._open(self._first)]
        try:
            while opened:
                unit, skip, batches = opened[0].unit, opened[0].skip, opened[0].batches
                for one in split_batches(self._source.take(unit, batches), partial(self._source.parser.empty, unit.id)):
                    if one.is_last and (answer := self._source.lease()) is not None:
                        opened.append(self._open(answer))
                    if one.batch.index not in skip:
                        yield one
                opened.pop(0).batches.close()
        finally:
            for left in opened:
                left.batches.close()

    def _open(self, answer: UnitLease) -> _OpenUnit:
        """Start to read a leased unit."""
        unit = Unit.of(answer["unit"])
        self._seen[unit.id] = unit.seen
        return _OpenUnit(unit, frozenset(answer["skip"]), self._source.begin(unit))
