"""The state of a run and the coordinator's periodic work: begin and end passes, take checkpoints, publish versions, and
move partitions to another number of shards."""

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from elasticrec.config.train import METRICS
from elasticrec.coordinator.checkpoint import last_term
from elasticrec.coordinator.checkpoints import Checkpoints, Hooks
from elasticrec.coordinator.meetings import Meetings
from elasticrec.coordinator.members import Member, Members
from elasticrec.coordinator.passes import Passes
from elasticrec.coordinator.scaling import Move, MoveHooks, ProcessTarget, wanted_of
from elasticrec.coordinator.settings import Settings
from elasticrec.coordinator.work import Work, WorkTiming
from elasticrec.data.hours import PlanCallbacks
from elasticrec.errors import ConfigError, ElasticRecError
from elasticrec.journal import Journal
from elasticrec.net.messages import StoreStatus
from elasticrec.net.placement import ShardOwner
from elasticrec.publish.servers.publishing import PublishHooks, Publishing
from elasticrec.run import Run

# Number of notes that the status shows.
_KEPT_NOTES = 100

logger = logging.getLogger(__name__)


class RunState:
    """The state of a run, from the journal and the members' reports, and the actions that are due."""

    def __init__(
        self,
        run: Run,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        # Numbered lines for the user about the data and the checkpoints.
        self._notes: deque[tuple[int, str]] = deque(maxlen=_KEPT_NOTES)
        self._lock = threading.RLock()
        self._journal = Journal.open(run.path / "coordinator", last_term(run.checkpoints))
        try:
            self._start(run, clock)
        except BaseException:
            self._journal.close()
            raise

    def _start(self, run: Run, clock: Callable[[], float]) -> None:
        settings, append = self.settings, self._journal.append
        self.members = Members(settings.timing, clock, append)
        self.passes = Passes(run.units, settings.plan, append, PlanCallbacks(clock, self._note))
        hooks = Hooks(clock, append, self._note)
        self.checkpoints = Checkpoints(run.checkpoints, settings.checkpoint, settings.num_partitions, self.term, hooks)
        self.publishing = self._start_publishing(clock)
        self.store: Callable[[], StoreStatus] | None = None
        """Returns the state of the rollout to the online store, for the status."""
        # Ticket of the publish at the end of the pass, while the pass is complete.
        self._version_ticket: int | None = None
        self._last_pass: dict[str, Any] = {}
        self.is_finished = False
        # Number of passes whose end is in the journal.
        self._num_ended = 0
        self._stop: str | None = None
        self.failure: str | None = None
        # Ticket of the checkpoint at the end of the pass, while the pass is complete.
        self._ticket: int | None = None
        self._clock = clock
        self._move: Move | None = None
        last_checkpoint = self._replay(run)
        timing = settings.timing
        self.work = Work(
            self.members.map,
            sys.maxsize if settings.plan.hours else settings.plan.num_passes,
            WorkTiming(timing.lease_s + timing.margin_s, settings.settle_s),
            clock,
            settings.group_size,
        )
        self.meetings = Meetings()
        for begun in self.passes.begun:
            self.work.add_pass(begun.end_unit)
        for unit in self.passes.missing:
            self.work.skip(unit)
        for member in self.members.of("ps"):
            self.work.start_shard(member.index, member.incarnation)
        self.checkpoints.start(last_checkpoint)
        if not self.passes.begun:
            self._begin_pass()

    def _start_publishing(self, clock: Callable[[], float]) -> Publishing | None:
        settings, target = self.settings.publish, self.settings.target
        if settings is None or target is None:
            return None
        hooks = PublishHooks(clock, self._note, self._journal.check_term, self.settings.run)
        return Publishing(settings, target, self.term, hooks)

    def _replay(self, run: Run) -> str | None:
        """Replay the journal of earlier coordinators; return the last checkpoint that it commits."""
        identity = {"job": self.settings.job, "num_partitions": self.settings.num_partitions}
        last_checkpoint, finished = None, -1
        for entry in self._journal.entries:
            match entry["kind"]:
                case "run":
                    changed = sorted(key for key, value in identity.items() if entry[key] != value)
                    if changed:
                        keys = ", ".join(f"`{key}`" for key in changed)
                        raise ConfigError(
                            f"{run.path}: the run belongs to another job, which differs in {keys}: "
                            "its job.yaml was changed after the start"
                        )
                case "pass":
                    self.passes.replay(entry)
                case "checkpoint":
                    last_checkpoint = entry["name"]
                case "hour":
                    self.passes.replay_hour(entry)
                case "missing":
                    self.passes.replay_missing(entry)
                case "ended":
                    self._num_ended = entry["number"] + 1
                    self._last_pass = entry
                case "finished":
                    finished = entry["passes"]
                case _:
                    self.members.replay(entry)
        if not self._journal.entries:
            self._journal.append({"kind": "run", **identity})
        if not any(entry["kind"] == "map" for entry in self._journal.entries):
            self.members.set_map(self.settings.servers, self.settings.num_partitions)
        self._restore_wanted()
        # With a higher `train.epochs` or a later `data.hours.end` the run continues.
        self.is_finished = finished == len(self.passes.begun) and self.passes.is_last
        return last_checkpoint

    def _restore_wanted(self) -> None:
        job = ProcessTarget(self.settings.servers, self.settings.trainers)
        self.wanted = wanted_of(self._journal.entries, job)
        before = ProcessTarget.last(self._journal.entries, "job")
        if job != before:
            if before is not None:
                # In this order, a coordinator that dies after the first entry leaves the same numbers to its successor.
                self._set_wanted(self.wanted)
            self._journal.append(job.entry("job"))

    @property
    def term(self) -> int:
        """The coordinator's term; roles reject responses of a lower term than they have seen."""
        return self._journal.term

    def close(self) -> None:
        """Release the run; members keep their state and wait for the next coordinator."""
        with self._lock:
            self._journal.close()
            if self.publishing is not None:
                self.publishing.close()

    def tick(self) -> None:
        """Do the work that is due; called periodically and with every request."""
        with self._lock:
            for index in range(self.members.map.servers):
                self.work.set_is_up(index, self._is_serving(self.members.shard(index)))
            for gone in self.members.forget():
                self.meetings.forget(gone.incarnation)
            self.work.expire_leases()
            self._tick_checkpoints()
            self._tick_publishing()
            self._advance()
            self._advance_move()

    def _tick_checkpoints(self) -> None:
        """Begin or give up checkpoints; with groups, only between two groups."""
        # A trainer that registered with an earlier coordinator may be inside a group.
        may_begin = self.settings.group_size is None or (self.work.is_between_groups() and not self.members.unheard())
        self.checkpoints.tick(self._owners(), self._manifest, may_begin=may_begin)

    def _tick_publishing(self) -> None:
        if self.publishing is not None and not self.is_finished:
            self.publishing.tick(self._owners(), self._facts, may_begin=self._may_publish())

    def _is_publish_due(self) -> bool:
        """Whether trainers must wait at the end of their group until a version is written."""
        publishing = self.publishing
        return publishing is not None and self.work.has_begun() and publishing.is_due(self._learning_figures())

    def _may_publish(self) -> bool:
        """Whether a version would be consistent now: no shard is behind the others, and no step is in flight."""
        if self.members.unheard() or self.work.is_behind() or not self.work.has_begun():
            return False
        if self._version_ticket is None and self.publishing is not None and self.publishing.settings.every_s is None:
            return False
        return self.settings.group_size is None or self.work.is_between_groups()

    def _facts(self) -> dict[str, Any]:
        """Return the manifest fields of a version that begins now."""
        is_complete = self.work.is_pass_complete()
        return {
            "passes": len(self.passes.begun) - (not is_complete),
            "until": self.passes.last_complete_hour(is_complete=is_complete),
            "train": self._last_pass.get("train") or self._metrics_so_far(),
            "learned": self._learning_figures(),
        }

    def _learning_figures(self) -> list[Any]:
        """Return figures that change whenever the shards' parameters do, as far as reported."""
        shards = [self.members.shard(index) for index in range(self.members.map.servers)]
        names = ("applied", "evicted", "limit_evicted")
        figures = [(shard.incarnation, [shard.figures.get(name) for name in names]) for shard in shards if shard]
        return [figures, self.work.num_boundaries()]

    def _metrics_so_far(self) -> list[dict[str, Any]]:
        """Return the metrics of an unfinished first pass, which the shard of partition 0 reports."""
        shard = self.members.shard(0)
        figures = {} if shard is None else shard.figures
        found: list[dict[str, Any]] = []
        while figures.get(f"samples_{len(found)}"):
            names = ("samples", *METRICS)
            found.append({name: figures.get(f"{name}_{len(found)}") for name in names})
        return found

    def _is_serving(self, shard: Member | None) -> bool:
        return shard is not None and self.members.is_alive(shard) and shard.state == "serving"

    def _owners(self) -> dict[int, ShardOwner] | None:
        """Return the owners of all shards if all of them serve, else None."""
        shards = [self.members.shard(index) for index in range(self.members.map.servers)]
        serving = [shard for shard in shards if shard is not None and self._is_serving(shard)]
        if len(serving) < len(shards) or self._stop is not None:
            return None
        return {shard.index: ShardOwner(shard.incarnation, self.members.map.owned(shard.index)) for shard in serving}

    def _advance(self) -> None:
        """Save a pass that is complete on all shards, then begin the next one or finish the run."""
        if self.is_finished or self._stop is not None:
            return
        if not self.passes.begun:
            self._begin_next_or_fail()
        elif not self.work.is_pass_complete():
            # A complete pass becomes incomplete if a shard is restored after the request for a checkpoint.
            self._ticket = self._version_ticket = None
        elif self._ticket is None:
            self._ticket = self.checkpoints.request()
            self._tick_checkpoints()
        elif self.checkpoints.is_committed(self._ticket):
            self._end_pass()
            if self._awaits_version(is_end=False):
                return
            if self._begin_next_or_fail():
                self._ticket = self._version_ticket = None
            elif self.passes.is_last and self.failure is None and not self._awaits_version(is_end=True):
                self._journal.append({"kind": "finished", "passes": len(self.passes.begun)})
                self.is_finished = True

    def _awaits_version(self, *, is_end: bool) -> bool:
        """Whether to wait for the version at the end of the pass: for its parts, or for its commit if the run ends."""
        publishing = self.publishing
        if publishing is None or not (is_end or publishing.settings.every_s is None):
            return False
        if self._version_ticket is None:
            self._version_ticket = publishing.request()
            self._tick_publishing()
        has_version = publishing.is_done if is_end else publishing.is_written
        return not has_version(self._version_ticket)

    def _end_pass(self) -> None:
        """Write the metrics of the last pass to the journal, once."""
        newest, number = self.checkpoints.newest, len(self.passes.begun) - 1
        if self._num_ended > number or newest is None:
            return
        try:
            measured = self.settings.measure(newest)
        except (ElasticRecError, OSError) as error:
            # The metrics are informative: the parameters are saved.
            logger.warning("pass %d: not measured: %s", number + 1, error)
            measured = {}
        hour = self.passes.begun[-1].hour
        self._journal.append(
            {"kind": "ended", "number": number, "checkpoint": newest.name, "hour": hour and hour["hour"], **measured}
        )
        self._num_ended = number + 1
        self._last_pass = measured

    def _begin_next_or_fail(self) -> bool:
        try:
            return self._begin_pass()
        except (ElasticRecError, OSError) as error:
            self.failure = str(error)
            self.stop(self.failure)
            logger.error("%s", self.failure)
            return False

    def _begin_pass(self) -> bool:
        begun = self.passes.begin_next()
        if begun is not None:
            self.work.add_pass(begun.end_unit)
        return begun is not None

    def stop(self, why: str) -> None:
        """Stop all members."""
        with self._lock:
            self._stop = why

    def _note(self, text: str) -> None:
        """Log a line and show it in the status."""
        self._notes.append((self._notes[-1][0] + 1 if self._notes else 1, text))
        logger.info("%s", text)

    def _set_wanted(self, wanted: ProcessTarget) -> None:
        self._journal.append(wanted.entry())
        self.wanted = wanted
        logger.info("scaling to %d servers and %d trainers", wanted.servers, wanted.trainers)

    def _advance_move(self) -> None:
        """Move the partitions to the requested number of shards."""
        before, wanted = self.members.map.servers, self.wanted.servers
        if before == wanted or self.is_finished or self._stop is not None:
            self._move, self.members.num_next_shards = None, 0
            return
        self.members.num_next_shards = wanted
        if self._move is None or self._move.servers != wanted:
            hooks = MoveHooks(
                self.checkpoints.request, self.checkpoints.is_committed, lambda: self.checkpoints.failures_in_a_row
            )
            self._move = Move(wanted, self._clock(), hooks)
        # With groups the checkpoint itself waits for the end of a group.
        leases = {} if self.settings.group_size is not None else self.work.leases()
        if self._move.advance(self._clock(), leases):
            self._set_map(wanted)
        elif self._move.is_hopeless:
            logger.warning("servers: not scaled from %d to %d: the checkpoint could not be written", before, wanted)
            self._set_wanted(ProcessTarget(before, self.wanted.trainers))

    def _set_map(self, servers: int) -> None:
        """Change the map: new shards load the last checkpoint once the old ones have stopped."""
        before = self.members.map.servers
        self.members.set_map(servers)
        self.work.set_map(self.members.map)
        self._move, self.members.num_next_shards = None, 0
        epoch = self.members.map.epoch
        logger.info("servers: the partitions moved from %d to %d, map %d", before, servers, epoch)

    def _manifest(self) -> dict[str, Any]:
        """Return the manifest fields of a checkpoint."""
        return {
            "map_epoch": self.members.map.epoch,
            "passes": [asdict(begun) for begun in self.passes.begun],
            "boundaries": self.passes.boundaries,
            "skipped_hours": self.passes.skipped,
            "missing": list(self.passes.missing.values()),
            **self.settings.manifest,
        }
