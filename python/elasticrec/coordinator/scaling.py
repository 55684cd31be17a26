"""Scaling: the requested number of shards and trainers, and the move of the partitions to another number of shards.

No unit is leased during a move. When the units in flight are pushed or given back, or after a grace period, a
checkpoint is taken. Then the new map is journaled: the old shards are no longer members, and the new ones load the
checkpoint. Batches that were pushed after its cut are replayed, as after the death of a shard.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elasticrec.errors import ConfigError
from elasticrec.journal import Entry
from elasticrec.net.messages import ProcessCounts

MAX_TRAINERS = 65536

# Time for the units in flight to finish before the checkpoint is taken.
_GRACE_S = 2.0
# Give up the move after this many failed checkpoints, because no unit is leased during a move.
_MAX_FAILURES = 2


@dataclass(frozen=True)
class ProcessTarget:
    """The requested number of processes of each role."""

    servers: int
    trainers: int

    def change(self, servers: int | None, trainers: int | None, num_partitions: int) -> "ProcessTarget":
        """Return the changed numbers; refuse numbers that the run cannot have."""
        if servers is None and trainers is None:
            raise ConfigError("scale: expected a number of servers or of trainers, got neither")
        if servers is not None and not 1 <= servers <= num_partitions:
            raise ConfigError(f"servers: expected 1 to {num_partitions}, the number of partitions, got {servers}")
        if trainers is not None and not 1 <= trainers <= MAX_TRAINERS:
            raise ConfigError(f"trainers: expected 1 to {MAX_TRAINERS}, got {trainers}")
        return ProcessTarget(
            self.servers if servers is None else servers, self.trainers if trainers is None else trainers
        )

    def counts(self) -> ProcessCounts:
        """Return the numbers for a response."""
        return {"servers": self.servers, "trainers": self.trainers}

    def entry(self, kind: str = "wanted") -> Entry:
        """Return the entry for the journal."""
        return {"kind": kind, "servers": self.servers, "trainers": self.trainers}

    @classmethod
    def last(cls, entries: list[Entry], kind: str) -> "ProcessTarget | None":
        """Return the numbers in the last entry of this kind, or None."""
        found = [entry for entry in entries if entry["kind"] == kind]
        return cls(found[-1]["servers"], found[-1]["trainers"]) if found else None


def wanted_of(entries: list[Entry], job: ProcessTarget) -> ProcessTarget:
    """Return the numbers for a run that is resumed: the last ones requested, unless the job file has changed since."""
    wanted, before = ProcessTarget.last(entries, "wanted") or job, ProcessTarget.last(entries, "job") or job
    return ProcessTarget(
        job.servers if job.servers != before.servers else wanted.servers,
        job.trainers if job.trainers != before.trainers else wanted.trainers,
    )


@dataclass(frozen=True)
class MoveHooks:
    """The functions of the checkpoints that a move uses."""

    request: Callable[[], int]
    is_committed: Callable[[int], bool]
    num_failures: Callable[[], int]
    """Consecutive failures, without those that were caused by the death of a shard."""


class Move:
    """One move of the partitions, from the request until the map changes."""

    def __init__(self, servers: int, now: float, hooks: MoveHooks) -> None:
        self.servers = servers
        self._save_at = now + _GRACE_S
        self._hooks = hooks
        self._failures_before = hooks.num_failures()
        self._ticket: int | None = None

    def advance(self, now: float, leases: dict[int, Any]) -> bool:
        """Request the checkpoint when it is time; return whether it is written and the map may change."""
        if self._ticket is None:
            if not leases or now >= self._save_at:
                self._ticket = self._hooks.request()
            return False
        return self._hooks.is_committed(self._ticket)

    @property
    def is_hopeless(self) -> bool:
        """Whether checkpoints fail repeatedly."""
        return self._hooks.num_failures() - self._failures_before >= _MAX_FAILURES
