"""Members: the shards and trainers of a run, their leases, and the partition map.

A shard applies pushes only while its lease runs, which it counts from the time it *sent* a heartbeat. The coordinator
counts the lease from the heartbeat's arrival, plus a margin: when it expires here, the shard has stopped and can be
replaced.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from elasticrec.coordinator.rate import Rate
from elasticrec.errors import ConfigError
from elasticrec.journal import Entry
from elasticrec.net.messages import FencedError, MovedError, SurplusError
from elasticrec.net.placement import partitions_of

Role = Literal["ps", "trainer"]
NAMES: dict[Role, str] = {"ps": "shard", "trainer": "trainer"}


@dataclass(frozen=True)
class Timing:
    """Times of leases and heartbeats."""

    lease_s: float = 3.0
    margin_s: float = 0.5
    """More than the drift between the clocks of two machines during a lease."""
    heartbeat_s: float = 0.5
    hurry_s: float = 0.05
    """Interval between heartbeats of shards while other members wait for their report."""
    forget_s: float = 60.0
    """Time from the end of a trainer's lease to its removal."""


@dataclass(frozen=True)
class PartitionMap:
    """Assigns ranges of partitions to shards."""

    num_partitions: int
    servers: int
    epoch: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.servers <= self.num_partitions:
            raise ConfigError(
                f"servers: expected 1 to {self.num_partitions}, the number of partitions, got {self.servers}"
            )

    def owned(self, index: int) -> range:
        """Return the partitions of a shard."""
        return partitions_of(index, self.servers, self.num_partitions)


@dataclass
class Member:
    """A registered process."""

    role: Role
    index: int
    incarnation: int
    nonce: str
    until: float
    """Time from which its lease has certainly expired."""
    is_heard: bool
    """Whether it has contacted this coordinator, not just an earlier one."""
    address: str | None = None
    state: str = "loading"
    sequence: int = -1
    figures: dict[str, Any] = field(default_factory=dict)
    rate: Rate = field(default_factory=Rate)
    """Rate of the samples that a trainer pushes."""

    @property
    def name(self) -> str:
        """The name for messages, such as `shard 0`."""
        return f"{NAMES[self.role]} {self.index}"


@dataclass(frozen=True)
class Delay:
    """The answer if no index is free: how long to wait, and why."""

    seconds: float
    why: str


class Members:
    """Registers members and renews their leases; changes are journaled through `write` before they take effect."""

    def __init__(self, timing: Timing, clock: Callable[[], float], write: Callable[[Entry], None]) -> None:
        self.timing = timing
        self._clock = clock
        self._write = write
        self._map: PartitionMap | None = None
        self._members: dict[int, Member] = {}
        self._used: set[int] = set()
        # Shards of earlier maps, whose leases may still be valid.
        self._retired: dict[int, Member] = {}
        self.num_next_shards = 0
        """Number of shards of the next map while the partitions move."""
        self.num_started: Counter[Role] = Counter()
        """Processes that have registered so far."""
        # Indexes of this map that have had a shard.
        self._used_indexes: set[int] = set()
        self.must_reload: set[int] = set()
        """Indexes of shards that must load the last checkpoint because another shard did (with groups only)."""

    @property
    def map(self) -> PartitionMap:
        """The current partition map."""
        assert self._map is not None, "a run has a map before it has members"
        return self._map

    def replay(self, entry: Entry) -> None:
        """Replay an entry of the journal; earlier members may still be alive."""
        match entry["kind"]:
            case "map":
                self._set_map(PartitionMap(entry["num_partitions"], entry["servers"], entry["epoch"]))
            case "member":
                fields = {key: entry[key] for key in ("role", "index", "incarnation", "nonce")}
                self._add(Member(**fields, until=self._lease_end(), is_heard=False))
            case "left":
                self._remove(entry["incarnation"])

    def set_map(self, servers: int, num_partitions: int | None = None) -> None:
        """Assign the partitions to another number of shards; the old shards are no longer members."""
        before = self._map
        after = PartitionMap(num_partitions or self.map.num_partitions, servers, 1 + (before.epoch if before else 0))
        self._write({"kind": "map", "num_partitions": after.num_partitions, "servers": servers, "epoch": after.epoch})
        self._set_map(after)

    def _set_map(self, new: PartitionMap) -> None:
        self._map = new
        shards = {number: member for number, member in self._members.items() if member.role == "ps"}
        self._retired |= shards
        for number in shards:
            del self._members[number]
        self._used_indexes, self.must_reload = set(), set()

    def register(self, role: Role, nonce: str, index: int | None = None) -> Member | Delay:
        """Give an index to a process; a repeated request with the same nonce gets the same index."""
        for member in self._members.values():
            if (member.role, member.nonce) == (role, nonce):
                return self._touch(member)
        free = self._free_shard_index(index) if role == "ps" else self._free_trainer_index()
        if isinstance(free, Delay):
            return free
        incarnation = self._new_incarnation()
        self._write({"kind": "member", "role": role, "index": free, "incarnation": incarnation, "nonce": nonce})
        member = Member(role, free, incarnation, nonce, until=self._lease_end(), is_heard=True)
        self._add(member)
        return member

    def _free_shard_index(self, index: int | None) -> int | Delay:
        """Return an index whose last shard has certainly stopped."""
        servers = self.map.servers
        if index is not None and servers <= index < self.num_next_shards:
            return Delay(self.timing.heartbeat_s, f"the partitions are moving to {self.num_next_shards} shards")
        if index is not None and index >= servers:
            raise SurplusError(f"register: index: expected a shard below {servers}, got {index}")
        now = self._clock()
        leaving = [member for member in self._retired.values() if member.until > now]
        if leaving:
            last = max(member.until for member in leaving)
            return Delay(last - now, f"{len(leaving)} shards of the previous map may still apply pushes")
        waits = []
        for candidate in range(servers) if index is None else [index]:
            holder = self.shard(candidate)
            if holder is None or holder.until <= now:
                return candidate
            waits.append(holder.until - now)
        which = f"all {servers} shards are" if index is None else f"shard {index} is"
        return Delay(min(waits), f"{which} taken, the lease expires in {min(waits):.1f} s at the earliest")

    def _free_trainer_index(self) -> int:
        taken = {member.index for member in self.of("trainer")}
        return next(index for index in range(len(taken) + 1) if index not in taken)

    def _new_incarnation(self) -> int:
        """Return a random number that no coordinator of this run has used."""
        while True:
            incarnation = secrets.randbits(64)
            if incarnation and incarnation not in self._used:
                return incarnation

    def _add(self, member: Member) -> None:
        if member.role == "ps" and (before := self.shard(member.index)):
            del self._members[before.incarnation]
        if member.role == "ps":
            self._record_start(member.index)
        self._used.add(member.incarnation)
        self.num_started[member.role] += 1
        self._members[member.incarnation] = member

    def _record_start(self, index: int) -> None:
        """Update `must_reload`, from the journal only, so that a later coordinator computes the same."""
        if index in self.must_reload:
            self.must_reload.discard(index)
        elif index in self._used_indexes:
            self.must_reload = set(range(self.map.servers)) - {index}
        self._used_indexes.add(index)

    def heartbeat(self, incarnation: int) -> Member:
        """Renew a member's lease; raise `FencedError` if it was replaced."""
        return self._touch(self.get(incarnation))

    def get(self, incarnation: int) -> Member:
        """Return a member by its incarnation."""
        member = self._members.get(incarnation)
        if member is None:
            if incarnation in self._retired:
                raise MovedError(f"incarnation {incarnation}: the partitions moved to {self.map.servers} shards")
            known = "it was replaced by another process" if incarnation in self._used else "it never registered"
            raise FencedError(f"incarnation {incarnation}: not a member: {known}")
        return member

    def leave(self, incarnation: int) -> None:
        """Remove a member that has stopped, so that nothing waits for its lease to expire."""
        if incarnation in self._members or incarnation in self._retired:
            self._write({"kind": "left", "incarnation": incarnation})
            self._remove(incarnation)

    def forget(self) -> list[Member]:
        """Remove trainers that have long been silent; a shard stays until another one has its index."""
        now = self._clock()
        gone = [member for member in self.of("trainer") if member.until + self.timing.forget_s <= now]
        for member in gone:
            self.leave(member.incarnation)
        return gone

    def _remove(self, incarnation: int) -> None:
        self._members.pop(incarnation, None)
        self._retired.pop(incarnation, None)

    def _touch(self, member: Member) -> Member:
        member.is_heard = True
        member.until = self._lease_end()
        return member

    def _lease_end(self) -> float:
        return self._clock() + self.timing.lease_s + self.timing.margin_s

    def of(self, role: Role) -> Iterator[Member]:
        """Yield the members of a role."""
        return (member for member in tuple(self._members.values()) if member.role == role)

    def shard(self, index: int) -> Member | None:
        """Return the shard with an index, alive or not."""
        return next((member for member in self.of("ps") if member.index == index), None)

    def is_alive(self, member: Member) -> bool:
        """Whether a member has sent a heartbeat to this coordinator in time."""
        return member.is_heard and member.until > self._clock()

    def lease_left_s(self, member: Member) -> float:
        """Return the time until a member's lease expires."""
        return max(member.until - self._clock(), 0.0)

    def is_unheard(self, member: Member) -> bool:
        """Whether a member of an earlier coordinator may still be alive with its units or rows."""
        return not member.is_heard and member.until > self._clock()

    def unheard(self) -> list[Member]:
        """Return the members that may still be alive, but have not contacted this coordinator."""
        return [member for member in self._members.values() if self.is_unheard(member)]
