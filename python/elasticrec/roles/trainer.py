"""The process of a trainer: it leases units, pulls rows, steps the network and pushes gradients; it saves no state."""

import json
import logging
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from functools import partial

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.data.batches import Batches, open_batches
from elasticrec.data.units import Unit, check_unchanged, is_lost
from elasticrec.errors import ElasticRecError, SampleError, UnavailableError
from elasticrec.fail_points import fail_point
from elasticrec.net.logs import RepeatFilter
from elasticrec.net.messages import FencedError, Figures, NoUnit, Response, TrainerRegistration, UnitLease
from elasticrec.net.metrics import MetricsServer
from elasticrec.roles.member import RoleOptions, Shutdown, ShutdownRequest, join
from elasticrec.roles.metrics import trainer_text
from elasticrec.roles.server_link import ServerLink
from elasticrec.roles.start import read_start
from elasticrec.training.clock import StageClock
from elasticrec.training.groups import MergeGroup, UnitBatch, split_batches, split_groups
from elasticrec.training.remote import make_networks, network_figures
from elasticrec.training.strategies import find_strategy

_RETRY_S = 0.2
# Interval between two requests of a trainer that waits at a meeting.
_MEET_POLL_S = 0.005

logger = logging.getLogger(__name__)


class LostUnitError(ElasticRecError):
    """The data of a unit is gone."""

    def __init__(self, unit: int, why: str) -> None:
        super().__init__(why)
        self.unit = unit


class TrainerProcess:
    """Trains units until the coordinator has no more."""

    def __init__(self, job: Job, options: RoleOptions) -> None:
        self.job, self._options = job, options
        self._strategy = find_strategy(job.train.strategy)
        self._start = read_start(options.run)
        self.parser = _core.Parser(json.dumps(job.features()))
        self.clock = StageClock(self._strategy.num_lanes(job))
        self.networks = make_networks(job, self.clock)
        self.shutdown = ShutdownRequest()
        self._client = self.shutdown.watch(options.client())
        self._link = ServerLink(self._start, options.security, job.train.ps)
        self._problems = RepeatFilter(logger.warning)
        self._registration: TrainerRegistration | None = None
        # Units that this trainer holds, and units that the coordinator has since leased to another trainer.
        self._units: list[int] = []
        self._dropped = frozenset[int]()
        self._ended = threading.Event()
        self._fenced: FencedError | None = None
        self.most_in_flight = 0
        self.meeting = 0
        # Consecutive attempts that failed because of servers, and the time from which another failure counts.
        self._attempts, self._next_attempt = 0, 0.0
        self._units_ended = {"done": 0, "given_back": 0}
        self._started = time.monotonic()
        self._metrics = MetricsServer(self._metrics_text, token=options.security.token or "", port=options.metrics_port)

    def run(self) -> None:
        """Train until no unit is left."""
        self._registration = join(
            lambda nonce: self._client.register_trainer(nonce, index=self._options.index, run=self._start.run_id),
            self.shutdown,
        )
        heartbeats = threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True)
        heartbeats.start()
        try:
            while self._fenced is None:
                answer = self._request_unit()
                if answer["unit"] is None:
                    if answer["finished"] or _is_stopped(answer):
                        return
                    with self.clock.stage("idle", self.clock.lanes):
                        self.shutdown.wait(answer["wait_s"])
                elif _is_stopped(answer):
                    return
                else:
                    self._train(answer)
            raise self._fenced
        finally:
            self._ended.set()
            heartbeats.join()

    @property
    def _incarnation(self) -> int:
        assert self._registration is not None, "a trainer registers first"
        return self._registration["incarnation"]

    @property
    def _name(self) -> str:
        assert self._registration is not None, "a trainer registers first"
        return f"trainer {self._registration['index']}"

    def _request_unit(self, *, waiting: bool = False) -> UnitLease | NoUnit:
        self.shutdown.check()
        with self.clock.stage("lease"):
            answer = self._client.lease(self._incarnation, self._units, waiting=waiting)
        if answer["unit"] is not None:
            fail_point("leased")
            self._units = [*self._units, answer["unit"]["id"]]
        return answer

    def _send_heartbeats(self) -> None:
        """Send heartbeats on a separate connection until the trainer ends."""
        client = self.shutdown.watch(self._options.client(self._client.term))
        sequence = 0
        with closing(client):
            while not self._ended.is_set():
                sequence += 1
                try:
                    answer = client.trainer_heartbeat(
                        self._incarnation,
                        sequence,
                        units=self._units,
                        meeting=self.meeting,
                        figures=self._figures(),
                    )
                except FencedError as error:
                    self._fenced = error
                    return
                except UnavailableError as error:
                    logger.warning("%s: %s", self._name, error)
                    continue
                self._dropped = frozenset(answer["drop"])
                self._link.check(answer["shards"])
                self._ended.wait(answer["next_s"])
            try:
                client.leave(self._incarnation, sequence + 1, figures=self._figures())
            except UnavailableError:
                # The coordinator has ended too, or the lease will expire.
                return

    def _figures(self) -> Figures:
        staleness = self._link.staleness
        return {
            **self._options.figures(),
            "metrics": self._metrics.url,
            "uptime_s": round(time.monotonic() - self._started, 1),
            "most_in_flight": self.most_in_flight,
            "meetings": self.meeting,
            "staleness_pushes": staleness.pushes,
            "staleness_sum": staleness.sum,
            "staleness_most": staleness.most,
            **{f"units_{result}": number for result, number in self._units_ended.items()},
            **network_figures(self.networks, self.clock),
        }

    def _metrics_text(self) -> str:
        index = 0 if self._registration is None else self._registration["index"]
        return trainer_text(index, self._figures(), dict(self.clock.seconds))

    def _train(self, lease: UnitLease) -> None:
        """Train a leased unit; give it back if a server is lost."""
        unit_id = lease["unit"]["id"]
        try:
            servers = self._link.connect(lease["shards"])
            self._strategy(self, servers).run(lease)
            for unit in self._units:
                self.report_done(unit)
        except LostUnitError as error:
            self._client.report_missing(self._incarnation, error.unit, str(error))
            for held in self._units:
                if held != error.unit:
                    self._client.give_back(self._incarnation, held)
        except UnavailableError as error:
            if isinstance(error, FencedError):
                raise
            self._problems.write(f"{self._name}: unit {unit_id}: {error}")
            self._link.drop()
            self._give_back()
            self._count_attempt(error)
            self.shutdown.wait(_RETRY_S)
        except Shutdown:
            # Servers record the name of every push, so another trainer continues after the last one.
            logger.info("%s: leaving the run, giving back unit %d", self._name, unit_id)
            self._give_back()
            raise
        finally:
            self._units = []

    def _count_attempt(self, error: UnavailableError) -> None:
        """Give up after `train.ps.retries` attempts; count at most one per lease, time enough to replace a server."""
        now, ps = time.monotonic(), self.job.train.ps
        if now < self._next_attempt:
            return
        self._attempts += 1
        self._next_attempt = now + ps.lease_s
        if ps.retries is not None and self._attempts > ps.retries:
            raise UnavailableError(f"{error} ({self._attempts} attempts)") from None

    def _give_back(self) -> None:
        for held in self._units:
            self._units_ended["given_back"] += 1
            self._client.give_back(self._incarnation, held)

    def lease(self, *, waiting: bool = False) -> UnitLease | None:
        """Lease another unit in addition to those held; return None if none is available now."""
        if self._fenced is not None:
            raise self._fenced
        answer = self._request_unit(waiting=waiting)
        if _is_stopped(answer):
            raise UnavailableError("the run is stopping")
        return answer if answer["unit"] is not None else None

    def report_done(self, unit: int) -> None:
        """Report that all pushes of a unit are acknowledged."""
        self._units_ended["done"] += 1
        self._attempts, self._next_attempt = 0, 0.0
        with self.clock.stage("lease"):
            self._client.report_done(self._incarnation, unit)
        self._units = [held for held in self._units if held != unit]

    def lease_ahead(self, servers: _core.PsClient) -> UnitLease | None:
        """Lease another unit while one is in training, if there is one and the servers are the same."""
        answer = self._request_unit()
        if answer["unit"] is None:
            return None
        if self._fenced is None and servers.incarnations == [shard["incarnation"] for shard in answer["shards"]]:
            return answer
        unit = answer["unit"]["id"]
        self._units_ended["given_back"] += 1
        self._client.give_back(self._incarnation, unit)
        self._units = [held for held in self._units if held != unit]
        return None

    def open_unit(self, unit: Unit) -> Batches:
        """Start reading a unit."""
        with self._detect_loss(unit):
            check_unchanged([unit])
            return open_batches(self.job, self.parser, [unit], shuffle=self.job.data.shuffle)

    @contextmanager
    def _detect_loss(self, unit: Unit) -> Iterator[None]:
        """Raise `LostUnitError` for data that is gone, if the job allows skipping it."""
        try:
            yield
        except UnavailableError:
            raise
        except (OSError, SampleError) as error:
            if self.job.data.on_missing == "fail" or not is_lost(unit):
                raise
            reason = (error.strerror or "").lower() if isinstance(error, OSError) else ""
            raise LostUnitError(unit.id, f"{unit.path}: {reason}" if reason else str(error)) from None

    def read(self, unit: Unit, reader: Batches) -> Iterator[_core.Batch]:
        """Yield batches as they are read; raise `Shutdown` between two of them if it was requested."""
        batches = iter(reader)
        while True:
            self.shutdown.check()
            if unit.id in self._dropped:
                raise UnavailableError("its lease expired, another trainer has it")
            with self._detect_loss(unit), self.clock.stage("wait"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def batches(self, unit: Unit) -> Generator[UnitBatch]:
        """Yield the batches of a unit."""
        with closing(self.open_unit(unit)) as reader:
            yield from split_batches(self.read(unit, reader), partial(self.parser.empty, unit.id))

    def groups(self, unit: Unit) -> Generator[MergeGroup]:
        """Yield the merge groups of a unit."""
        empty = partial(self.parser.empty, unit.id)
        with closing(self.open_unit(unit)) as reader:
            yield from split_groups(self.read(unit, reader), self.job.train.merge_size, empty)

    def meet(self) -> None:
        """Wait until the other trainers with a unit have reached the same meeting."""
        self.meeting += 1
        while not self._client.meet(self._incarnation, self.meeting)["go"]:
            if self._fenced is not None:
                raise self._fenced
            self.shutdown.check()
            time.sleep(_MEET_POLL_S)


def _is_stopped(answer: Response) -> bool:
    return any(command["command"] == "stop" for command in answer["commands"])
