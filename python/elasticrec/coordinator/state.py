"""The state of a run, and what the coordinator does by itself: passes begin and end, checkpoints are taken, partitions
move to another number of shards."""

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from elasticrec.coordinator.checkpoints import Checkpoint, Checkpoints, CheckpointSettings, Hooks, last_term
from elasticrec.coordinator.meetings import Meetings
from elasticrec.coordinator.members import Member, Members, Timing
from elasticrec.coordinator.passes import Passes, PassPlan
from elasticrec.coordinator.scaling import Move, Saving, Wanted, wanted_of
from elasticrec.coordinator.work import Work, WorkTiming
from elasticrec.data.hours import PlanCallbacks
from elasticrec.errors import ConfigError, ElasticRecError
from elasticrec.journal import Journal
from elasticrec.net.messages import ShardOwner
from elasticrec.publish.servers.publishing import PublishHooks, Publishing, PublishSettings, run_on_thread
from elasticrec.publish.servers.target import VersionTarget
from elasticrec.run import Run

# Lines that the status shows.
_KEPT_NOTES = 100

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What a coordinator has to know of its job."""

    job: str
    """Digest of all that must be the same as long as the run lasts."""
    num_partitions: int
    servers: int
    """Shards that a new run has; of one that goes on the journal knows."""
    plan: PassPlan
    trainers: int = 1
    """That a new run has; of one that was scaled the journal knows."""
    timing: Timing = field(default_factory=Timing)
    settle_s: float = 2.0
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    """More for the manifests of checkpoints, such as the job."""
    stop_when_finished: bool = True
    measure: Callable[[Checkpoint], dict[str, Any]] = lambda _: {}
    """What a pass came to, from the checkpoint at its end."""
    group_size: int | None = None
    """Of `sync`: units whose batches make steps together. Shards go back together then."""
    run_id: str = ""
    """What roles know the run by, if they do: others are refused."""
    publish: PublishSettings | None = None
    """When versions are published; None for never."""
    target: VersionTarget | None = None
    """Where they go."""
    run: Callable[[Callable[[], None]], None] = run_on_thread
    """Does what must not hold the coordinator up."""


class RunState:
    """What is known of the run, from its journal and from what members said, and what follows from it by the clock."""

    def __init__(
        self,
        run: Run,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        # What people should hear of the data and the checkpoints, counted.
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
        self.store: Callable[[], dict[str, Any]] | None = None
        """How the roll-out to the online store goes, for the status."""
        # Which publish is of the end of the pass, while it is complete.
        self._version_ticket: int | None = None
        self._last_pass: dict[str, Any] = {}
        self.is_finished = False
        # Passes whose end is written down.
        self._num_ended = 0
        self._stop: str | None = None
        self.failure: str | None = None
        self._last_told = ""
        # Which checkpoint ends the pass, while it is complete.
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
        hooks = PublishHooks(clock, logger.info, self._note, self._journal.check_term, self.settings.run)
        return Publishing(settings, target, self.term, hooks)

    def _replay(self, run: Run) -> str | None:
        """Take in what an earlier coordinator wrote down; returns the checkpoint that it committed last."""
        identity = {"job": self.settings.job, "num_partitions": self.settings.num_partitions}
        last_checkpoint, finished = None, -1
        for entry in self._journal.entries:
            match entry["kind"]:
                case "run":
                    changed = sorted(key for key, value in identity.items() if entry[key] != value)
                    if changed:
                        keys = ", ".join(f"`{key}`" for key in changed)
                        raise ConfigError(
                            f"{run.path}: the run of another job, which differs in {keys}: "
                            "its job.yaml was changed after it began"
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
        self._start_wanted()
        # a higher `train.epochs`, or a later `data.hours.end`, goes on
        self.is_finished = finished == len(self.passes.begun) and self.passes.is_last
        return last_checkpoint

    def _start_wanted(self) -> None:
        job = Wanted(self.settings.servers, self.settings.trainers)
        self.wanted = wanted_of(self._journal.entries, job)
        before = Wanted.last(self._journal.entries, "job")
        if job != before:
            if before is not None:
                # first, so that whoever finds the other entry missing comes to the same again
                self._want(self.wanted)
            self._journal.append(job.entry("job"))

    @property
    def term(self) -> int:
        """In every answer; roles refuse a lower one than they have seen."""
        return self._journal.term

    def close(self) -> None:
        """Let the run go; members keep what they have and wait for the next coordinator."""
        with self._lock:
            self._journal.close()
            if self.publishing is not None:
                self.publishing.close()

    def tick(self) -> None:
        """What is due by the clock; called often, and with every request."""
        with self._lock:
            for index in range(self.members.map.servers):
                self.work.set_up(index, self._is_serving(self.members.shard(index)))
            for gone in self.members.forget():
                self.meetings.forget(gone.incarnation)
            self.work.lapse()
            self._tick_checkpoints()
            self._tick_publishing()
            self._advance()
            self._advance_move()

    def _tick_checkpoints(self) -> None:
        """Where shards go back together, a checkpoint is one moment of all of them."""
        # a trainer that an earlier coordinator knew may be inside a group
        may_begin = self.settings.group_size is None or (self.work.is_between_groups() and not self.members.unheard())
        self.checkpoints.tick(self._owners(), self._manifest, may_begin=may_begin)

    def _tick_publishing(self) -> None:
        if self.publishing is not None and not self.is_finished:
            self.publishing.tick(self._owners(), self._facts, may_begin=self._may_publish())

    def _is_publish_due(self) -> bool:
        """Whether trainers have to wait for a version at the end of their group."""
        publishing = self.publishing
        return publishing is not None and self.work.has_begun() and publishing.is_due(self._learned())

    def _may_publish(self) -> bool:
        """Whether a version of now would be of one model: no shard lacks what others have, and no step is half done."""
        if self.members.unheard() or self.work.is_behind() or not self.work.has_begun():
            return False
        if self._version_ticket is None and self.publishing is not None and self.publishing.settings.every_s is None:
            return False
        return self.settings.group_size is None or self.work.is_between_groups()

    def _facts(self) -> dict[str, Any]:
        """What is known of a version that is cut now, beside its parts."""
        is_complete = self.work.is_pass_complete()
        return {
            "passes": len(self.passes.begun) - (not is_complete),
            "until": self.passes.until(is_complete=is_complete),
            "train": self._last_pass.get("train") or self._metrics_so_far(),
            "learned": self._learned(),
        }

    def _learned(self) -> list[Any]:
        """What tells whether the shards changed, by what they said last."""
        shards = [self.members.shard(index) for index in range(self.members.map.servers)]
        names = ("applied", "evicted", "limit_evicted")
        figures = [(shard.incarnation, [shard.figures.get(name) for name in names]) for shard in shards if shard]
        return [figures, self.work.num_boundaries()]

    def _metrics_so_far(self) -> list[dict[str, Any]]:
        """Of a first pass that is not at its end, from what the shard of partition 0 says."""
        shard = self.members.shard(0)
        figures = {} if shard is None else shard.figures
        found: list[dict[str, Any]] = []
        while figures.get(f"samples_{len(found)}"):
            names = ("samples", "auc", "log_loss", "copc")
            found.append({name: figures.get(f"{name}_{len(found)}") for name in names})
        return found

    def _is_serving(self, shard: Member | None) -> bool:
        return shard is not None and self.members.is_alive(shard) and shard.state == "serving"

    def _owners(self) -> dict[int, ShardOwner] | None:
        """All shards, if all of them serve."""
        shards = [self.members.shard(index) for index in range(self.members.map.servers)]
        serving = [shard for shard in shards if shard is not None and self._is_serving(shard)]
        if len(serving) < len(shards) or self._stop is not None:
            return None
        return {shard.index: ShardOwner(shard.incarnation, self.members.map.owned(shard.index)) for shard in serving}

    def _advance(self) -> None:
        """A pass that is complete everywhere is saved, then comes the next one, or the end."""
        if self.is_finished or self._stop is not None:
            return
        if not self.passes.begun:
            self._begin_next_or_fail()
        elif not self.work.is_pass_complete():
            # also of a shard that went back after the checkpoint was asked for
            self._ticket = self._version_ticket = None
        elif self._ticket is None:
            self._ticket = self.checkpoints.want()
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
        """Whether a version has to be cut where the pass ends; the last one of a run has to be committed."""
        publishing = self.publishing
        if publishing is None or not (is_end or publishing.settings.every_s is None):
            return False
        if self._version_ticket is None:
            self._version_ticket = publishing.want()
            self._tick_publishing()
        is_there = publishing.is_done if is_end else publishing.is_written
        return not is_there(self._version_ticket)

    def _end_pass(self) -> None:
        """Write down what the last pass came to, once."""
        newest, number = self.checkpoints.newest, len(self.passes.begun) - 1
        if self._num_ended > number or newest is None:
            return
        try:
            measured = self.settings.measure(newest)
        except (ElasticRecError, OSError) as error:
            # the numbers are for people: what was learned is saved
            logger.info(f"pass {number + 1}: not measured: {error}")
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
            logger.info(self.failure)
            return False

    def _begin_pass(self) -> bool:
        begun = self.passes.begin_next()
        if begun is not None:
            self.work.add_pass(begun.end_unit)
        return begun is not None

    def stop(self, why: str) -> None:
        """Tell all members to end."""
        with self._lock:
            self._stop = why

    def _note(self, text: str) -> None:
        """Say a line that the status shows as well."""
        self._notes.append((self._notes[-1][0] + 1 if self._notes else 1, text))
        logger.info(text)

    def tell(self, text: str) -> None:
        """Say a line, not the same one over and over."""
        with self._lock:
            if text != self._last_told:
                self._last_told = text
                logger.info(text)

    def _want(self, wanted: Wanted) -> None:
        self._journal.append(wanted.entry())
        self.wanted = wanted
        logger.info(f"wanted from now on: {wanted.servers} servers, {wanted.trainers} trainers")

    def _advance_move(self) -> None:
        """Towards the number of shards that is wanted."""
        before, wanted = self.members.map.servers, self.wanted.servers
        if before == wanted or self.is_finished or self._stop is not None:
            self._move, self.members.coming = None, 0
            return
        self.members.coming = wanted
        if self._move is None or self._move.servers != wanted:
            saving = Saving(
                self.checkpoints.want, self.checkpoints.is_committed, lambda: self.checkpoints.failures_in_a_row
            )
            self._move = Move(wanted, self._clock(), saving)
        # with groups the checkpoint waits for the end of one by itself
        leases = {} if self.settings.group_size is not None else self.work.leases()
        if self._move.advance(self._clock(), leases):
            self._set_map(wanted)
        elif self._move.is_hopeless:
            logger.info(f"servers: {before} stay, their checkpoint could not be written")
            self._want(Wanted(before, self.wanted.trainers))

    def _set_map(self, servers: int) -> None:
        """The old shards are members no more; new ones load the last checkpoint once those have stopped."""
        before = self.members.map.servers
        self.members.set_map(servers)
        self.work.set_map(self.members.map)
        self._move, self.members.coming = None, 0
        logger.info(f"servers: the partitions moved from {before} to {servers}, map {self.members.map.epoch}")

    def _manifest(self) -> dict[str, Any]:
        """What a checkpoint says beside its files."""
        return {
            "map_epoch": self.members.map.epoch,
            "passes": [asdict(begun) for begun in self.passes.begun],
            "boundaries": self.passes.boundaries,
            "skipped_hours": self.passes.skipped,
            "missing": list(self.passes.missing.values()),
            **self.settings.manifest,
        }
