"""Scaling: how many shards and trainers the run shall have, and how the partitions move to another number of shards.

No unit is leased meanwhile. When those in flight are pushed or given back, or after a while, a checkpoint is taken;
then the new map is written down: the old shards are members no more, the new ones load that checkpoint. What was pushed
behind its cut is replayed, as after a death.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elasticrec.errors import ConfigError
from elasticrec.journal import Entry

MAX_TRAINERS = 65536

# So long units in flight may go on to their ends before the checkpoint is cut through them.
_GRACE_S = 2.0
# A disk that takes no checkpoint must not hold the training up.
_MAX_FAILURES = 2


@dataclass(frozen=True)
class Wanted:
    """How many of each role the run shall have."""

    servers: int
    trainers: int

    def change(self, servers: int | None, trainers: int | None, num_partitions: int) -> "Wanted":
        """Other numbers, checked."""
        if servers is None and trainers is None:
            raise ConfigError("scale: expected a number of servers or of trainers, got neither")
        if servers is not None and not 1 <= servers <= num_partitions:
            raise ConfigError(f"servers: expected 1 to {num_partitions}, the number of partitions, got {servers}")
        if trainers is not None and not 1 <= trainers <= MAX_TRAINERS:
            raise ConfigError(f"trainers: expected 1 to {MAX_TRAINERS}, got {trainers}")
        return Wanted(self.servers if servers is None else servers, self.trainers if trainers is None else trainers)

    def entry(self, kind: str = "wanted") -> Entry:
        """For the journal."""
        return {"kind": kind, "servers": self.servers, "trainers": self.trainers}

    @classmethod
    def last(cls, entries: list[Entry], kind: str) -> "Wanted | None":
        """The last entry of a journal, if there is one."""
        found = [entry for entry in entries if entry["kind"] == kind]
        return cls(found[-1]["servers"], found[-1]["trainers"]) if found else None


def wanted_of(entries: list[Entry], job: Wanted) -> Wanted:
    """What a run shall have that starts again: what was wanted last, unless the job says otherwise than it did."""
    wanted, before = Wanted.last(entries, "wanted") or job, Wanted.last(entries, "job") or job
    return Wanted(
        job.servers if job.servers != before.servers else wanted.servers,
        job.trainers if job.trainers != before.trainers else wanted.trainers,
    )


@dataclass(frozen=True)
class Saving:
    """What a move needs of the checkpoints."""

    want: Callable[[], int]
    is_committed: Callable[[int], bool]
    num_failures: Callable[[], int]
    """In a row, for reasons of their own."""


class Move:
    """One move of the partitions, from the moment at which it is wanted until the map is changed."""

    def __init__(self, servers: int, now: float, saving: Saving) -> None:
        self.servers = servers
        self._cut_at = now + _GRACE_S
        self._saving = saving
        self._failures_before = saving.num_failures()
        self._ticket: int | None = None

    def advance(self, now: float, leases: dict[int, Any]) -> bool:
        """Go a step on; whether all is saved and the map may change."""
        if self._ticket is None:
            if not leases or now >= self._cut_at:
                self._ticket = self._saving.want()
            return False
        return self._saving.is_committed(self._ticket)

    @property
    def is_hopeless(self) -> bool:
        """Whether checkpoints fail again and again."""
        return self._saving.num_failures() - self._failures_before >= _MAX_FAILURES
