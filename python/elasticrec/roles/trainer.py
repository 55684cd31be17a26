"""The process of a trainer: it leases units, pulls, steps the network and pushes; it keeps nothing of its own."""

import json
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.data.batches import Batches, open_batches
from elasticrec.data.units import Unit, check_unchanged, is_lost
from elasticrec.errors import ConfigError, ElasticRecError, SampleError, UnavailableError
from elasticrec.fail_points import fail_point
from elasticrec.net.messages import FencedError
from elasticrec.net.metrics import MetricsServer
from elasticrec.roles.member import Answer, RoleOptions, Shutdown, ShutdownRequest, join
from elasticrec.roles.metrics import trainer_text
from elasticrec.roles.start import read_start
from elasticrec.training.clock import StageClock
from elasticrec.training.groups import MergeGroup, UnitBatch, split_batches, split_groups
from elasticrec.training.remote import figures_of, networks_of
from elasticrec.training.strategies import find_strategy

Say = Callable[[str], None]

_RETRY_S = 0.2
_MEET_AGAIN_S = 0.005


@dataclass(frozen=True)
class Stale:
    """How old the rows were that batches were learned from, in pushes that came between."""

    pushes: int = 0
    sum: int = 0
    most: int = 0

    def with_present(self, present: _core.Staleness | None) -> "Stale":
        """Beside what is counted already."""
        if present is None:
            return self
        return Stale(self.pushes + present.pushes, self.sum + present.sum, max(self.most, present.most))


class LostError(ElasticRecError):
    """A unit whose data is gone."""

    def __init__(self, unit: int, why: str) -> None:
        super().__init__(why)
        self.unit = unit


class TrainerProcess:
    """Trains units until the coordinator has no more."""

    def __init__(self, job: Job, options: RoleOptions, say: Say) -> None:
        self.job, self._options, self._say = job, options, say
        self._strategy = find_strategy(job.train.strategy)
        self._start = read_start(options.run)
        self.parser = _core.Parser(json.dumps(job.features()))
        self.clock = StageClock(self._strategy.num_lanes(job))
        self.networks = networks_of(job, say, self.clock)
        self.shutdown = ShutdownRequest()
        self._client = self.shutdown.watch(options.client())
        self._tls = options.security.wire()
        self._unfit_since: float | None = None
        self._said = ""
        self._place: Answer = {}
        self._servers: _core.PsClient | None = None
        # Of the connections that it has: to which incarnations, and how another thread ends them.
        self._link: tuple[list[int], _core.PsCloser] | None = None
        self._units: list[int] = []
        # Those that the coordinator gave to somebody else since.
        self._dropped = frozenset[int]()
        self._ended = threading.Event()
        self._fenced: FencedError | None = None
        self.most_in_flight = 0
        self.meeting = 0
        # In a row that servers did not let end, and when another one counts.
        self._attempts, self._next_attempt = 0, 0.0
        self._units_ended = {"done": 0, "given_back": 0}
        # Of connections that ended, and of the present ones; one object, as other threads read it.
        self._stale: tuple[Stale, _core.Staleness | None] = (Stale(), None)
        self._started = time.monotonic()
        self._metrics = MetricsServer(self._metrics_text, token=options.security.token or "", port=options.metrics_port)

    def run(self) -> None:
        """Work until there is nothing left."""
        self._place = join(self._client, "trainer", self._options.index, self.shutdown, run=self._start.run_id)
        beating = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        beating.start()
        try:
            while self._fenced is None:
                answer = self._ask()
                if answer.get("finished") or any(c["command"] == "stop" for c in answer["commands"]):
                    return
                if answer["unit"] is None:
                    with self.clock.stage("idle", self.clock.lanes):
                        self.shutdown.wait(answer["wait_s"])
                else:
                    self._work(answer)
            raise self._fenced
        finally:
            self._ended.set()
            beating.join()

    def _ask(self, *, waiting: bool = False) -> Answer:
        self.shutdown.check()
        with self.clock.stage("lease"):
            answer = self._client.lease(self._place["incarnation"], self._units, waiting=waiting)
        if answer["unit"] is not None:
            fail_point("leased")
            self._units = [*self._units, answer["unit"]["id"]]
        return answer

    def _beat(self) -> None:
        """Signs of life, on a connection of their own."""
        client = self.shutdown.watch(self._options.client(self._client.term))
        sequence = 0
        with closing(client):
            while not self._ended.is_set():
                sequence += 1
                try:
                    answer = client.heartbeat(
                        self._place["incarnation"],
                        sequence,
                        units=self._units,
                        meeting=self.meeting,
                        figures=self._figures(),
                    )
                except FencedError as error:
                    self._fenced = error
                    return
                except UnavailableError as error:
                    self._say(f"trainer {self._place['index']}: {error}")
                    continue
                self._dropped = frozenset(answer["drop"])
                self._check_link(answer["shards"])
                self._ended.wait(answer["next_s"])
            try:
                client.heartbeat(self._place["incarnation"], sequence + 1, leaving=True, figures=self._figures())
            except UnavailableError:
                # it is gone too, and knows by its clock
                return

    def _check_link(self, shards: list[Answer]) -> None:
        """A server that was replaced while it hung answers no more: nobody shall wait for it."""
        link = self._link
        if link is not None and link[0] != [shard["incarnation"] for shard in shards]:
            link[1].close()

    def _figures(self) -> Answer:
        before, present = self._stale
        stale = before.with_present(present)
        return {
            **self._options.figures(),
            "metrics": self._metrics.url,
            "uptime_s": round(time.monotonic() - self._started, 1),
            "most_in_flight": self.most_in_flight,
            "meetings": self.meeting,
            "staleness_pushes": stale.pushes,
            "staleness_sum": stale.sum,
            "staleness_most": stale.most,
            **{f"units_{result}": number for result, number in self._units_ended.items()},
            **figures_of(self.networks, self.clock),
        }

    def _metrics_text(self) -> str:
        return trainer_text(self._place.get("index", 0), self._figures(), dict(self.clock.seconds))

    def _work(self, answer: Answer) -> None:
        """Train what was leased; what a lost server interrupts is given back."""
        try:
            servers = self._connect(answer["shards"])
            self._strategy(self, servers).run(answer)
            for unit in self._units:
                self.done(unit)
        except LostError as error:
            self._client.missing(self._place["incarnation"], error.unit, str(error))
            for held in self._units:
                if held != error.unit:
                    self._client.give_back(self._place["incarnation"], held)
        except UnavailableError as error:
            if isinstance(error, FencedError):
                raise
            self._say_once(f"trainer {self._place['index']}: unit {answer['unit']['id']}: {error}")
            self._servers = None
            self._give_back()
            self._count_attempt(error)
            self.shutdown.wait(_RETRY_S)
        except Shutdown:
            # what it pushed is known by its name: another trainer goes on behind it
            self._say(f"trainer {self._place['index']}: leaves, unit {answer['unit']['id']} is given back")
            self._give_back()
            raise
        finally:
            self._units = []

    def _count_attempt(self, error: UnavailableError) -> None:
        """Give up after `retries`. One that comes before a dead server can have been replaced tells nothing new."""
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
            self._client.give_back(self._place["incarnation"], held)

    def lease(self, *, waiting: bool = False) -> Answer | None:
        """Another unit beside those it has, or None if there is none for now."""
        if self._fenced is not None:
            raise self._fenced
        answer = self._ask(waiting=waiting)
        if any(command["command"] == "stop" for command in answer["commands"]):
            raise UnavailableError("the run stops")
        return answer if answer["unit"] is not None else None

    def done(self, unit: int) -> None:
        """All of a unit is pushed and acknowledged."""
        self._units_ended["done"] += 1
        self._attempts, self._next_attempt = 0, 0.0
        with self.clock.stage("lease"):
            self._client.done(self._place["incarnation"], unit)
        self._units = [held for held in self._units if held != unit]

    def _connect(self, shards: list[Answer]) -> _core.PsClient:
        """Connections to the present servers."""
        incarnations = [shard["incarnation"] for shard in shards]
        if self._servers is None or self._servers.incarnations != incarnations:
            before, present = self._stale
            self._stale = (before.with_present(present), None)
            self._link = None
            self._servers = self._open([shard["address"] for shard in shards])
            self._link = (incarnations, self._servers.closer())
            self._stale = (self._stale[0], self._servers.staleness)
        return self._servers

    def _open(self, addresses: list[str]) -> _core.PsClient:
        security, ps = self._options.security, self.job.train.ps
        for index, address in enumerate(addresses):
            host = address.rpartition(":")[0].strip("[]")
            security.check_send(f"ps shard {index} at {address}", host, encrypted=security.ca is not None)
        try:
            servers = _core.PsClient(
                addresses,
                run=self._start.run_id,
                token=security.token or "",
                partitions=self._start.num_partitions,
                timeout_s=ps.deadline_s,
                tls=self._tls,
            )
        except ConfigError as error:
            # somebody else may have the port of a server that died, until its lease is over
            now = time.monotonic()
            self._unfit_since = self._unfit_since or now
            if now - self._unfit_since > 2 * ps.lease_s:
                raise
            raise UnavailableError(str(error)) from None
        self._unfit_since = None
        return servers

    def _say_once(self, text: str) -> None:
        """Say a line, not the same one over and over."""
        if text != self._said:
            self._said = text
            self._say(text)

    def lease_ahead(self, servers: _core.PsClient) -> Answer | None:
        """Another unit while one is being trained, if there is one and the servers are the same."""
        answer = self._ask()
        if answer["unit"] is None:
            return None
        if self._fenced is None and servers.incarnations == [shard["incarnation"] for shard in answer["shards"]]:
            return answer
        unit = answer["unit"]["id"]
        self._units_ended["given_back"] += 1
        self._client.give_back(self._place["incarnation"], unit)
        self._units = [held for held in self._units if held != unit]
        return None

    def open_unit(self, unit: Unit) -> Batches:
        """Begin to read a unit."""
        with self._losing(unit):
            check_unchanged([unit])
            return open_batches(self.job, self.parser, [unit], shuffle=self.job.data.shuffle)

    @contextmanager
    def _losing(self, unit: Unit) -> Iterator[None]:
        """While a unit is read: data that is gone raises `LostError` where the job allows it."""
        try:
            yield
        except UnavailableError:
            raise
        except (OSError, SampleError) as error:
            if self.job.data.on_missing == "fail" or not is_lost(unit):
                raise
            reason = (error.strerror or "").lower() if isinstance(error, OSError) else ""
            raise LostError(unit.id, f"{unit.path}: {reason}" if reason else str(error)) from None

    def read(self, unit: Unit, reader: Batches) -> Iterator[_core.Batch]:
        """Batches as they come; between two of them the trainer may leave."""
        batches = iter(reader)
        while True:
            self.shutdown.check()
            if unit.id in self._dropped:
                raise UnavailableError("its lease ran out, another trainer has it")
            with self._losing(unit), self.clock.stage("wait"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def batches(self, unit: Unit) -> Generator[UnitBatch]:
        """The batches of a unit, named."""
        with closing(self.open_unit(unit)) as reader:
            yield from split_batches(self.read(unit, reader), partial(self.parser.empty, unit.id))

    def groups(self, unit: Unit) -> Generator[MergeGroup]:
        """The merge groups of a unit."""
        empty = partial(self.parser.empty, unit.id)
        with closing(self.open_unit(unit)) as reader:
            yield from split_groups(self.read(unit, reader), self.job.train.merge_size, empty)

    def meet(self) -> None:
        """Wait until the other trainers that have a unit are as far."""
        self.meeting += 1
        while not self._client.meet(self._place["incarnation"], self.meeting)["go"]:
            if self._fenced is not None:
                raise self._fenced
            self.shutdown.check()
            time.sleep(_MEET_AGAIN_S)
