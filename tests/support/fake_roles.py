"""Shards and trainers without sockets or tables, for tests of the coordinator; tests can kill and pause them."""

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticrec.coordinator.checkpoints import CheckpointSettings
from elasticrec.coordinator.coordinator import Coordinator
from elasticrec.coordinator.members import Timing
from elasticrec.coordinator.passes import PassPlan, Upkeep
from elasticrec.coordinator.settings import Settings
from elasticrec.data.units import UnitSplit
from elasticrec.errors import UnavailableError
from elasticrec.net import coordinator as client
from elasticrec.net import http_client, messages
from elasticrec.net.messages import FencedError
from elasticrec.run import Run

NUM_PARTITIONS = 5

KINDS: dict[str, type[Any]] = {
    "register": messages.RegisterRequest,
    "heartbeat": messages.Heartbeat,
    "lease": messages.LeaseRequest,
    "meet": messages.MeetRequest,
    "done": messages.UnitRequest,
    "give_back": messages.UnitRequest,
    "missing": messages.MissingRequest,
    "checkpoint": messages.CheckpointRequest,
    "scale": messages.ScaleRequest,
}


class Clock:
    """A clock that tests move forward."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def ask_twice(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return options of a client that gives up after two attempts, with sleeps that only move a fake clock."""
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=clock, sleep=sleep))
    monkeypatch.setattr(http_client, "random", SimpleNamespace(uniform=lambda _, longest: longest))
    for name in ("_FIRST_PAUSE_S", "_LONGEST_PAUSE_S"):
        monkeypatch.setattr(client, name, 60.0)
    return {"deadline_s": 119.0, "attempt_s": 59.0}


def plan_of(directory: Path, *, num_units: int = 6, num_passes: int = 1, upkeep: Upkeep | None = None) -> PassPlan:
    """Return passes over a file that splits into a number of units, in order."""
    path = directory / "train.txt"
    if not path.exists():
        path.write_text("1 0 5:0\n" * num_units)
    split = UnitSplit(unit_bytes=8, shuffle=False, seed=1, digest="d")
    return PassPlan(lambda _: [path], split, num_passes, upkeep or Upkeep())


def settings_of(plan: PassPlan, *, checkpoint_every_s: float = 2.0, trainers: int | None = None) -> Settings:
    """Return settings with short leases, for two shards."""
    settings = Settings(
        job="job-1",
        num_partitions=NUM_PARTITIONS,
        servers=2,
        plan=plan,
        timing=Timing(lease_s=1.0, margin_s=0.2, heartbeat_s=0.3, hurry_s=0.05, forget_s=10.0),
        settle_s=0.7,
        checkpoint=CheckpointSettings(every_s=checkpoint_every_s, keep=2, timeout_s=5.0, retry_s=0.5),
        stop_when_finished=False,
    )
    return settings if trainers is None else replace(settings, trainers=trainers)


def num_batches(unit: int) -> int:
    """Return the number of batches of a unit in these tests."""
    return 1 + unit % 3


def ask(coordinator: Coordinator, path: str, **body: Any) -> dict[str, Any]:
    """Send a request through the wire format and return the answer."""
    request = messages.parse(KINDS[path], json.dumps({"term": 0, **body}).encode())
    answer: dict[str, Any] = json.loads(json.dumps(getattr(coordinator, path)(request), allow_nan=False))
    return answer


class RefusedError(Exception):
    """A push that a shard refused."""


class NotYetError(Exception):
    """A push for a pass that has not begun at this shard."""


@dataclass
class Partition:
    """The events that a partition has applied, in order: batch names, and `["boundary", k]`."""

    events: list[list[Any]] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    """Units that were lost and cannot be pushed."""

    @property
    def boundaries(self) -> int:
        return sum(event[0] == "boundary" for event in self.events)

    def has(self, unit: int, batch: int) -> bool:
        return [unit, batch] in self.events

    def record(self) -> dict[str, Any]:
        applied: dict[int, dict[int, int]] = {}
        for event in self.events:
            if event[0] != "boundary":
                applied.setdefault(event[0], {})[event[1]] = 7
        complete = {unit for unit, batches in applied.items() if len(batches) == num_batches(unit)} | self.lost
        watermark = next(unit for unit in range(len(complete) + 1) if unit not in complete)
        opened = {
            str(unit): {
                "batches": {str(batch): checksum for batch, checksum in batches.items()},
                "num_batches": num_batches(unit) if num_batches(unit) - 1 in batches else None,
            }
            for unit, batches in applied.items()
            if unit not in complete
        }
        return {
            "watermark": watermark,
            "complete": sorted(unit for unit in complete if unit >= watermark),
            "open": opened,
            "boundaries": self.boundaries,
        }


@dataclass
class PublishedEvents:
    """The last publishes of a partition, each with the number of events that it contains."""

    basis: tuple[str, int] | None = None
    pending: tuple[str, int] | None = None

    def take(self, command: dict[str, Any], events: list[list[Any]]) -> dict[str, Any]:
        """Return the events since the committed publish, or all events."""
        if self.pending is not None and self.pending[0] == command["committed"]:
            self.basis = self.pending
        elif self.basis is not None and self.basis[0] != command["committed"]:
            self.basis = None
        self.pending = command["publish"], len(events)
        first = 0 if self.basis is None or command["base"] else self.basis[1]
        return {"whole": self.basis is None or command["base"], "first": first, "events": events[first:]}


class Shard:
    """A shard that registers, loads, sends heartbeats, and applies pushes while its lease is valid."""

    def __init__(self, cluster: "FakeCluster", nonce: str) -> None:
        self.cluster, self.nonce = cluster, nonce
        self.address = f"shard:{nonce}"
        self.alive = True
        self.paused_until = 0.0
        self.incarnation: int | None = None
        self.term = 0
        self.owned = range(0)
        self.partitions: dict[int, Partition] = {}
        self.boundaries: list[dict[str, Any]] = []
        self.skipped: list[int] = []
        self.lease_until = 0.0
        self.next_at = 0.0
        self.sequence = 0
        self.snapshot: dict[str, Any] | None = None
        self.published: dict[str, Any] | None = None
        self.publishes: dict[int, PublishedEvents] = {}
        self.stopped: str | None = None

    def step(self) -> None:
        """Do everything that is due."""
        clock = self.cluster.clock
        if not self.alive or clock() < max(self.paused_until, self.next_at):
            return
        try:
            self._register() if self.incarnation is None else self._heartbeat()
        except FencedError:
            self.alive = False
        except UnavailableError:
            self.next_at = clock() + 0.2

    def _register(self) -> None:
        sent = self.cluster.clock()
        answer = self.cluster.ask(self, "register", protocol=1, role="ps", nonce=self.nonce)
        self._obey(answer)
        if answer.get("incarnation") is None:
            self.next_at = self.cluster.clock() + min(answer.get("wait_s", 0.2), 0.2)
            return
        self.incarnation = answer["incarnation"]
        self.lease_until = sent + answer["lease_s"]
        self.owned = range(*answer["partitions"])
        self.partitions = {partition: Partition() for partition in self.owned}
        for part in (answer["checkpoint"] or {"parts": []})["parts"]:
            for number, events in json.loads(Path(part["dense"]).read_text()).items():
                if int(number) in self.partitions:
                    self.partitions[int(number)] = Partition(events)
        self.boundaries = answer["boundaries"]
        self._skip(answer["skipped"])
        self.cluster.note_start(self)

    def _heartbeat(self) -> None:
        sent = self.cluster.clock()
        self.sequence += 1
        answer = self.cluster.ask(
            self,
            "heartbeat",
            incarnation=self.incarnation,
            sequence=self.sequence,
            address=self.address,
            state="serving",
            boundaries=len(self.boundaries),
            skipped=len(self.skipped),
            status=self.status(),
            snapshot=self.snapshot,
            publish=self.published,
        )
        self.lease_until = sent + answer["lease_s"]
        self.next_at = self.cluster.clock() + answer["next_s"]
        self._obey(answer)

    def status(self) -> dict[str, Any]:
        """Return the status that a shard reports; partitions with equal records are grouped."""
        groups: dict[str, list[int]] = {}
        for number, partition in self.partitions.items():
            groups.setdefault(json.dumps(partition.record()), []).append(number)
        applied = sum(len(partition.events) for partition in self.partitions.values())
        return {
            "num_rows": 3,
            "applied": applied,
            "records": [[numbers, json.loads(record)] for record, numbers in groups.items()],
        }

    def _obey(self, answer: dict[str, Any]) -> None:
        for command in answer["commands"]:
            match command["command"]:
                case "stop":
                    self.stopped, self.alive = command["why"], False
                case "boundaries":
                    assert command["boundaries"][: len(self.boundaries)] == self.boundaries
                    self.boundaries = command["boundaries"]
                    self._apply_boundaries()
                case "skip":
                    self._skip(command["units"])
                case "snapshot":
                    self._write(command)
                case "publish":
                    self._publish(command)

    def _publish(self, command: dict[str, Any]) -> None:
        parts = {
            number: self.publishes.setdefault(number, PublishedEvents()).take(command, part.events)
            for number, part in self.partitions.items()
        }
        num_changed = sum(len(part["events"]) for part in parts.values())
        num_whole = sum(part["whole"] for part in parts.values())
        try:
            written = {kind: _write_file(Path(command[kind]), json.dumps(parts).encode()) for kind in ("cube", "dense")}
            result: dict[str, Any] = {"state": "written", **written, "changed": num_changed, "whole": num_whole}
        except OSError as error:
            result = {"state": "failed", "error": str(error)}
        self.published = {"publish": command["publish"], "incarnation": self.incarnation, **result}
        self.next_at = 0.0

    def _skip(self, units: list[int]) -> None:
        self.skipped = units
        for partition in self.partitions.values():
            partition.lost.update(units)
        self._apply_boundaries()

    def _write(self, command: dict[str, Any]) -> None:
        written = {}
        try:
            for kind in ("rows", "dense"):
                content = json.dumps({number: part.events for number, part in self.partitions.items()}).encode()
                written[kind] = _write_file(Path(command[kind]), content)
            result: dict[str, Any] = {"state": "written", **written}
        except OSError as error:
            result = {"state": "failed", "error": str(error)}
        self.snapshot = {"checkpoint": command["checkpoint"], "incarnation": self.incarnation, **result}
        self.next_at = 0.0

    def push(self, unit: int, batch: int) -> None:
        """Apply a batch to the partitions that do not have it yet."""
        clock = self.cluster.clock
        if not self.alive or clock() < self.paused_until or clock() >= self.lease_until:
            raise RefusedError
        num_boundaries = sum(boundary["before_unit"] <= unit for boundary in self.boundaries)
        behind = [partition for partition in self.partitions.values() if not partition.has(unit, batch)]
        if any(partition.boundaries < num_boundaries for partition in behind):
            raise NotYetError
        for partition in behind:
            partition.events.append([unit, batch])
        self._apply_boundaries()

    def _apply_boundaries(self) -> None:
        for partition in self.partitions.values():
            while (
                partition.boundaries < len(self.boundaries)
                and partition.record()["watermark"] >= self.boundaries[partition.boundaries]["before_unit"]
            ):
                partition.events.append(["boundary", partition.boundaries])


def _write_file(path: Path, content: bytes) -> dict[str, Any]:
    path.write_bytes(content)
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


class Trainer:
    """A trainer that leases a unit and pushes its batches to all shards, one per step."""

    def __init__(self, cluster: "FakeCluster", nonce: str) -> None:
        self.cluster, self.nonce = cluster, nonce
        self.alive = True
        self.incarnation: int | None = None
        self.term = 0
        self.next_at = self.next_beat = 0.0
        self.sequence = 0
        self.unit: int | None = None
        self.todo: list[int] = []
        self.shards: list[dict[str, Any]] = []
        self.tries = 0
        self.finished = False

    def step(self) -> None:
        """Do everything that is due."""
        if not self.alive or self.cluster.clock() < self.next_at:
            return
        try:
            if self.incarnation is None:
                answer = self.cluster.ask(self, "register", protocol=1, role="trainer", nonce=self.nonce)
                self.incarnation = answer["incarnation"]
            elif self.cluster.clock() >= self.next_beat:
                self._heartbeat()
            elif self.unit is None:
                self._lease()
            elif self.todo:
                self._push()
            else:
                self.cluster.ask(self, "done", incarnation=self.incarnation, unit=self.unit)
                self.unit = None
        except FencedError:
            self.incarnation = self.unit = None
            self.nonce += "'"
        except UnavailableError:
            self.next_at = self.cluster.clock() + 0.2

    def _heartbeat(self) -> None:
        self.sequence += 1
        units = [] if self.unit is None else [self.unit]
        answer = self.cluster.ask(self, "heartbeat", incarnation=self.incarnation, sequence=self.sequence, units=units)
        self.next_beat = self.cluster.clock() + answer["next_s"]
        if self.unit in answer["drop"]:
            self.unit = None

    def _lease(self) -> None:
        answer = self.cluster.ask(self, "lease", incarnation=self.incarnation, holds=[])
        if answer["unit"] is None:
            self.finished = answer["finished"]
            self.alive = not self.finished
            self.next_at = self.cluster.clock() + answer["wait_s"]
            return
        self.unit, self.tries = answer["unit"]["id"], 0
        if self.unit in self.cluster.units_without_data:
            self.cluster.ask(self, "missing", incarnation=self.incarnation, unit=self.unit, why="train.txt: is gone")
            self.unit = None
            return
        self.todo = [batch for batch in range(num_batches(self.unit)) if batch not in answer["skip"]]
        self.shards = answer["shards"]

    def _push(self) -> None:
        assert self.unit is not None
        try:
            for address in self.shards:
                self.cluster.shard_at(address).push(self.unit, self.todo[0])
            self.todo.pop(0)
        except (RefusedError, NotYetError) as error:
            self.tries += 1
            if isinstance(error, RefusedError) or self.tries > 20:
                self.cluster.ask(self, "give_back", incarnation=self.incarnation, unit=self.unit)
                self.unit = None


class FakeCluster:
    """A run with a coordinator that can die, shards and trainers; checks the invariants at every step."""

    def __init__(self, directory: Path, settings: Callable[[PassPlan], Settings], plan: PassPlan) -> None:
        self.clock = Clock()
        self.run = Run(directory / "run")
        self.run.path.mkdir(exist_ok=True)
        self.settings = settings(plan)
        self.coordinator: Coordinator | None = None
        self.shards: list[Shard] = []
        self.trainers: list[Trainer] = []
        self.lose_answer: Callable[[], bool] = lambda: False
        self.incarnations: set[int] = set()
        self.leased: set[int] = set()
        self.missing_units: set[int] = set()
        self.units_without_data: set[int] = set()

    def start_coordinator(self) -> Coordinator:
        """Start a coordinator, or its successor."""
        self.coordinator = Coordinator(self.run, self.settings, clock=self.clock)
        return self.coordinator

    def kill_coordinator(self) -> None:
        """Stop the coordinator; its memory is lost and its lock is released."""
        if self.coordinator is not None:
            self.coordinator.close()
        self.coordinator = None

    def ask(self, asking: Shard | Trainer, path: str, **body: Any) -> dict[str, Any]:
        """Send a request of a role; raise `UnavailableError` if the coordinator is dead or the answer is lost."""
        if self.coordinator is None:
            raise UnavailableError("dead")
        answer = ask(self.coordinator, path, term=asking.term, **body)
        if path == "lease" and answer["unit"] is not None:
            self.note_lease(answer["unit"]["id"])
        if self.lose_answer():
            raise UnavailableError("lost")
        assert answer["term"] >= asking.term
        asking.term = answer["term"]
        return answer

    def shard_at(self, address: dict[str, Any]) -> Shard:
        """Return the shard at an address that a trainer received, if its incarnation is still the same."""
        for shard in self.shards:
            if (shard.address, shard.incarnation) == (address["address"], address["incarnation"]):
                return shard
        raise RefusedError

    def note_start(self, shard: Shard) -> None:
        """Note that a shard started or restarted: remember the leased units that it is missing."""
        assert shard.incarnation not in self.incarnations, "an incarnation was given twice"
        assert shard.incarnation is not None
        self.incarnations.add(shard.incarnation)
        rivals = [other for other in self.shards if other is not shard and other.alive and other.incarnation]
        for other in rivals:
            if set(other.owned) & set(shard.owned):
                assert other.lease_until <= self.clock(), "two shards may apply to the same partition"
        self.missing_units |= {unit for unit in self.leased if not self.is_complete(unit, [shard])}
        # A unit without a batch in any partition counts as new.
        self.missing_units = {unit for unit in self.missing_units if self.is_known(unit)}

    def note_lease(self, unit: int) -> None:
        """Check that a new unit is leased only when restarted shards have caught up."""
        self.missing_units = {one for one in self.missing_units if not self.is_complete(one, self.members())}
        if unit not in self.leased:
            assert not self.missing_units, f"unit {unit} was leased before {sorted(self.missing_units)} were replayed"
        self.leased.add(unit)

    def members(self) -> list[Shard]:
        """Return the shards that the coordinator lists as members."""
        assert self.coordinator is not None
        incarnations = {member.incarnation for member in self.coordinator.members.of("ps")}
        return [shard for shard in self.shards if shard.incarnation in incarnations]

    def is_known(self, unit: int) -> bool:
        """Return whether a partition has a batch of the unit."""
        parts = [part for shard in self.members() for part in shard.partitions.values()]
        return any(part.has(unit, batch) for part in parts for batch in range(num_batches(unit)))

    @staticmethod
    def is_complete(unit: int, shards: list[Shard]) -> bool:
        """Return whether the shards have all batches of a unit, judged by their events, not by their reports."""
        names = [[unit, batch] for batch in range(num_batches(unit))]
        parts = [one for shard in shards for one in shard.partitions.values()]
        return all(unit in one.lost or all(name in one.events for name in names) for one in parts)

    def step(self, seconds: float = 0.05) -> None:
        """Let time pass, and let every role act."""
        self.clock.now += seconds
        if self.coordinator is not None:
            self.coordinator.tick()
        for role in self.roles():
            role.step()

    def until(
        self, reached: Callable[[Coordinator], bool], each: Callable[[], None] = lambda: None, limit_s: float = 600.0
    ) -> Coordinator:
        """Let time pass until a condition holds."""
        end = self.clock() + limit_s
        while self.coordinator is None or not reached(self.coordinator):
            assert self.clock() < end, self.describe()
            self.step()
            each()
        return self.coordinator

    def run_to_end(self, each: Callable[[], None] = lambda: None) -> None:
        """Let time pass until the coordinator has finished the run."""
        self.until(lambda coordinator: coordinator.is_finished, each)

    def describe(self) -> str:
        """Return the state of everything, for the error of a run that does not end."""
        status = self.coordinator and self.coordinator.status()
        roles = [{key: value for key, value in vars(role).items() if key != "cluster"} for role in self.roles()]
        return json.dumps([status, roles], default=str)

    def roles(self) -> list[Shard | Trainer]:
        """Return shards and trainers, including dead ones."""
        return [*self.shards, *self.trainers]

    def check_exactly_once(self, ends: list[int]) -> None:
        """Check that shards and checkpoint have every batch once, and every boundary at its position."""
        assert self.coordinator is not None
        newest = self.coordinator.checkpoints.newest
        assert newest is not None
        saved: dict[int, Partition] = {}
        for part in newest.parts(range(self.settings.num_partitions)):
            for number, events in json.loads(Path(part["dense"]).read_text()).items():
                assert saved.setdefault(int(number), Partition(events)).events is events, "a partition is saved twice"
        assert saved.keys() == set(range(self.settings.num_partitions))
        held = [shard.partitions for shard in self.members()]
        for partitions in (saved, *held):
            for partition in partitions.values():
                names = [event for event in partition.events if event[0] != "boundary"]
                wanted = [[unit, batch] for unit in range(ends[-1]) for batch in range(num_batches(unit))]
                assert sorted(names) == wanted
                for k, end in enumerate(ends):
                    at = partition.events.index(["boundary", k])
                    before = [event[0] for event in partition.events[:at] if event[0] != "boundary"]
                    assert sorted(set(before)) == list(range(end))


def seeded(seed: int) -> random.Random:
    """Return a reproducible random generator."""
    return random.Random(seed)
