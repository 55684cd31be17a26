"""Strategy `async` in a trainer: batches of unit after unit without a gap.

When a reader hands out the last batch of a unit, the next one is leased and begun to be read: the network is still busy
with the last batches of the one before.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial

from elasticrec import _core
from elasticrec.data.batches import Batches
from elasticrec.data.units import Unit
from elasticrec.roles.place import Answer
from elasticrec.training.groups import Named, named


@dataclass(frozen=True)
class Source:
    """Where units come from."""

    lease: Callable[[], Answer | None]
    """Another unit beside those that the trainer has, on the same servers; None if there is none for now."""
    begin: Callable[[Unit], Batches]
    """Begin to read a unit."""
    take: Callable[[Unit, Batches], Iterator[_core.Batch]]
    """The batches as they come."""
    parser: _core.Parser


@dataclass(frozen=True)
class _Opened:
    """A unit that is being read."""

    unit: Unit
    skip: frozenset[int]
    batches: Batches


class UnitStream:
    """The batches of units that lack somewhere, until no other unit is to be had."""

    def __init__(self, source: Source, first: Answer) -> None:
        self._source = source
        self._first = first
        self._seen: dict[int, int] = {}

    def seen_of(self, batch: _core.Batch) -> int:
        """The data time of a batch that came out."""
        return self._seen[batch.unit]

    def run(self) -> Generator[Named]:
        """The batches, in order."""
        opened: list[_Opened] = [self._open(self._first)]
        try:
            while opened:
                unit, skip, batches = opened[0].unit, opened[0].skip, opened[0].batches
                for one in named(self._source.take(unit, batches), partial(self._source.parser.empty, unit.id)):
                    if one.is_last and (answer := self._source.lease()) is not None:
                        opened.append(self._open(answer))
                    if one.batch.index not in skip:
                        yield one
                opened.pop(0).batches.close()
        finally:
            for left in opened:
                left.batches.close()

    def _open(self, answer: Answer) -> _Opened:
        """Begin to read a unit that was leased."""
        unit = Unit(**answer["unit"])
        self._seen[unit.id] = unit.seen
        return _Opened(unit, frozenset(answer["skip"]), self._source.begin(unit))
