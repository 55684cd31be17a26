"""Placement: which shard owns which partitions, and which shards still have to write their part."""

from collections.abc import Container, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ShardOwner:
    """The owner of a shard when a checkpoint or a publish began, and its partitions."""

    incarnation: int
    partitions: range


def partitions_of(shard: int, num_shards: int, num_partitions: int) -> range:
    """Return the partitions of a shard; every partition belongs to one shard."""
    return range(shard * num_partitions // num_shards, (shard + 1) * num_partitions // num_shards)


def is_outstanding(owners: Mapping[int, ShardOwner], parts: Container[int], index: int, incarnation: int) -> bool:
    """Return whether a shard still has to write its part of a checkpoint or of a version.

    `parts` has the indexes of the parts that are written. A shard that is not the owner has none to write.
    """
    owner = owners.get(index)
    return owner is not None and owner.incarnation == incarnation and index not in parts
