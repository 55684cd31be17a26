"""The coordinator's responses to requests."""

from dataclasses import asdict

from elasticrec.coordinator.members import Delay, Member
from elasticrec.coordinator.state import RunState
from elasticrec.coordinator.work import NoWork
from elasticrec.errors import ConfigError, UnavailableError
from elasticrec.fail_points import fail_point
from elasticrec.net import messages

# Time after which a trainer that got no unit asks again.
_RETRY_S = 0.2
# The same for strategies with groups, where all trainers wait for the end of a group.
_GROUP_RETRY_S = 0.02


class Coordinator(RunState):
    """The coordinator of a run. Its methods may be called from any thread and answer one request at a time."""

    def scale(self, request: messages.ScaleRequest) -> messages.ScaleResponse:
        """Change the number of shards or trainers, also for later restarts."""
        with self._lock:
            self._check_term(request)
            if self.is_finished or self._stop is not None:
                raise ConfigError(f"scale: the run is {self._state()}, expected it to be running")
            wanted = self.wanted.change(request.servers, request.trainers, self.settings.num_partitions)
            if wanted != self.wanted:
                self._set_wanted(wanted)
            self.tick()
            return {
                **self._response(),
                "wanted": self.wanted.counts(),
                "servers": self.members.map.servers,
            }

    def _check_term(self, request: messages.Request) -> None:
        """Raise if another coordinator has taken over."""
        self._journal.check_term()
        if request.term > self.term:
            raise UnavailableError(
                f"term {self.term} is over: the role has seen term {request.term} of another coordinator"
            )

    def _response(self, commands: list[messages.Command] | None = None) -> messages.Response:
        stop = self._stop
        if stop is None and self.is_finished and self.settings.stop_when_finished:
            stop = "finished"
        all_commands = commands or []
        if stop is not None:
            all_commands = [*all_commands, {"command": "stop", "why": stop}]
        return {"term": self.term, "epoch": self.members.map.epoch, "commands": all_commands}

    def register(
        self, request: messages.RegisterRequest
    ) -> messages.ShardRegistration | messages.TrainerRegistration | messages.RegistrationDelay:
        """Give an index to a process, or the time to wait if none is free."""
        with self._lock:
            self._check_term(request)
            if request.protocol != messages.PROTOCOL:
                raise ConfigError(messages.release_mismatch(request.protocol))
            if request.run and self.settings.run_id and request.run != self.settings.run_id:
                raise ConfigError(
                    "register: run: expected a role of this run, got a role with the directory of another run"
                )
            self.tick()
            for name, why in request.damaged.items():
                self.checkpoints.report_unloadable(name, why)
            member = self.members.register(request.role, request.nonce, request.index)
            if isinstance(member, Delay):
                return {**self._response(), "incarnation": None, "wait_s": member.seconds, "why": member.why}
            if member.role == "ps":
                self.work.start_shard(member.index, member.incarnation)
                return self._shard_registration(member)
            return {**self._registration(member), "shards": self._shards()}

    def _registration(self, member: Member) -> messages.Registration:
        timing, partitions = self.settings.timing, self.members.map
        return {
            **self._response(),
            "incarnation": member.incarnation,
            "index": member.index,
            "lease_s": timing.lease_s,
            "next_s": timing.heartbeat_s,
            "num_partitions": partitions.num_partitions,
            "servers": partitions.servers,
        }

    def _shard_registration(self, shard: Member) -> messages.ShardRegistration:
        owned = self.members.map.owned(shard.index)
        newest = self.checkpoints.newest
        return {
            **self._registration(shard),
            "partitions": [owned.start, owned.stop],
            "boundaries": self.passes.boundaries,
            "skipped": list(self.passes.missing),
            "checkpoint": None if newest is None else {"name": newest.name, "parts": newest.parts(owned)},
        }

    def heartbeat(
        self, request: messages.Heartbeat
    ) -> messages.Response | messages.ShardHeartbeatResponse | messages.TrainerHeartbeatResponse:
        """Renew the member's lease, and return its commands."""
        with self._lock:
            self._check_term(request)
            if request.leaving:
                self._leave(request.incarnation)
                return self._response()
            member = self.members.heartbeat(request.incarnation)
            is_new = request.sequence > member.sequence
            if is_new:
                member.sequence = request.sequence
                member.figures = messages.plain_figures(request.figures)
                member.rate.add(self._clock(), member.figures.get("samples"))
            if member.role == "ps":
                return self._shard_heartbeat(member, request, is_new)
            return self._trainer_heartbeat(member, request)

    def _leave(self, incarnation: int) -> None:
        self.members.leave(incarnation)
        self.work.drop_trainer(incarnation)
        self.meetings.forget(incarnation)
        self.tick()

    def _trainer_heartbeat(self, trainer: Member, request: messages.Heartbeat) -> messages.TrainerHeartbeatResponse:
        drop = self.work.renew(trainer.incarnation, request.units)
        if request.units:
            self.meetings.restore(trainer.incarnation, request.meeting)
        self.tick()
        timing = self.settings.timing
        return {
            **self._response(),
            "lease_s": timing.lease_s,
            "next_s": timing.heartbeat_s,
            "shards": self._shards(),
            "drop": drop,
        }

    def _shard_heartbeat(
        self, shard: Member, request: messages.Heartbeat, is_new: bool
    ) -> messages.ShardHeartbeatResponse:
        if is_new:
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
        commands: list[messages.Command] = []
        if request.boundaries != len(self.passes.boundaries):
            commands.append({"command": "boundaries", "boundaries": self.passes.boundaries})
        if request.skipped != len(self.passes.missing):
            commands.append({"command": "skip", "units": list(self.passes.missing)})
        if snapshot := self.checkpoints.command(shard.index, shard.incarnation):
            commands.append(snapshot)
        if self.publishing is not None and (publish := self.publishing.command(shard.index, shard.incarnation)):
            commands.append(publish)
        is_sync = self.settings.group_size is not None
        if is_sync and shard.index in self.members.must_reload:
            commands.append({"command": "reload"})
        return {
            **self._response(commands),
            "lease_s": self.settings.timing.lease_s,
            "next_s": self._next_s(is_sync),
        }

    def _next_s(self, is_sync: bool) -> float:
        """Return the time until a shard's next heartbeat."""
        timing, publishing = self.settings.timing, self.publishing
        # All trainers wait for the end of a group, and for a checkpoint between two groups or passes.
        is_saving = self.checkpoints.is_due() or self.checkpoints.writing is not None
        is_awaited = (
            self._move is not None or self.work.wants_report() or (is_saving and (is_sync or self._ticket is not None))
        )
        if is_awaited or (publishing is not None and publishing.is_writing) or (is_sync and self._is_publish_due()):
            return timing.hurry_s
        # 0 means that there is nothing to publish, or that a publish is due but cannot begin yet.
        due_s = 0.0 if publishing is None else publishing.next_s or 0.0
        return min(max(due_s, timing.hurry_s), timing.heartbeat_s) if due_s else timing.heartbeat_s

    def _shards(self) -> list[messages.ShardAddress]:
        """Return the shards as trainers connect to them."""
        found: list[messages.ShardAddress] = []
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
        """Return a member's state; a coordinator that has just started cannot know which members are gone."""
        if self.members.is_alive(member):
            return alive
        return "unheard" if self.members.is_unheard(member) else gone

    def lease(self, request: messages.LeaseRequest) -> messages.UnitLease | messages.NoUnit:
        """Lease a unit to a trainer, or return why there is none."""
        with self._lock:
            self._check_term(request)
            trainer = self._trainer(request.incarnation)
            self.tick()
            found = self._no_lease() or self.work.lease(trainer.incarnation, request.holds, self._share(request))
            if isinstance(found, NoWork):
                return {
                    **self._response(),
                    "unit": None,
                    "finished": self.is_finished,
                    "wait_s": _RETRY_S if self.settings.group_size is None else _GROUP_RETRY_S,
                    "why": found.why,
                    "shards": self._shards(),
                }
            unit = self.passes.unit(found.unit).entry()
            fail_point("lease")
            group = self.work.group_of(found.unit)
            return {
                **self._response(),
                "unit": unit,
                "skip": list(found.skip),
                "replay": found.is_replay,
                "shards": self._shards(),
                "group": None if group is None else [group.start, len(group)],
                "meeting": self.meetings.join(trainer.incarnation, self.work.workers()),
                "trainers": self._num_trainers(),
            }

    def _num_trainers(self) -> int:
        """Return the number of live trainers, at least 1 for the trainer of the request."""
        return max(sum(self.members.is_alive(trainer) for trainer in self.members.of("trainer")), 1)

    def _share(self, request: messages.LeaseRequest) -> int | None:
        """Return how many units of a group a trainer may hold, so that all trainers have some."""
        if self.settings.group_size is None or request.waiting:
            return None
        return -(-self.settings.group_size // self._num_trainers())

    def meet(self, request: messages.MeetRequest) -> messages.MeetResponse:
        """Return whether all trainers with a unit have reached a meeting."""
        with self._lock:
            self._check_term(request)
            trainer = self._trainer(request.incarnation)
            self.tick()
            go = self.meetings.arrive(trainer.incarnation, request.meeting, self.work.workers())
            # A trainer that has not sent a heartbeat since the coordinator started may have a unit and be behind.
            is_complete = all(member.role != "trainer" for member in self.members.unheard())
            return {**self._response(), "go": go and is_complete}

    def _no_lease(self) -> NoWork | None:
        if self._stop is not None:
            return NoWork(self._stop)
        if self._move is not None and self.settings.group_size is None:
            return NoWork(f"scaling from {self.members.map.servers} to {self._move.servers} servers")
        if self.settings.group_size is not None:
            if self.members.must_reload:
                return NoWork("all shards are returning to the last checkpoint")
            is_saving = self.checkpoints.is_due() or self.checkpoints.writing is not None
            if is_saving and self.work.is_between_groups():
                return NoWork("a checkpoint is being written between two groups of units")
            is_writing = self.publishing is not None and self.publishing.is_writing
            if (is_writing or self._is_publish_due()) and self.work.is_between_groups():
                return NoWork("a version is being written between two groups of units")
        if unheard := self.members.unheard():
            # A trainer may hold a unit, and a shard may lack one.
            return NoWork(f"{unheard[0].name} has not sent a heartbeat since the coordinator started")
        return None

    def _trainer(self, incarnation: int) -> Member:
        member = self.members.get(incarnation)
        if member.role != "trainer":
            raise ConfigError(f"{member.name}: not a trainer: only trainers lease units")
        return member

    def done(self, request: messages.UnitRequest) -> messages.HeldResponse:
        """End the lease of a unit whose batches are all pushed."""
        with self._lock:
            self._check_term(request)
            trainer = self._trainer(request.incarnation)
            self._check_unit(request.unit)
            return {**self._response(), "held": self.work.done(trainer.incarnation, request.unit)}

    def give_back(self, request: messages.UnitRequest) -> messages.HeldResponse:
        """End the lease of a unit that the trainer has not finished."""
        with self._lock:
            self._check_term(request)
            trainer = self._trainer(request.incarnation)
            self._check_unit(request.unit)
            return {**self._response(), "held": self.work.give_back(trainer.incarnation, request.unit)}

    def missing(self, request: messages.MissingRequest) -> messages.Response:
        """Skip a unit whose data is gone, if the job allows it."""
        with self._lock:
            self._check_term(request)
            self._trainer(request.incarnation)
            self._check_unit(request.unit)
            if self.settings.plan.on_missing != "skip":
                raise ConfigError(f"unit {request.unit}: {request.why}")
            if request.unit not in self.passes.missing:
                unit = self.passes.unit(request.unit)
                num_batches = self.work.num_applied(unit.id)
                self.passes.record_missing(unit, num_batches)
                self.work.skip(unit.id)
                applied = f", {num_batches} batches already applied" if num_batches else ""
                size = f"{unit.end - unit.start:,} bytes from {unit.start:,} on"
                self._note(f"unit {unit.id} is lost, {size}{applied} (data.on_missing): {request.why}")
            return self._response()

    def _check_unit(self, unit: int) -> None:
        if unit >= self.passes.end_unit:
            raise ConfigError(f"unit: expected a unit below {self.passes.end_unit}, got {unit}")

    def checkpoint(self, request: messages.CheckpointRequest) -> messages.CheckpointResponse:
        """Request a checkpoint; the status shows when it is written."""
        with self._lock:
            self._check_term(request)
            ticket = self.checkpoints.request()
            self.tick()
            return {**self._response(), "ticket": ticket}

    def status(self) -> messages.StatusResponse:
        """Return the state of the run."""
        with self._lock:
            self.tick()
            return {
                **self._response(),
                "state": self._state(),
                "failure": self.failure,
                "passes": self._describe_passes(),
                "units": self.work.figures(),
                "leases": {str(unit): trainer for unit, trainer in self.work.leases().items()},
                "counters": asdict(self.work.counters),
                "meetings": asdict(self.meetings.figures),
                "wanted": self.wanted.counts(),
                "moving_to": None if self._move is None else self._move.servers,
                "started": {role: number for role, number in self.members.num_started.items()},
                "samples_per_s": sum(trainer.rate.per_s(self._clock()) for trainer in self.members.of("trainer")),
                "shards": [self._describe_shard(shard) for shard in self._shards()],
                "trainers": [self._describe_trainer(trainer) for trainer in self.members.of("trainer")],
                "checkpoint": self.checkpoints.describe(),
                "publish": None if self.publishing is None else self.publishing.describe(),
                "store": None if self.store is None else self.store(),
            }

    def _describe_passes(self) -> messages.PassesStatus:
        hours = self.passes.hours
        hour = self.passes.begun[-1].hour if self.passes.begun else None
        return {
            "begun": len(self.passes.begun),
            "planned": self.settings.plan.num_passes if hours is None else None,
            "ended": self._num_ended,
            "hour": hour["hour"] if hour else None,
            "waiting": hours.waiting if hours else None,
            "notes": list(self._notes),
        }

    def _state(self) -> str:
        if self.failure is not None:
            return "failed"
        return "finished" if self.is_finished else "running" if self._stop is None else "stopping"

    def _describe_shard(self, address: messages.ShardAddress) -> messages.ShardStatus:
        shard = self.members.shard(address["index"])
        if shard is None:
            return {**address, "figures": {}, "lease_left_s": 0.0}
        return {**address, "figures": shard.figures, "lease_left_s": self.members.lease_left_s(shard)}

    def _describe_trainer(self, trainer: Member) -> messages.TrainerStatus:
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
