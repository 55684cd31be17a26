"""What a roll-out does next, decided from what is seen and nothing else.

A version is offered once every shard has enough replicas that hold it; those that hold the offered one, and so will be
asked for the next, are waited for as long as patience lasts. One that waits is superseded by the next, not queued; one
that was rolled back to stays until the roll-out is resumed.
"""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Replica:
    """What is known of one process of the store."""

    shard: int
    address: str
    versions: tuple[int, ...] = ()
    """Those it can answer for."""
    loading: int | None = None
    failed: int | None = None
    """The version that it could not load last,"""
    why: str | None = None
    """and why; or why it is not known what it holds."""
    is_there: bool = True
    url: str | None = None
    """Its HTTP face, for notices."""
    bytes_per_s: float | None = None
    """How fast it loaded its last base."""

    def lacks(self, version: int) -> str:
        """What it does instead of holding a version, in words."""
        if not self.is_there:
            return f"shard {self.shard} {self.address}: {self.why or 'does not answer'}"
        if self.failed == version:
            return f"shard {self.shard} {self.address}: cannot load {version}: {self.why}"
        if self.loading is not None:
            return f"shard {self.shard} {self.address}: loads {self.loading}"
        held = ", ".join(map(str, self.versions)) or "nothing"
        return f"shard {self.shard} {self.address}: has {held}"


@dataclass(frozen=True)
class Seen:
    """The repository and the store at one moment."""

    shards: tuple[tuple[Replica, ...], ...]
    current: int | None
    """The version that is offered."""
    offerable: tuple[int, ...]
    """Committed versions that may be offered, ascending."""
    is_held: bool = False
    wanted: int | None = None
    """What a rollback goes to, as long as it is not offered."""


class Decision(NamedTuple):
    """What comes next."""

    target: int | None
    """The version that replicas are to load."""
    offer: int | None
    """The one to offer now, if any."""
    text: str
    late: tuple[str, ...]
    """Replicas that lack the target, in words."""


def least_ready(num_replicas: int, min_ready: int | None) -> int:
    """How many replicas of a shard must hold a version: all but one, and at least one, if not set."""
    return min(num_replicas, min_ready) if min_ready is not None else max(num_replicas - 1, 1)


def decide(seen: Seen, min_ready: int | None = None, *, is_patient: bool = False) -> Decision:
    """The next step of the roll-out; with patience, once all replicas have a version that can be expected to."""
    target = _target(seen)
    if target is None:
        return Decision(None, None, "waiting for the first version", ())
    everyone = [replica for shard in seen.shards for replica in shard]
    late = tuple(replica.lacks(target) for replica in everyone if target not in replica.versions)
    candidates = [target] if seen.is_held else [version for version in seen.offerable if version > (seen.current or 0)]
    ready = [version for version in candidates if _is_ready(seen, version, min_ready)]
    if is_patient:
        ready = [version for version in ready if not any(_is_coming(seen, one, version) for one in everyone)]
    offer = max(ready, default=None)
    if offer == seen.current:
        offer = None
    return Decision(target, offer, _words(seen, target, offer, late), late)


def _target(seen: Seen) -> int | None:
    if seen.is_held:
        return seen.current if seen.wanted is None else seen.wanted
    newest = max(seen.offerable, default=None)
    # one that is offered already may be newer than all that the gate lets through
    return max((version for version in (newest, seen.current) if version is not None), default=None)


def _is_ready(seen: Seen, version: int, min_ready: int | None) -> bool:
    held = [sum(version in replica.versions for replica in shard) for shard in seen.shards]
    return all(
        count >= least_ready(len(shard), min_ready) for count, shard in zip(held, seen.shards, strict=True)
    ) and bool(seen.shards)


def _is_coming(seen: Seen, replica: Replica, version: int) -> bool:
    """Whether a replica that is asked now lacks a version that it is about to have."""
    is_asked = replica.is_there and (seen.current is None or seen.current in replica.versions)
    return is_asked and version not in replica.versions and replica.failed != version


def _words(seen: Seen, target: int, offer: int | None, late: tuple[str, ...]) -> str:
    num_replicas = sum(map(len, seen.shards))
    loaded = f"{num_replicas - len(late)} of {num_replicas}"
    held = ", held by a rollback" if seen.is_held else ""
    if offer is not None:
        behind = f", {len(late)} of {num_replicas} replicas are late" if offer == target and late else ""
        more = f", loading {target}: {loaded}" if offer != target else ""
        return f"switched to {offer}{behind}{more}{held}"
    if seen.current == target:
        return f"version {target} is offered{held}, {loaded} replicas have it"
    return f"loading {target}: {loaded} replicas have it{held}"
