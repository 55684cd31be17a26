"""Work: which unit a trainer gets. A unit is complete when the present owner of every partition says so, not before."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from elasticrec.coordinator.members import PartitionMap
from elasticrec.errors import ModelError
from elasticrec.net.messages import Record, Records


@dataclass(frozen=True)
class WorkTiming:
    """How long a unit stays with somebody."""

    lease_s: float = 3.5
    """A trainer that is silent for so long has lost its unit."""
    settle_s: float = 2.0
    """After `done`, the time for the shards to report the unit; else it is leased again."""


@dataclass(frozen=True)
class Grant:
    """A unit for a trainer."""

    unit: int
    skip: tuple[int, ...]
    """Batches that every partition has: not to be pushed again."""
    is_replay: bool
    """Somebody had it before."""


@dataclass(frozen=True)
class NoWork:
    """Nothing for now, or for good."""

    why: str
    finished: bool = False


@dataclass
class _Lease:
    trainer: int
    until: float


@dataclass
class _Shard:
    incarnation: int | None = None
    records: Records | None = None
    """Unknown from its start until its first report."""
    is_up: bool = False


@dataclass
class Counters:
    """What happened to leases."""

    given: int = 0
    replayed: int = 0
    lapsed: int = 0
    given_back: int = 0
    unsettled: int = 0
    """Units that were `done` but that the shards did not report in time."""


class Work:
    """Leases. Passes are added one after the other, shards report, trainers ask."""

    def __init__(
        self,
        partitions: PartitionMap,
        num_passes: int,
        timing: WorkTiming,
        clock: Callable[[], float],
        group_size: int | None = None,
    ) -> None:
        self.counters = Counters()
        # Units whose batches make steps together: a group is complete before the next one begins.
        self._group_size = group_size
        self._num_passes = num_passes
        self._timing = timing
        self._clock = clock
        self._ends: list[int] = []
        # One behind the highest unit that was ever leased.
        self._leased_end = 0
        self._leases: dict[int, _Lease] = {}
        # Units that are done, as their trainers say, with the time until which the shards may say so.
        self._settling: dict[int, float] = {}
        # Units whose data is lost: shards are told, trainers do not get them.
        self._skipped: set[int] = set()
        # Units that come before all new ones; None until every shard has reported.
        self._behind: set[int] | None = None
        self._lacking: list[int] | None = None
        self.set_map(partitions)

    def set_map(self, partitions: PartitionMap) -> None:
        """Begin with shards that have not reported."""
        self._map = partitions
        self._shards = [_Shard() for _ in range(partitions.servers)]
        self._forget()

    def add_pass(self, end: int) -> None:
        """Units up to `end` may be leased, once all before are complete and the boundary is applied everywhere."""
        self._ends.append(end)

    def start_shard(self, index: int, incarnation: int) -> None:
        """A process took the place of a shard: what the one before had reported is worth nothing."""
        if self._shards[index].incarnation != incarnation:
            self._shards[index] = _Shard(incarnation)
            self._forget()

    def set_up(self, index: int, is_up: bool) -> None:
        """Whether a shard is there to be pushed to."""
        self._shards[index].is_up = is_up

    def _forget(self) -> None:
        self._behind = self._lacking = None

    def report(self, index: int, records: Records) -> None:
        """What the partitions of a shard have."""
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
            raise ModelError(f"shard {index}: has units below {last}, but only those below {planned} are planned")

    def group_of(self, unit: int) -> range | None:
        """The units with which a unit makes steps; none if a push is a step of its own."""
        if self._group_size is None:
            return None
        start = max((end for end in self._ends if end <= unit), default=0)
        stop = min((end for end in self._ends if end > unit), default=unit + 1)
        first = start + (unit - start) // self._group_size * self._group_size
        return range(first, min(first + self._group_size, stop))

    def is_between_groups(self) -> bool:
        """Whether all shards are at the end of the same group, and nobody works on the next one."""
        records = self._records()
        if self._unready() or any(record.open or record.complete for record in records):
            return False
        watermarks = {record.watermark for record in records}
        group = self.group_of(min(watermarks))
        if len(watermarks) > 1 or group is None or group.start not in watermarks:
            return False
        # who has not yet told that a unit of the group before is done works on nothing
        return not any(unit >= group.start for unit in (*self._leases, *self._settling))

    def lease(self, trainer: int, holds: Iterable[int] = (), share: int | None = None) -> Grant | NoWork:
        """The unit that this trainer shall take next; of a group at most a share, unless it waits for the others."""
        self.lapse()
        if why := self._unready():
            return NoWork(why)
        holds = set(holds)
        if share is not None and len(holds) >= share:
            return NoWork("it has its share of the group")
        lost = [unit for unit, lease in self._leases.items() if lease.trainer == trainer and unit not in holds]
        if lost:
            # it was leased, but the answer did not arrive
            return self._grant(min(lost), trainer, is_replay=False)
        unit = self._next()
        if unit is None:
            return NoWork("all units are complete", finished=True) if self.is_finished() else NoWork(self._why_none())
        is_replay = unit < self._leased_end
        self._raise_leased_end(unit + 1)
        self.counters.given += 1
        self.counters.replayed += is_replay
        return self._grant(unit, trainer, is_replay)

    def _grant(self, unit: int, trainer: int, is_replay: bool) -> Grant:
        self._leases[unit] = _Lease(trainer, self._clock() + self._timing.lease_s)
        return Grant(unit, self._skip(unit), is_replay)

    def _unready(self) -> str | None:
        for index, shard in enumerate(self._shards):
            if not shard.is_up or shard.records is None:
                return f"shard {index} is {'down' if not shard.is_up else 'starting'}"
        return None

    def _next(self) -> int | None:
        """First what a shard that went back lacks, then what was given back, then what is new."""
        limit = self._limit()
        if self._group_size is not None:
            # a step needs all units of its group, those that were leased before and those that were not
            first = min(record.watermark for record in self._records())
            taken = {*self._leases, *self._settling, *self._skipped}
            free = (unit for unit in range(first, limit) if not self._is_complete(unit))
            return next((unit for unit in free if unit not in taken), None)
        behind = self._find_behind()
        for unit in sorted(behind) if behind else self._find_lacking():
            if unit < limit and not (unit in self._leases or unit in self._settling or unit in self._skipped):
                return unit
        return self._leased_end if not behind and self._leased_end < limit else None

    def _why_none(self) -> str:
        behind = self._find_behind()
        if behind:
            return f"{len(behind)} units that a shard lacks come first, others have them"
        return "the other units of the pass are leased"

    def _limit(self) -> int:
        """Units from here on come behind a boundary that some partition has not applied."""
        records = self._records()
        applied = min(record.boundaries for record in records)
        limit = self._ends[applied] if applied < len(self._ends) else (self._ends[-1] if self._ends else 0)
        group = self.group_of(min(record.watermark for record in records))
        return limit if group is None else min(limit, group.stop)

    def _find_behind(self) -> set[int]:
        """What some partition lacks since a shard came (back), of all that was ever leased."""
        if self._behind is None:
            self._behind = set(self._find_lacking())
        elif self._behind:
            self._behind.intersection_update(self._find_lacking())
        return self._behind

    def _find_lacking(self) -> list[int]:
        """Units that were leased and that are not complete everywhere, in order."""
        if self._lacking is None:
            first = min(record.watermark for record in self._records())
            self._lacking = [unit for unit in range(first, self._leased_end) if not self._is_complete(unit)]
        return self._lacking

    def _records(self) -> list[Record]:
        return [record for shard in self._shards for _, record in shard.records or ()]

    def _is_complete(self, unit: int) -> bool:
        """Only what the present shards say counts, and all of them must have spoken."""
        known = all(shard.records is not None for shard in self._shards)
        return known and all(record.has(unit) for record in self._records())

    def _skip(self, unit: int) -> tuple[int, ...]:
        """Batches that all partitions have; those that have all of the unit lack none."""
        lacking = [record for record in self._records() if not record.has(unit)]
        parts = [set(record.open[unit].batches) if unit in record.open else set() for record in lacking]
        return tuple(sorted(set.intersection(*parts))) if parts else ()

    def done(self, trainer: int, unit: int) -> bool:
        """A trainer has pushed all of a unit: its lease ends. Whether the unit is complete the shards will tell."""
        lease = self._leases.get(unit)
        if lease is not None and lease.trainer != trainer:
            return False
        self._leases.pop(unit, None)
        if not self._is_complete(unit):
            self._settling[unit] = self._clock() + self._timing.settle_s
        return lease is not None

    def give_back(self, trainer: int, unit: int) -> bool:
        """A trainer does not go on with a unit."""
        lease = self._leases.get(unit)
        if lease is None or lease.trainer != trainer:
            return False
        del self._leases[unit]
        self.counters.given_back += 1
        return True

    def num_applied(self, unit: int) -> int:
        """Batches of an open unit that some partition has."""
        return max((len(record.open[unit].batches) for record in self._records() if unit in record.open), default=0)

    def skip(self, unit: int) -> None:
        """The data of a unit is lost."""
        self._leases.pop(unit, None)
        self._settling.pop(unit, None)
        self._skipped.add(unit)
        self._raise_leased_end(unit + 1)

    def hold(self, trainer: int, units: Iterable[int]) -> list[int]:
        """A trainer says what it works on: those go on being its own. Returns those that are not."""
        lost = []
        until = self._clock() + self._timing.lease_s
        for unit in units:
            lease = self._leases.get(unit)
            is_unknown = unit >= (self._ends[-1] if self._ends else 0) or unit in self._skipped
            if is_unknown or (lease is not None and lease.trainer != trainer):
                lost.append(unit)
            elif unit not in self._settling and not self._is_complete(unit):
                # also of a lease that lapsed, or that a coordinator before this one gave
                self._leases[unit] = _Lease(trainer, until)
                self._raise_leased_end(unit + 1)
        return lost

    def drop_trainer(self, trainer: int) -> None:
        """A trainer is gone: its units are free."""
        for unit in [unit for unit, lease in self._leases.items() if lease.trainer == trainer]:
            del self._leases[unit]
            self.counters.lapsed += 1

    def lapse(self) -> None:
        """End what has run out."""
        now = self._clock()
        for unit in [unit for unit, lease in self._leases.items() if lease.until <= now]:
            del self._leases[unit]
            self.counters.lapsed += 1
        for unit in [unit for unit, until in self._settling.items() if until <= now]:
            del self._settling[unit]
            self.counters.unsettled += 1

    def wants_report(self) -> bool:
        """Whether a trainer's `done` waits to be confirmed, and nothing else is to be given out meanwhile."""
        if not self._settling or self._unready():
            return bool(self._settling)
        return bool(self._find_behind()) or self._leased_end >= self._limit()

    def is_behind(self) -> bool:
        """Whether a shard lacks what others have, as far as is known: it went back, or has not told."""
        return self._unready() is not None or bool(self._find_behind())

    def has_begun(self) -> bool:
        """Whether some unit is complete everywhere, as far as is known."""
        return self._unready() is None and len(self._find_lacking()) < self._leased_end

    def num_boundaries(self) -> int:
        """That partitions have passed, of all together."""
        found = (one for shard in self._shards for one in shard.records or ())
        return sum(len(partitions) * record.boundaries for partitions, record in found)

    def is_pass_complete(self) -> bool:
        """Whether all units that are planned are complete and all boundaries applied, everywhere."""
        if self._unready() or not self._ends:
            return False
        return all(
            record.watermark >= self._ends[-1] and record.boundaries >= len(self._ends) for record in self._records()
        )

    def is_finished(self) -> bool:
        """Whether nothing of any pass is left."""
        return len(self._ends) >= self._num_passes and self.is_pass_complete()

    def figures(self) -> dict[str, int | None]:
        """For the status and the metrics."""
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
        """Trainers that have a unit."""
        return {lease.trainer for lease in self._leases.values()}

    def leases(self) -> dict[int, int]:
        """Trainer by unit."""
        return {unit: lease.trainer for unit, lease in sorted(self._leases.items())}
