"""Work: which unit a trainer gets. A unit is complete when the present owner of every partition says so, not before."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from elasticrec.coordinator.members import PartitionMap
from elasticrec.coordinator.messages import Record, Records
from elasticrec.errors import ModelError


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

    def __init__(self, partitions: PartitionMap, num_passes: int, timing: WorkTiming, clock: Callable[[], float]):
        self.counters = Counters()
        self._num_passes = num_passes
        self._timing = timing
        self._clock = clock
        self._ends: list[int] = []
        # One behind the highest unit that was ever leased.
        self._leased_end = 0
        self._leases: dict[int, _Lease] = {}
        # Units that are done, as their trainers say, with the time until which the shards may say so.
        self._settling: dict[int, float] = {}
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

    def lease(self, trainer: int, holds: Iterable[int] = ()) -> Grant | NoWork:
        """The unit that this trainer shall take next."""
        self.lapse()
        if why := self._unready():
            return NoWork(why)
        lost = [unit for unit, lease in self._leases.items() if lease.trainer == trainer and unit not in set(holds)]
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
        behind = self._find_behind()
        for unit in sorted(behind) if behind else self._find_lacking():
            if unit < limit and unit not in self._leases and unit not in self._settling:
                return unit
        return self._leased_end if not behind and self._leased_end < limit else None

    def _why_none(self) -> str:
        behind = self._find_behind()
        if behind:
            return f"{len(behind)} units that a shard lacks come first, others have them"
        return "the other units of the pass are leased"

    def _limit(self) -> int:
        """Units from here on come behind a boundary that some partition has not applied."""
        applied = min(record.boundaries for record in self._records())
        return self._ends[applied] if applied < len(self._ends) else (self._ends[-1] if self._ends else 0)

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

    def hold(self, trainer: int, units: Iterable[int]) -> list[int]:
        """A trainer says what it works on: those go on being its own. Returns those that are not."""
        lost = []
        until = self._clock() + self._timing.lease_s
        for unit in units:
            lease = self._leases.get(unit)
            if unit >= (self._ends[-1] if self._ends else 0) or (lease is not None and lease.trainer != trainer):
                lost.append(unit)
            elif unit not in self._settling:
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

    def leases(self) -> dict[int, int]:
        """Trainer by unit."""
        return {unit: lease.trainer for unit, lease in sorted(self._leases.items())}
