"""Batches of a unit one by one or in merge groups; every trainer splits a unit in the same way."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from elasticrec import _core


@dataclass(frozen=True)
class UnitBatch:
    """A batch, and whether it is the last of its unit."""

    batch: _core.Batch
    is_last: bool


@dataclass(frozen=True)
class MergeGroup:
    """Batches of a unit that are pushed as one."""

    index: int
    batches: tuple[_core.Batch, ...]
    is_last: bool


def split_batches(batches: Iterable[_core.Batch], empty: Callable[[], _core.Batch]) -> Iterator[UnitBatch]:
    """Yield the batches of a unit with the last one marked; a unit without records has one empty batch."""
    for group in split_groups(batches, 1, empty):
        yield UnitBatch(group.batches[0], group.is_last)


def split_groups(batches: Iterable[_core.Batch], size: int, empty: Callable[[], _core.Batch]) -> Iterator[MergeGroup]:
    """Yield groups of `size` batches of a unit with the last one marked; a unit without records has one empty batch."""
    groups = _chunks(batches, size)
    chunk = next(groups, None)
    if chunk is None:
        yield MergeGroup(0, (empty(),), is_last=True)
    index = 0
    while chunk is not None:
        following = next(groups, None)
        yield MergeGroup(index, chunk, is_last=following is None)
        chunk, index = following, index + 1


def _chunks(batches: Iterable[_core.Batch], size: int) -> Iterator[tuple[_core.Batch, ...]]:
    iterator = iter(batches)
    while chunk := tuple(islice(iterator, size)):
        yield chunk
