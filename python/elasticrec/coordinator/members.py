"""Members: who is a shard or a trainer of the run, until when, and which partitions are whose.

A shard applies only while its lease runs, which it counts from when it *sent* a heartbeat. Here the lease is counted
from when the heartbeat came, and a margin longer: once it is over here, the shard has stopped, and can be replaced.
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

Role = Literal["ps", "trainer"]
NAMES: dict[Role, str] = {"ps": "shard", "trainer": "trainer"}


@dataclass(frozen=True)
class Timing:
    """How long a member may be silent."""

    lease_s: float = 3.0
    margin_s: float = 0.5
    """What clocks may differ in speed over a lease, and more."""
    heartbeat_s: float = 0.5
    hurry_s: float = 0.05
    """Between heartbeats of shards whose report somebody waits for."""
    forget_s: float = 60.0
    """A silent trainer is kept in mind for so long."""


@dataclass(frozen=True)
class PartitionMap:
    """Which shard has which partitions."""

    num_partitions: int
    servers: int
    epoch: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.servers <= self.num_partitions:
            raise ConfigError(
                f"servers: expected 1 to {self.num_partitions}, the number of partitions, got {self.servers}"
            )

    def owned(self, index: int) -> range:
        """The partitions of a shard."""
        partitions, servers = self.num_partitions, self.servers
        return range(index * partitions // servers, (index + 1) * partitions // servers)


@dataclass
class Member:
    """A process with a place in the run."""

    role: Role
    index: int
    incarnation: int
    nonce: str
    until: float
    """From then on its lease has certainly run out."""
    heard: bool
    """By this coordinator, not only by the one before."""
    address: str | None = None
    state: str = "loading"
    sequence: int = -1
    figures: dict[str, Any] = field(default_factory=dict)
    rate: Rate = field(default_factory=Rate)
    """Of the samples that a trainer pushes."""

    @property
    def name(self) -> str:
        """Such as `shard 0`."""
        return f"{NAMES[self.role]} {self.index}"


@dataclass(frozen=True)
class Wait:
    """Not now."""

    seconds: float
    why: str


class Members:
    """Registrations and heartbeats. What must not be forgotten goes through `write` before it counts."""

    def __init__(self, timing: Timing, clock: Callable[[], float], write: Callable[[Entry], None]) -> None:
        self.timing = timing
        self._clock = clock
        self._write = write
        self._map: PartitionMap | None = None
        self._members: dict[int, Member] = {}
        self._used: set[int] = set()
        # Shards of an earlier map whose leases may still run.
        self._retired: dict[int, Member] = {}
        self.coming = 0
        """Shards of the next map, while the partitions move."""
        self.num_started: Counter[Role] = Counter()
        """Processes that ever took a place."""
        # Places of this map that somebody has had.
        self._held: set[int] = set()
        self.going_back: set[int] = set()
        """Where all shards go back together: places whose shard has to load the last checkpoint, as the one did that
        was replaced."""

    @property
    def map(self) -> PartitionMap:
        """The map in force."""
        assert self._map is not None, "a run has a map before it has members"
        return self._map

    def replay(self, entry: Entry) -> None:
        """Take an entry of the journal in: whoever was a member may still be one."""
        match entry["kind"]:
            case "map":
                self._set_map(PartitionMap(entry["num_partitions"], entry["servers"], entry["epoch"]))
            case "member":
                fields = {key: entry[key] for key in ("role", "index", "incarnation", "nonce")}
                self._add(Member(**fields, until=self._lease_end(), heard=False))
            case "left":
                self._remove(entry["incarnation"])

    def set_map(self, servers: int, num_partitions: int | None = None) -> None:
        """Spread the partitions over another number of shards; those of the old map are members no more."""
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
        self._held, self.going_back = set(), set()

    def register(self, role: Role, nonce: str, index: int | None = None) -> Member | Wait:
        """Give a place to a process; one that asks again gets the same again."""
        for member in self._members.values():
            if (member.role, member.nonce) == (role, nonce):
                return self._touch(member)
        place = self._shard_place(index) if role == "ps" else self._trainer_place()
        if isinstance(place, Wait):
            return place
        incarnation = self._new_incarnation()
        self._write({"kind": "member", "role": role, "index": place, "incarnation": incarnation, "nonce": nonce})
        member = Member(role, place, incarnation, nonce, until=self._lease_end(), heard=True)
        self._add(member)
        return member

    def _shard_place(self, index: int | None) -> int | Wait:
        """A place whose holder has certainly stopped."""
        servers = self.map.servers
        if index is not None and servers <= index < self.coming:
            return Wait(self.timing.heartbeat_s, f"the partitions move to {self.coming} shards")
        if index is not None and index >= servers:
            raise SurplusError(f"register: index: expected a shard below {servers}, got {index}")
        now = self._clock()
        leaving = [member for member in self._retired.values() if member.until > now]
        if leaving:
            last = max(member.until for member in leaving)
            return Wait(last - now, f"{len(leaving)} shards of the map before may still apply")
        waits = []
        for place in range(servers) if index is None else [index]:
            holder = self.shard(place)
            if holder is None or holder.until <= now:
                return place
            waits.append(holder.until - now)
        which = f"all {servers} shards are" if index is None else f"shard {index} is"
        return Wait(min(waits), f"{which} taken, the lease runs out in {min(waits):.1f} s at the earliest")

    def _trainer_place(self) -> int:
        taken = {member.index for member in self.of("trainer")}
        return next(place for place in range(len(taken) + 1) if place not in taken)

    def _new_incarnation(self) -> int:
        """Random, so that no two coordinators can give the same, and never used twice."""
        while True:
            incarnation = secrets.randbits(64)
            if incarnation and incarnation not in self._used:
                return incarnation

    def _add(self, member: Member) -> None:
        if member.role == "ps" and (before := self.shard(member.index)):
            del self._members[before.incarnation]
        if member.role == "ps":
            self._note_start(member.index)
        self._used.add(member.incarnation)
        self.num_started[member.role] += 1
        self._members[member.incarnation] = member

    def _note_start(self, place: int) -> None:
        """Of the journal's entries alone, so that the next coordinator comes to the same."""
        if place in self.going_back:
            self.going_back.discard(place)
        elif place in self._held:
            self.going_back = set(range(self.map.servers)) - {place}
        self._held.add(place)

    def heartbeat(self, incarnation: int) -> Member:
        """Hear of a member: its lease begins again. One whose place was given away is refused."""
        return self._touch(self.get(incarnation))

    def get(self, incarnation: int) -> Member:
        """A member by its incarnation."""
        member = self._members.get(incarnation)
        if member is None:
            if incarnation in self._retired:
                raise MovedError(f"incarnation {incarnation}: the partitions moved to {self.map.servers} shards")
            known = "its place was given to another process" if incarnation in self._used else "it never registered"
            raise FencedError(f"incarnation {incarnation}: not a member: {known}")
        return member

    def leave(self, incarnation: int) -> None:
        """A member has stopped and says so: nobody has to wait for its lease."""
        if incarnation in self._members or incarnation in self._retired:
            self._write({"kind": "left", "incarnation": incarnation})
            self._remove(incarnation)

    def forget(self) -> list[Member]:
        """Drop trainers that have been silent for long; a shard is kept until another one has its place."""
        now = self._clock()
        gone = [member for member in self.of("trainer") if member.until + self.timing.forget_s <= now]
        for member in gone:
            self.leave(member.incarnation)
        return gone

    def _remove(self, incarnation: int) -> None:
        self._members.pop(incarnation, None)
        self._retired.pop(incarnation, None)

    def _touch(self, member: Member) -> Member:
        member.heard = True
        member.until = self._lease_end()
        return member

    def _lease_end(self) -> float:
        return self._clock() + self.timing.lease_s + self.timing.margin_s

    def of(self, role: Role) -> Iterator[Member]:
        """The members of a role."""
        return (member for member in tuple(self._members.values()) if member.role == role)

    def shard(self, index: int) -> Member | None:
        """Who has the place of a shard, alive or not."""
        return next((member for member in self.of("ps") if member.index == index), None)

    def is_alive(self, member: Member) -> bool:
        """Whether it was heard of in time."""
        return member.heard and member.until > self._clock()

    def lease_left_s(self, member: Member) -> float:
        """Until it counts as gone."""
        return max(member.until - self._clock(), 0.0)

    def is_unheard(self, member: Member) -> bool:
        """Whether only an earlier coordinator heard of it, and it may still come back with what it has."""
        return not member.heard and member.until > self._clock()

    def unheard(self) -> list[Member]:
        """Members that may still come back."""
        return [member for member in self._members.values() if self.is_unheard(member)]
