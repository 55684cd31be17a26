"""Names of pushes: the batches of a unit one by one, or in groups of k; the same cut whoever runs the unit."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from elasticrec import _core


@dataclass(frozen=True)
class Named:
    """A batch, and whether no other one of its unit comes behind it."""

    batch: _core.Batch
    is_last: bool


@dataclass(frozen=True)
class Group:
    """Batches of a unit that are pushed as one."""

    index: int
    batches: tuple[_core.Batch, ...]
    is_last: bool


def named(batches: Iterable[_core.Batch], empty: Callable[[], _core.Batch]) -> Iterator[Named]:
    """The batches of a unit, the last one marked; an empty one for a unit without any."""
    for group in grouped(batches, 1, empty):
        yield Named(group.batches[0], group.is_last)


def grouped(batches: Iterable[_core.Batch], size: int, empty: Callable[[], _core.Batch]) -> Iterator[Group]:
    """Groups of batches [jk, (j+1)k) of a unit, the last one marked; one of an empty batch for a unit without any."""
    groups = _chunks(batches, size)
    chunk = next(groups, None)
    if chunk is None:
        yield Group(0, (empty(),), is_last=True)
    index = 0
    while chunk is not None:
        following = next(groups, None)
        yield Group(index, chunk, is_last=following is None)
        chunk, index = following, index + 1


def _chunks(batches: Iterable[_core.Batch], size: int) -> Iterator[tuple[_core.Batch, ...]]:
    iterator = iter(batches)
    while chunk := tuple(islice(iterator, size)):
        yield chunk
