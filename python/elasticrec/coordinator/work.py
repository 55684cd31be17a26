"""Leases of units to trainers. A unit is complete only when the current owners of all partitions report it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from elasticrec.coordinator.members import PartitionMap
from elasticrec.errors import ModelError
from elasticrec.net.messages import Record, Records, UnitFigures


@dataclass(frozen=True)
class WorkTiming:
    """Times after which a unit is leased again."""

    lease_s: float = 3.5
    """Time until the lease of a silent trainer expires."""
    settle_s: float = 2.0
    """Time for the shards to confirm a unit after its trainer reported it as done."""


@dataclass(frozen=True)
class Grant:
    """A unit that is leased to a trainer."""

    unit: int
    skip: tuple[int, ...]
    """Batches that every partition has applied, which the trainer skips."""
    is_replay: bool
    """Whether the unit was leased before."""


@dataclass(frozen=True)
class NoWork:
    """No unit is available now, or all are complete."""

    why: str


@dataclass
class _Lease:
    trainer: int
    until: float


@dataclass
class _Shard:
    incarnation: int | None = None
    records: Records | None = None
    """None until the first report of the shard's process."""
    is_up: bool = False


@dataclass
class Counters:
    """Numbers of leases: all, repeated, and ended early by reason."""

    given: int = 0
    replayed: int = 0
    lapsed: int = 0
    given_back: int = 0
    unsettled: int = 0
    """Units that were done, but not confirmed by the shards in time."""


class Work:
    """Leases units: passes add units, shards report what they have applied, and trainers request units."""

    def __init__(
        self,
        partitions: PartitionMap,
        num_passes: int,
        timing: WorkTiming,
        clock: Callable[[], float],
        group_size: int | None = None,
    ) -> None:
        self.counters = Counters()
        # Number of units whose batches make steps together: a group is complete before the next one begins.
        self._group_size = group_size
        self._num_passes = num_passes
        self._timing = timing
        self._clock = clock
        self._ends: list[int] = []
        # One past the highest unit that was ever leased.
        self._leased_end = 0
        self._leases: dict[int, _Lease] = {}
        # Units that their trainers reported as done, with the time limit for the confirmation by the shards.
        self._settling: dict[int, float] = {}
        # Units whose data is lost: shards skip them, trainers do not get them.
        self._skipped: set[int] = set()
        # Units that are leased before new ones; None until every shard has reported.
        self._behind: set[int] | None = None
        self._lacking: list[int] | None = None
        self.set_map(partitions)

    def set_map(self, partitions: PartitionMap) -> None:
        """Set the partition map; all shards have to report first."""
        self._map = partitions
        self._shards = [_Shard() for _ in range(partitions.servers)]
        self._reset_lacking()

    def add_pass(self, end: int) -> None:
        """Add the units up to `end`: leased once all earlier units are complete and the boundary is applied."""
        self._ends.append(end)

    def start_shard(self, index: int, incarnation: int) -> None:
        """Forget the report of a shard that was replaced by another process."""
        if self._shards[index].incarnation != incarnation:
            self._shards[index] = _Shard(incarnation)
            self._reset_lacking()

    def set_is_up(self, index: int, is_up: bool) -> None:
        """Set whether a shard accepts pushes."""
        self._shards[index].is_up = is_up

    def _reset_lacking(self) -> None:
        self._behind = self._lacking = None

    def report(self, index: int, records: Records) -> None:
        """Handle a shard's report of the batches that its partitions have applied."""
        shard = self._shards[index]
        self._check(index, records)
        shard.records = records
        self._raise_leased_end(max(record.end for _, record in records))
        for unit in [unit for unit in self._settling if self._is_complete(unit)]:
            del self._settling[unit]

    def _raise_leased_end(self, end: int) -> None:
        self._leased_end = max(self._leased_end, end)
        self._lacking = None

    def _check(self, index: int, records: Records) -> None:
        expected = list(self._map.owned(index))
        got = sorted(partition for partitions, _ in records for partition in partitions)
        if got != expected:
            raise ModelError(
                f"shard {index}: records: expected each partition of {expected[0]} to {expected[-1]} once, got {got}"
            )
        last = max(record.end for _, record in records)
        planned = self._ends[-1] if self._ends else 0
        if last > planned:
            raise ModelError(f"shard {index}: records: expected units below {planned}, got unit {last - 1}")

    def group_of(self, unit: int) -> range | None:
        """Return the group of units that makes steps together; None for strategies without groups."""
        if self._group_size is None:
            return None
        start = max((end for end in self._ends if end <= unit), default=0)
        stop = min((end for end in self._ends if end > unit), default=unit + 1)
        first = start + (unit - start) // self._group_size * self._group_size
        return range(first, min(first + self._group_size, stop))

    def is_between_groups(self) -> bool:
        """Whether all shards are at the end of the same group, and no unit of the next group is leased."""
        records = self._records()
        if self._unready_reason() or any(record.open or record.complete for record in records):
            return False
        watermarks = {record.watermark for record in records}
        group = self.group_of(min(watermarks))
        if len(watermarks) > 1 or group is None or group.start not in watermarks:
            return False
        # Leases of the previous group do not count: their trainers have only not reported the end yet.
        return not any(unit >= group.start for unit in (*self._leases, *self._settling))

    def lease(self, trainer: int, holds: Iterable[int] = (), share: int | None = None) -> Grant | NoWork:
        """Lease a unit to a trainer; `share` limits how many units of a group it may hold."""
        self.expire_leases()
        if why := self._unready_reason():
            return NoWork(why)
        holds = set(holds)
        if share is not None and len(holds) >= share:
            return NoWork("the trainer has its share of the group")
        lost = [unit for unit, lease in self._leases.items() if lease.trainer == trainer and unit not in holds]
        if lost:
            # The trainer did not receive the response.
            return self._grant(min(lost), trainer, is_replay=False)
        unit = self._next()
        if unit is None:
            return NoWork("all units are complete" if self.is_finished() else self._wait_reason())
        is_replay = unit < self._leased_end
        self._raise_leased_end(unit + 1)
        self.counters.given += 1
        self.counters.replayed += is_replay
        return self._grant(unit, trainer, is_replay)

    def _grant(self, unit: int, trainer: int, is_replay: bool) -> Grant:
        self._leases[unit] = _Lease(trainer, self._clock() + self._timing.lease_s)
        return Grant(unit, self._skip(unit), is_replay)

    def _unready_reason(self) -> str | None:
        """Return why no unit can be leased: a shard is down or has not reported; else None."""
        for index, shard in enumerate(self._shards):
            if not shard.is_up or shard.records is None:
                return f"shard {index} is {'down' if not shard.is_up else 'starting'}"
        return None

    def _next(self) -> int | None:
        """Return the next unit: first units that a restored shard lacks, then returned units, then new units."""
        limit = self._limit()
        if self._group_size is not None:
            # A step needs all units of its group, whether they were leased before or not.
            first = min(record.watermark for record in self._records())
            taken = {*self._leases, *self._settling, *self._skipped}
            free = (unit for unit in range(first, limit) if not self._is_complete(unit))
            return next((unit for unit in free if unit not in taken), None)
        behind = self._find_behind()
        for unit in sorted(behind) if behind else self._find_lacking():
            if unit < limit and not (unit in self._leases or unit in self._settling or unit in self._skipped):
                return unit
        return self._leased_end if not behind and self._leased_end < limit else None

    def _wait_reason(self) -> str:
        """Return why a trainer has to wait, although not all units are complete."""
        behind = self._find_behind()
        if behind:
            return f"waiting for {len(behind)} leased units that a restored shard lacks"
        return "the other units of the pass are leased"

    def _limit(self) -> int:
        """Return the first unit that must wait for a boundary which some partition has not applied."""
        records = self._records()
        applied = min(record.boundaries for record in records)
        limit = self._ends[applied] if applied < len(self._ends) else (self._ends[-1] if self._ends else 0)
        group = self.group_of(min(record.watermark for record in records))
        return limit if group is None else min(limit, group.stop)

    def _find_behind(self) -> set[int]:
        """Return the units, among all that were ever leased, that some partition lacks since a shard was restored."""
        if self._behind is None:
            self._behind = set(self._find_lacking())
        elif self._behind:
            self._behind.intersection_update(self._find_lacking())
        return self._behind

    def _find_lacking(self) -> list[int]:
        """Return the units that were leased and are not complete, in order."""
        if self._lacking is None:
            first = min(record.watermark for record in self._records())
            self._lacking = [unit for unit in range(first, self._leased_end) if not self._is_complete(unit)]
        return self._lacking

    def _records(self) -> list[Record]:
        return [record for shard in self._shards for _, record in shard.records or ()]

    def _is_complete(self, unit: int) -> bool:
        """Whether all present shards have reported that they have the unit."""
        known = all(shard.records is not None for shard in self._shards)
        return known and all(record.has(unit) for record in self._records())

    def _skip(self, unit: int) -> tuple[int, ...]:
        """Return the batches that no partition lacks."""
        lacking = [record for record in self._records() if not record.has(unit)]
        parts = [set(record.open[unit].batches) if unit in record.open else set() for record in lacking]
        return tuple(sorted(set.intersection(*parts))) if parts else ()

    def done(self, trainer: int, unit: int) -> bool:
        """End the lease of a unit that is pushed completely; return whether the trainer held it.

        The unit is complete once the shards confirm it.
        """
        lease = self._leases.get(unit)
        if lease is not None and lease.trainer != trainer:
            return False
        self._leases.pop(unit, None)
        if not self._is_complete(unit):
            self._settling[unit] = self._clock() + self._timing.settle_s
        return lease is not None

    def give_back(self, trainer: int, unit: int) -> bool:
        """End the lease of an unfinished unit; return whether the trainer held it."""
        lease = self._leases.get(unit)
        if lease is None or lease.trainer != trainer:
            return False
        del self._leases[unit]
        self.counters.given_back += 1
        return True

    def num_applied(self, unit: int) -> int:
        """Return the largest number of batches of an open unit that a partition has applied."""
        return max((len(record.open[unit].batches) for record in self._records() if unit in record.open), default=0)

    def skip(self, unit: int) -> None:
        """Never lease a unit again: its data is lost."""
        self._leases.pop(unit, None)
        self._settling.pop(unit, None)
        self._skipped.add(unit)
        self._raise_leased_end(unit + 1)

    def renew(self, trainer: int, units: Iterable[int]) -> list[int]:
        """Renew the leases of the units that a trainer works on; return the units that it does not hold."""
        lost = []
        until = self._clock() + self._timing.lease_s
        for unit in units:
            lease = self._leases.get(unit)
            is_unknown = unit >= (self._ends[-1] if self._ends else 0) or unit in self._skipped
            if is_unknown or (lease is not None and lease.trainer != trainer):
                lost.append(unit)
            elif unit not in self._settling and not self._is_complete(unit):
                # This also restores an expired lease, and a lease of an earlier coordinator.
                self._leases[unit] = _Lease(trainer, until)
                self._raise_leased_end(unit + 1)
        return lost

    def drop_trainer(self, trainer: int) -> None:
        """End the leases of a trainer that has left."""
        for unit in [unit for unit, lease in self._leases.items() if lease.trainer == trainer]:
            del self._leases[unit]
            self.counters.lapsed += 1

    def expire_leases(self) -> None:
        """End expired leases, and stop waiting for overdue confirmations."""
        now = self._clock()
        for unit in [unit for unit, lease in self._leases.items() if lease.until <= now]:
            del self._leases[unit]
            self.counters.lapsed += 1
        for unit in [unit for unit, until in self._settling.items() if until <= now]:
            del self._settling[unit]
            self.counters.unsettled += 1

    def wants_report(self) -> bool:
        """Whether trainers are idle until the shards confirm units."""
        if not self._settling or self._unready_reason():
            return bool(self._settling)
        return bool(self._find_behind()) or self._leased_end >= self._limit()

    def is_behind(self) -> bool:
        """Whether a shard may lack batches that others have: it was restored, or has not reported."""
        return self._unready_reason() is not None or bool(self._find_behind())

    def has_begun(self) -> bool:
        """Whether at least one unit is known to be complete."""
        return self._unready_reason() is None and len(self._find_lacking()) < self._leased_end

    def num_boundaries(self) -> int:
        """Return the number of applied boundaries, summed over partitions."""
        found = (one for shard in self._shards for one in shard.records or ())
        return sum(len(partitions) * record.boundaries for partitions, record in found)

    def is_pass_complete(self) -> bool:
        """Whether all partitions have all planned units and all boundaries."""
        if self._unready_reason() or not self._ends:
            return False
        return all(
            record.watermark >= self._ends[-1] and record.boundaries >= len(self._ends) for record in self._records()
        )

    def is_finished(self) -> bool:
        """Whether all passes are complete."""
        return len(self._ends) >= self._num_passes and self.is_pass_complete()

    def figures(self) -> UnitFigures:
        """Return the numbers of units for the status and the metrics."""
        known = all(shard.records is not None for shard in self._shards)
        lacking = self._find_lacking() if known else []
        return {
            "planned": self._ends[-1] if self._ends else 0,
            "leased_ever": self._leased_end,
            "complete": self._leased_end - len(lacking) if known else None,
            "leased": len(self._leases),
            "settling": len(self._settling),
            "behind": len(self._find_behind()) if known else None,
        }

    def workers(self) -> set[int]:
        """Return the incarnations of the trainers that hold a unit."""
        return {lease.trainer for lease in self._leases.values()}

    def leases(self) -> dict[int, int]:
        """Return the incarnations of the trainers by unit."""
        return {unit: lease.trainer for unit, lease in sorted(self._leases.items())}
