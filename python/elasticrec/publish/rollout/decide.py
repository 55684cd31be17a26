"""Decide the next step of a rollout from the state of the repository and the store alone.

A version is offered once every shard has enough replicas that hold it. For a limited time, the rollout also waits for
the other replicas that receive traffic, which are the replicas with the current version. A newer version supersedes a
version that is still loading. After a rollback the version stays until the rollout is resumed.
"""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Replica:
    """The known state of one process of the store."""

    shard: int
    address: str
    versions: tuple[int, ...] = ()
    """Versions that it can serve."""
    loading: int | None = None
    failed: int | None = None
    """The version that it failed to load last."""
    why: str | None = None
    """Why loading failed, or why its state is unknown."""
    is_there: bool = True
    """Whether it answered."""
    url: str | None = None
    """Its HTTP address, for notifications."""
    bytes_per_s: float | None = None
    """Speed at which it loaded its last base."""

    def describe_missing(self, version: int) -> str:
        """Describe the replica's state, for a version that it does not hold."""
        if not self.is_there:
            return f"shard {self.shard} {self.address}: {self.why or 'does not answer'}"
        if self.failed == version:
            return f"shard {self.shard} {self.address}: cannot load {version}: {self.why}"
        if self.loading is not None:
            return f"shard {self.shard} {self.address}: loads {self.loading}"
        held = ", ".join(map(str, self.versions)) or "nothing"
        return f"shard {self.shard} {self.address}: has {held}"


@dataclass(frozen=True)
class RolloutState:
    """The state of the repository and the store at one moment."""

    shards: tuple[tuple[Replica, ...], ...]
    current: int | None
    """The current version."""
    offerable: tuple[int, ...]
    """Committed versions that passed the gate, ascending."""
    is_held: bool = False
    """Whether a rollback holds the model."""
    wanted: int | None = None
    """Target of a rollback that is not complete."""


class Decision(NamedTuple):
    """The next step of a rollout."""

    target: int | None
    """The version that replicas should load."""
    offer: int | None
    """The version to offer now, or None."""
    text: str
    """The step, human-readable."""
    late: tuple[str, ...]
    """Descriptions of replicas that do not hold the target."""


def num_required(num_replicas: int, min_ready: int | None) -> int:
    """Return how many replicas of a shard must hold a version: by default all but one, at least one."""
    return min(num_replicas, min_ready) if min_ready is not None else max(num_replicas - 1, 1)


def decide(state: RolloutState, min_ready: int | None = None, *, is_patient: bool = False) -> Decision:
    """Return the next step of the rollout. With `is_patient`, wait for all replicas that can still load a version."""
    target = _target(state)
    if target is None:
        return Decision(None, None, "waiting for the first version", ())
    replicas = [replica for shard in state.shards for replica in shard]
    late = tuple(replica.describe_missing(target) for replica in replicas if target not in replica.versions)
    candidates = (
        [target] if state.is_held else [version for version in state.offerable if version > (state.current or 0)]
    )
    ready = [version for version in candidates if _is_ready(state, version, min_ready)]
    if is_patient:
        ready = [version for version in ready if not any(_is_expected(state, one, version) for one in replicas)]
    offer = max(ready, default=None)
    if offer == state.current:
        offer = None
    return Decision(target, offer, _describe(state, target, offer, late), late)


def _target(state: RolloutState) -> int | None:
    if state.is_held:
        return state.current if state.wanted is None else state.wanted
    newest = max(state.offerable, default=None)
    # The current version may be newer than all versions that pass the gate.
    return max((version for version in (newest, state.current) if version is not None), default=None)


def _is_ready(state: RolloutState, version: int, min_ready: int | None) -> bool:
    held = [sum(version in replica.versions for replica in shard) for shard in state.shards]
    return all(
        count >= num_required(len(shard), min_ready) for count, shard in zip(held, state.shards, strict=True)
    ) and bool(state.shards)


def _is_expected(state: RolloutState, replica: Replica, version: int) -> bool:
    """Return whether a replica that receives traffic does not hold a version yet but can still load it."""
    has_traffic = replica.is_there and (state.current is None or state.current in replica.versions)
    return has_traffic and version not in replica.versions and replica.failed != version


def _describe(state: RolloutState, target: int, offer: int | None, late: tuple[str, ...]) -> str:
    num_replicas = sum(map(len, state.shards))
    loaded = f"{num_replicas - len(late)} of {num_replicas}"
    held = ", held by a rollback" if state.is_held else ""
    if offer is not None:
        behind = f", {len(late)} of {num_replicas} replicas are behind" if offer == target and late else ""
        more = f", loading {target}: {loaded}" if offer != target else ""
        return f"switched to {offer}{behind}{more}{held}"
    if state.current == target:
        return f"version {target} is current{held}: {loaded} replicas have it"
    return f"loading {target}: {loaded} replicas have it{held}"
