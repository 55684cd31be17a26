"""The coordinator as a whole: what it answers to each request."""

from dataclasses import asdict
from typing import Any

from elasticrec.coordinator.members import Member, Wait
from elasticrec.coordinator.state import RunState, Settings
from elasticrec.coordinator.work import NoWork
from elasticrec.errors import ConfigError, UnavailableError
from elasticrec.fail_points import fail_point
from elasticrec.net import messages

__all__ = ["Answer", "Coordinator", "Settings"]

Answer = dict[str, Any]

# Seconds after which a trainer that got no unit asks again.
_ASK_AGAIN_S = 0.2
# Where all trainers wait for the end of a group.
_ASK_SOON_S = 0.02


class Coordinator(RunState):
    """One a run. Its methods may be called from any thread; each request is answered as if it were alone."""

    def scale(self, request: messages.Scale) -> Answer:
        """Want another number of shards or trainers, from now on and after any restart."""
        with self._lock:
            self._begin(request)
            if self.is_finished or self._stop is not None:
                raise ConfigError(f"scale: expected a run that goes on, got one that is {self._state()}")
            wanted = self.wanted.change(request.servers, request.trainers, self.settings.num_partitions)
            if wanted != self.wanted:
                self._want(wanted)
            self.tick()
            return self._answer(wanted=asdict(self.wanted), servers=self.members.map.servers)

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
                raise ConfigError(messages.other_release(request.protocol))
            if request.run and self.settings.run_id and request.run != self.settings.run_id:
                raise ConfigError("register: run: expected a role of this run, got one with the directory of another")
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
            "skipped": list(self.passes.missing),
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
                member.rate.add(self._clock(), member.figures.get("samples"))
            return self._hear_shard(member, request, is_news) if member.role == "ps" else self._hear(member, request)

    def _leave(self, incarnation: int) -> None:
        self.members.leave(incarnation)
        self.work.drop_trainer(incarnation)
        self.meetings.forget(incarnation)
        self.tick()

    def _hear(self, trainer: Member, request: messages.Heartbeat) -> Answer:
        drop = self.work.hold(trainer.incarnation, request.units)
        if request.units:
            self.meetings.know(trainer.incarnation, request.meeting)
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
            if request.publish is not None and self.publishing is not None:
                self.publishing.report(shard.index, request.publish)
        self.tick()
        commands: list[Answer] = []
        if request.boundaries != len(self.passes.boundaries):
            commands.append({"command": "boundaries", "boundaries": self.passes.boundaries})
        if request.skipped != len(self.passes.missing):
            commands.append({"command": "skip", "units": list(self.passes.missing)})
        if snapshot := self.checkpoints.command(shard.index, shard.incarnation):
            commands.append(snapshot)
        if self.publishing is not None and (publish := self.publishing.command(shard.index, shard.incarnation)):
            commands.append(publish)
        is_sync = self.settings.group_size is not None
        if is_sync and shard.index in self.members.going_back:
            commands.append({"command": "reload"})
        return self._answer(lease_s=self.settings.timing.lease_s, next_s=self._next_s(is_sync), commands=commands)

    def _next_s(self, is_sync: bool) -> float:
        """When a shard is to tell of itself again."""
        timing, publishing = self.settings.timing, self.publishing
        # all trainers wait for the end of a group, and for a checkpoint between two groups or passes
        is_saving = self.checkpoints.is_due() or self.checkpoints.writing is not None
        is_awaited = (
            self._move is not None or self.work.wants_report() or (is_saving and (is_sync or self._ticket is not None))
        )
        if is_awaited or (publishing is not None and publishing.is_writing) or (is_sync and self._is_publish_due()):
            return timing.hurry_s
        # one that is due and cannot begin waits for something else
        due_s = 0.0 if publishing is None else publishing.next_s or 0.0
        return min(max(due_s, timing.hurry_s), timing.heartbeat_s) if due_s else timing.heartbeat_s

    def _shards(self) -> list[Answer]:
        """The shards as trainers find them."""
        found = []
        for index in range(self.members.map.servers):
            shard, owned = self.members.shard(index), self.members.map.owned(index)
            found.append(
                {
                    "index": index,
                    "partitions": [owned.start, owned.stop],
                    "incarnation": shard.incarnation if shard else None,
                    "address": shard.address if shard else None,
                    "state": "down" if shard is None else self._state_of(shard, shard.state, "down"),
                }
            )
        return found

    def _state_of(self, member: Member, alive: str, gone: str) -> str:
        """A member's state: a coordinator that has just started cannot tell who is gone."""
        if self.members.is_alive(member):
            return alive
        return "unheard" if self.members.is_unheard(member) else gone

    def lease(self, request: messages.Lease) -> Answer:
        """A unit for a trainer, or why there is none."""
        with self._lock:
            self._begin(request)
            trainer = self._trainer(request.incarnation)
            self.tick()
            found = self._no_lease() or self.work.lease(trainer.incarnation, request.holds, self._share(request))
            if isinstance(found, NoWork):
                wait_s = _ASK_AGAIN_S if self.settings.group_size is None else _ASK_SOON_S
                return self._answer(
                    unit=None, finished=self.is_finished, wait_s=wait_s, why=found.why, shards=self._shards()
                )
            unit = asdict(self.passes.unit(found.unit))
            fail_point("lease")
            group = self.work.group_of(found.unit)
            return self._answer(
                unit=unit,
                skip=list(found.skip),
                replay=found.is_replay,
                shards=self._shards(),
                group=None if group is None else [group.start, len(group)],
                meeting=self.meetings.join(trainer.incarnation, self.work.workers()),
                trainers=self._num_trainers(),
            )

    def _num_trainers(self) -> int:
        """Those that live, at least the one that asks."""
        return max(sum(self.members.is_alive(trainer) for trainer in self.members.of("trainer")), 1)

    def _share(self, request: messages.Lease) -> int | None:
        """How many units of a group a trainer takes, so that all have some."""
        if self.settings.group_size is None or request.waiting:
            return None
        return -(-self.settings.group_size // self._num_trainers())

    def meet(self, request: messages.MeetRequest) -> Answer:
        """Whether all trainers that have a unit are at a meeting."""
        with self._lock:
            self._begin(request)
            trainer = self._trainer(request.incarnation)
            self.tick()
            go = self.meetings.arrive(trainer.incarnation, request.meeting, self.work.workers())
            # one that was not heard of since the coordinator started may have a unit, and be behind
            is_whole = all(member.role != "trainer" for member in self.members.unheard())
            return self._answer(go=go and is_whole)

    def _no_lease(self) -> NoWork | None:
        if self._stop is not None:
            return NoWork(self._stop)
        if self._move is not None and self.settings.group_size is None:
            return NoWork(f"the servers change from {self.members.map.servers} to {self._move.servers}")
        if self.settings.group_size is not None:
            if self.members.going_back:
                return NoWork("all shards go back to the last checkpoint")
            is_saving = self.checkpoints.is_due() or self.checkpoints.writing is not None
            if is_saving and self.work.is_between_groups():
                return NoWork("a checkpoint is written between two groups of units")
            is_writing = self.publishing is not None and self.publishing.is_writing
            if (is_writing or self._is_publish_due()) and self.work.is_between_groups():
                return NoWork("a version is cut between two groups of units")
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

    def missing(self, request: messages.Missing) -> Answer:
        """The data of a unit is gone: where the job allows it, all go on without it."""
        with self._lock:
            self._begin(request)
            self._trainer(request.incarnation)
            self._check_unit(request.unit)
            if self.settings.plan.on_missing != "skip":
                raise ConfigError(f"unit {request.unit}: {request.why}")
            if request.unit not in self.passes.missing:
                unit = self.passes.unit(request.unit)
                num_batches = self.work.num_applied(unit.id)
                self.passes.lose(unit, num_batches)
                self.work.skip(unit.id)
                some = f", of which some partitions have {num_batches} batches" if num_batches else ""
                size = f"{unit.end - unit.start:,} bytes from {unit.start:,} on"
                self._note(f"unit {unit.id} is lost, {size}{some} (data.on_missing): {request.why}")
            return self._answer()

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
                passes=self._describe_passes(),
                units=self.work.figures(),
                leases={str(unit): trainer for unit, trainer in self.work.leases().items()},
                counters=asdict(self.work.counters),
                meetings=asdict(self.meetings.figures),
                wanted=asdict(self.wanted),
                moving_to=None if self._move is None else self._move.servers,
                started=dict(self.members.num_started),
                samples_per_s=sum(trainer.rate.per_s(self._clock()) for trainer in self.members.of("trainer")),
                shards=[shard | self._more_of(shard["index"]) for shard in self._shards()],
                trainers=[self._describe(trainer) for trainer in self.members.of("trainer")],
                checkpoint={
                    "newest": None if newest is None else newest.name,
                    "age_s": self.checkpoints.age_s,
                    "writing": self.checkpoints.writing,
                    "ticket": self.checkpoints.last_ticket,
                    "committed": self.checkpoints.num_committed,
                    "failed": self.checkpoints.num_failed,
                    "seconds": self.checkpoints.seconds,
                    "last_s": self.checkpoints.last_s,
                },
                publish=None if self.publishing is None else self.publishing.describe(),
                store=None if self.store is None else self.store(),
            )

    def _describe_passes(self) -> Answer:
        hours = self.passes.hours
        hour = self.passes.begun[-1].hour if self.passes.begun else None
        return {
            "begun": len(self.passes.begun),
            "planned": self.settings.plan.num_passes if hours is None else None,
            "ended": self._num_ended,
            "hour": hour and hour["hour"],
            "waiting": hours and hours.waiting,
            "notes": list(self._notes),
        }

    def _state(self) -> str:
        if self.failure is not None:
            return "failed"
        return "finished" if self.is_finished else "running" if self._stop is None else "stopping"

    def _more_of(self, index: int) -> Answer:
        shard = self.members.shard(index)
        if shard is None:
            return {"figures": {}, "lease_left_s": 0.0}
        return {"figures": shard.figures, "lease_left_s": self.members.lease_left_s(shard)}

    def _describe(self, trainer: Member) -> Answer:
        units = [unit for unit, holder in self.work.leases().items() if holder == trainer.incarnation]
        return {
            "index": trainer.index,
            "incarnation": trainer.incarnation,
            "state": self._state_of(trainer, "alive", "silent"),
            "units": units,
            "lease_left_s": self.members.lease_left_s(trainer),
            "samples_per_s": trainer.rate.per_s(self._clock()),
            "figures": trainer.figures,
        }
