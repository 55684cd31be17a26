"""The coordinator as a whole: what it answers to each request, and what it does between them."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from elasticrec.coordinator import messages
from elasticrec.coordinator.checkpoints import Checkpoints, CheckpointSettings, Hooks, Owner
from elasticrec.coordinator.journal import Journal
from elasticrec.coordinator.members import Member, Members, Timing, Wait
from elasticrec.coordinator.passes import Passes, PassPlan
from elasticrec.coordinator.work import NoWork, Work, WorkTiming
from elasticrec.errors import ConfigError, ElasticRecError, UnavailableError
from elasticrec.run import Run

Answer = dict[str, Any]

# Seconds after which a trainer that got no unit asks again.
_ASK_AGAIN_S = 0.2


@dataclass(frozen=True)
class Settings:
    """What a coordinator has to know of its job."""

    job: str
    """Digest of all that must be the same as long as the run lasts."""
    num_partitions: int
    servers: int
    """Shards that a new run has; of one that goes on the journal knows."""
    plan: PassPlan
    timing: Timing = field(default_factory=Timing)
    settle_s: float = 2.0
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    """More for the manifests of checkpoints, such as the job."""
    stop_when_finished: bool = True


class Coordinator:
    """One a run. Its methods may be called from any thread; each request is answered as if it were alone."""

    def __init__(
        self,
        run: Run,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = print,
    ) -> None:
        self.settings = settings
        self._say = say
        self._lock = threading.RLock()
        self._journal = Journal.open(run.path / "coordinator")
        try:
            self._start(run, clock)
        except BaseException:
            self._journal.close()
            raise

    def _start(self, run: Run, clock: Callable[[], float]) -> None:
        settings, append = self.settings, self._journal.append
        self.members = Members(settings.timing, clock, append)
        self.passes = Passes(run.units, settings.plan, append)
        hooks = Hooks(clock, append, self._say)
        self.checkpoints = Checkpoints(run.checkpoints, settings.checkpoint, settings.num_partitions, self.term, hooks)
        self.is_finished = False
        self._stop: str | None = None
        self.failure: str | None = None
        self._last_told = ""
        # Which checkpoint ends the pass, while it is complete.
        self._ticket: int | None = None
        last_checkpoint = self._replay(run)
        timing = settings.timing
        self.work = Work(
            self.members.map,
            settings.plan.num_passes,
            WorkTiming(timing.lease_s + timing.margin_s, settings.settle_s),
            clock,
        )
        for begun in self.passes.begun:
            self.work.add_pass(begun.end_unit)
        for member in self.members.of("ps"):
            self.work.start_shard(member.index, member.incarnation)
        self.checkpoints.start(last_checkpoint)
        if not self.passes.begun:
            self._begin_pass()

    def _replay(self, run: Run) -> str | None:
        """Take in what an earlier coordinator wrote down; returns the checkpoint that it committed last."""
        identity = {"job": self.settings.job, "num_partitions": self.settings.num_partitions}
        last_checkpoint = None
        for entry in self._journal.entries:
            match entry["kind"]:
                case "run":
                    changed = sorted(key for key, value in identity.items() if entry[key] != value)
                    if changed:
                        keys = ", ".join(f"`{key}`" for key in changed)
                        raise ConfigError(f"{run.path}: the run of another job, which differs in {keys}")
                case "pass":
                    self.passes.replay(entry)
                case "checkpoint":
                    last_checkpoint = entry["name"]
                case "finished":
                    self.is_finished = entry["passes"] >= self.settings.plan.num_passes
                case _:
                    self.members.replay(entry)
        if not self._journal.entries:
            self._journal.append({"kind": "run", **identity})
        if not any(entry["kind"] == "map" for entry in self._journal.entries):
            self.members.set_map(self.settings.servers, self.settings.num_partitions)
        return last_checkpoint

    @property
    def term(self) -> int:
        """In every answer; roles refuse a lower one than they have seen."""
        return self._journal.term

    def close(self) -> None:
        """Let the run go; members keep what they have and wait for the next coordinator."""
        with self._lock:
            self._journal.close()

    def tick(self) -> None:
        """What is due by the clock; called often, and with every request."""
        with self._lock:
            for index in range(self.members.map.servers):
                self.work.set_up(index, self._is_serving(self.members.shard(index)))
            self.members.forget()
            self.work.lapse()
            self.checkpoints.tick(self._owners(), self._manifest)
            self._advance()

    def _is_serving(self, shard: Member | None) -> bool:
        return shard is not None and self.members.is_alive(shard) and shard.state == "serving"

    def _owners(self) -> dict[int, Owner] | None:
        """All shards, if all of them serve."""
        shards = [self.members.shard(index) for index in range(self.members.map.servers)]
        serving = [shard for shard in shards if shard is not None and self._is_serving(shard)]
        if len(serving) < len(shards) or self._stop is not None:
            return None
        return {shard.index: Owner(shard.incarnation, self.members.map.owned(shard.index)) for shard in serving}

    def _advance(self) -> None:
        """A pass that is complete everywhere is saved, then comes the next one, or the end."""
        if self.is_finished or self._stop is not None:
            return
        if not self.work.is_pass_complete():
            # also of a shard that went back after the checkpoint was asked for
            self._ticket = None
        elif self._ticket is None:
            self._ticket = self.checkpoints.want()
            self.checkpoints.tick(self._owners(), self._manifest)
        elif self.checkpoints.is_committed(self._ticket):
            self._ticket = None
            if self.passes.is_last:
                self._journal.append({"kind": "finished", "passes": len(self.passes.begun)})
                self.is_finished = True
            else:
                self._begin_next_or_fail()

    def _begin_next_or_fail(self) -> None:
        try:
            self._begin_pass()
        except (ElasticRecError, OSError) as error:
            self.failure = str(error)
            self.stop(self.failure)
            self._say(self.failure)

    def _begin_pass(self) -> None:
        self.work.add_pass(self.passes.begin_next().end_unit)

    def stop(self, why: str) -> None:
        """Tell all members to end."""
        with self._lock:
            self._stop = why

    def tell(self, text: str) -> None:
        """Say a line, not the same one over and over."""
        with self._lock:
            if text != self._last_told:
                self._last_told = text
                self._say(text)

    def scale(self, servers: int) -> None:
        """Spread the partitions over another number of shards; the old ones stop, new ones load the last checkpoint."""
        with self._lock:
            self.members.set_map(servers)
            self.work.set_map(self.members.map)
            self.checkpoints.tick(None, self._manifest)

    def _begin(self, request: messages.Request) -> None:
        self._journal.check_term()
        if request.term > self.term:
            raise UnavailableError(f"term {self.term} is over: term {request.term} was seen, another coordinator rules")

    def _answer(self, **values: Any) -> Answer:
        stop = self._stop
        if stop is None and self.is_finished and self.settings.stop_when_finished:
            stop = "finished"
        commands = values.pop("commands", [])
        if stop is not None:
            commands = [*commands, {"command": "stop", "why": stop}]
        return {"term": self.term, "epoch": self.members.map.epoch, **values, "commands": commands}

    def register(self, request: messages.Register) -> Answer:
        """A place in the run, or how long to wait for one."""
        with self._lock:
            self._begin(request)
            if request.protocol != messages.PROTOCOL:
                raise ConfigError(f"register: protocol: expected {messages.PROTOCOL}, got {request.protocol}")
            self.tick()
            for name, why in request.damaged.items():
                self.checkpoints.pass_over(name, why)
            member = self.members.register(request.role, request.nonce, request.index)
            if isinstance(member, Wait):
                return self._answer(incarnation=None, wait_s=member.seconds, why=member.why)
            if member.role == "ps":
                self.work.start_shard(member.index, member.incarnation)
                return self._answer(**self._place(member), **self._start_of(member))
            return self._answer(**self._place(member), shards=self._shards())

    def _place(self, member: Member) -> Answer:
        timing, partitions = self.settings.timing, self.members.map
        return {
            "incarnation": member.incarnation,
            "index": member.index,
            "lease_s": timing.lease_s,
            "next_s": timing.heartbeat_s,
            "num_partitions": partitions.num_partitions,
            "servers": partitions.servers,
        }

    def _start_of(self, shard: Member) -> Answer:
        """What a shard begins with."""
        owned = self.members.map.owned(shard.index)
        newest = self.checkpoints.newest
        return {
            "partitions": [owned.start, owned.stop],
            "boundaries": self.passes.boundaries,
            "checkpoint": None if newest is None else {"name": newest.name, "parts": newest.parts(owned)},
        }

    def heartbeat(self, request: messages.Heartbeat) -> Answer:
        """The member's lease begins again, and it hears what is to be done."""
        with self._lock:
            self._begin(request)
            if request.leaving:
                self._leave(request.incarnation)
                return self._answer()
            member = self.members.heartbeat(request.incarnation)
            is_news = request.sequence > member.sequence
            if is_news:
                member.sequence = request.sequence
                member.figures = messages.plain(request.figures)
            return self._hear_shard(member, request, is_news) if member.role == "ps" else self._hear(member, request)

    def _leave(self, incarnation: int) -> None:
        self.members.leave(incarnation)
        self.work.drop_trainer(incarnation)
        self.tick()

    def _hear(self, trainer: Member, request: messages.Heartbeat) -> Answer:
        drop = self.work.hold(trainer.incarnation, request.units)
        self.tick()
        timing = self.settings.timing
        return self._answer(lease_s=timing.lease_s, next_s=timing.heartbeat_s, shards=self._shards(), drop=drop)

    def _hear_shard(self, shard: Member, request: messages.Heartbeat, is_news: bool) -> Answer:
        if is_news:
            shard.address, shard.state = request.address, request.state
            if request.status is not None:
                shard.figures |= request.status.figures()
                if request.state == "serving":
                    self.work.report(shard.index, request.status.records)
            if request.snapshot is not None:
                self.checkpoints.report(shard.index, request.snapshot, self._manifest)
        self.tick()
        commands = []
        if request.boundaries != len(self.passes.boundaries):
            commands.append({"command": "boundaries", "boundaries": self.passes.boundaries})
        if snapshot := self.checkpoints.command(shard.index, shard.incarnation):
            commands.append(snapshot)
        timing = self.settings.timing
        next_s = timing.hurry_s if self.work.wants_report() else timing.heartbeat_s
        return self._answer(lease_s=timing.lease_s, next_s=next_s, commands=commands)

    def _manifest(self) -> dict[str, Any]:
        """What a checkpoint says beside its files."""
        return {
            "map_epoch": self.members.map.epoch,
            "passes": [asdict(begun) for begun in self.passes.begun],
            "boundaries": self.passes.boundaries,
            **self.settings.manifest,
        }

    def _shards(self) -> list[Answer]:
        """The shards as trainers find them."""
        found = []
        for index in range(self.members.map.servers):
            shard, owned = self.members.shard(index), self.members.map.owned(index)
            is_up = shard is not None and self.members.is_alive(shard)
            found.append(
                {
                    "index": index,
                    "partitions": [owned.start, owned.stop],
                    "incarnation": shard.incarnation if shard else None,
                    "address": shard.address if shard else None,
                    "state": shard.state if shard and is_up else "down",
                }
            )
        return found

    def lease(self, request: messages.Lease) -> Answer:
        """A unit for a trainer, or why there is none."""
        with self._lock:
            self._begin(request)
            trainer = self._trainer(request.incarnation)
            self.tick()
            found = self._no_lease() or self.work.lease(trainer.incarnation, request.holds)
            if isinstance(found, NoWork):
                return self._answer(
                    unit=None, finished=self.is_finished, wait_s=_ASK_AGAIN_S, why=found.why, shards=self._shards()
                )
            unit = asdict(self.passes.unit(found.unit))
            return self._answer(unit=unit, skip=list(found.skip), replay=found.is_replay, shards=self._shards())

    def _no_lease(self) -> NoWork | None:
        if self._stop is not None:
            return NoWork(self._stop)
        if unheard := self.members.unheard():
            # it may hold a unit, or lack one
            return NoWork(f"{unheard[0].name} has not been heard of since the coordinator started")
        return None

    def _trainer(self, incarnation: int) -> Member:
        member = self.members.get(incarnation)
        if member.role != "trainer":
            raise ConfigError(f"{member.name}: not a trainer, only those have units")
        return member

    def done(self, request: messages.UnitRequest) -> Answer:
        """A trainer has pushed all of a unit."""
        with self._lock:
            self._begin(request)
            trainer = self._trainer(request.incarnation)
            self._check_unit(request.unit)
            return self._answer(held=self.work.done(trainer.incarnation, request.unit))

    def give_back(self, request: messages.UnitRequest) -> Answer:
        """A trainer does not go on with a unit."""
        with self._lock:
            self._begin(request)
            trainer = self._trainer(request.incarnation)
            self._check_unit(request.unit)
            return self._answer(held=self.work.give_back(trainer.incarnation, request.unit))

    def _check_unit(self, unit: int) -> None:
        if unit >= self.passes.end_unit:
            raise ConfigError(f"unit: expected one below {self.passes.end_unit}, got {unit}")

    def checkpoint(self, request: messages.CheckpointRequest) -> Answer:
        """Ask for a checkpoint now; the status tells when it is there."""
        with self._lock:
            self._begin(request)
            ticket = self.checkpoints.want()
            self.tick()
            return self._answer(ticket=ticket)

    def status(self) -> Answer:
        """All there is to see."""
        with self._lock:
            self.tick()
            newest = self.checkpoints.newest
            return self._answer(
                state=self._state(),
                failure=self.failure,
                passes={"begun": len(self.passes.begun), "planned": self.settings.plan.num_passes},
                units=self.work.figures(),
                leases={str(unit): trainer for unit, trainer in self.work.leases().items()},
                counters=asdict(self.work.counters),
                shards=[shard | {"figures": self._figures(shard["index"])} for shard in self._shards()],
                trainers=[self._describe(trainer) for trainer in self.members.of("trainer")],
                checkpoint={
                    "newest": None if newest is None else newest.name,
                    "age_s": self.checkpoints.age_s,
                    "writing": self.checkpoints.writing,
                    "ticket": self.checkpoints.last_ticket,
                    "committed": self.checkpoints.num_committed,
                    "failed": self.checkpoints.num_failed,
                },
            )

    def _state(self) -> str:
        if self.failure is not None:
            return "failed"
        return "finished" if self.is_finished else "running" if self._stop is None else "stopping"

    def _figures(self, index: int) -> dict[str, Any]:
        shard = self.members.shard(index)
        return {} if shard is None else shard.figures

    def _describe(self, trainer: Member) -> Answer:
        state = "alive" if self.members.is_alive(trainer) else "silent"
        units = [unit for unit, holder in self.work.leases().items() if holder == trainer.incarnation]
        return {
            "index": trainer.index,
            "incarnation": trainer.incarnation,
            "state": state,
            "units": units,
            "figures": trainer.figures,
        }
