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
from elasticrec.coordinator.exposition import MetricsServer
from elasticrec.coordinator.messages import FencedError
from elasticrec.data.batches import Batches, open_batches
from elasticrec.data.units import Unit, check_unchanged, is_lost
from elasticrec.errors import ConfigError, ElasticRecError, SampleError, UnavailableError
from elasticrec.fail_points import fail_point
from elasticrec.roles.metrics import trainer_text
from elasticrec.roles.place import Answer, Leaving, Left, RoleOptions, join
from elasticrec.roles.start import read_start
from elasticrec.roles.stream import Source, UnitStream
from elasticrec.roles.sync import SyncGroup
from elasticrec.training.clock import StageClock
from elasticrec.training.geo import Geo
from elasticrec.training.groups import Group, Named, grouped, named
from elasticrec.training.half_async import HalfAsync
from elasticrec.training.lanes import Lanes, num_lanes
from elasticrec.training.remote import RemoteNetwork, figures_of, networks_of

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
        self._job, self._options, self._say = job, options, say
        self._start = read_start(options.run)
        self._parser = _core.Parser(json.dumps(job.features()))
        self.clock = StageClock(num_lanes(job))
        self._networks = networks_of(job, say, self.clock)
        # the one of strategies that step one batch at a time
        self.network = self._networks[0]
        self.leaving = Leaving()
        self._client = self.leaving.watch(options.client())
        self._tls = options.security.wire()
        self._unfit_since: float | None = None
        self._said = ""
        self._place: Answer = {}
        self._servers: _core.PsClient | None = None
        # Of the connections that it has: to which incarnations, and how another thread ends them.
        self._link: tuple[list[int], _core.PsCutter] | None = None
        self._units: list[int] = []
        # Those that the coordinator gave to somebody else since.
        self._dropped = frozenset[int]()
        self._ended = threading.Event()
        self._fenced: FencedError | None = None
        self._most_in_flight = 0
        self._meeting = 0
        # In a row that servers did not let end, and when another one counts.
        self._attempts, self._next_attempt = 0, 0.0
        self._units_ended = {"done": 0, "given_back": 0}
        # Of connections that ended, and of the present ones; one object, as other threads read it.
        self._stale: tuple[Stale, _core.Staleness | None] = (Stale(), None)
        self._started = time.monotonic()
        self._metrics = MetricsServer(self._metrics_text, token=options.security.token or "", port=options.metrics_port)

    def run(self) -> None:
        """Work until there is nothing left."""
        self._place = join(self._client, "trainer", self._options.index, self.leaving, run=self._start.run_id)
        beating = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        beating.start()
        try:
            while self._fenced is None:
                answer = self._ask()
                if answer.get("finished") or any(c["command"] == "stop" for c in answer["commands"]):
                    return
                if answer["unit"] is None:
                    with self.clock.stage("idle", self.clock.lanes):
                        self.leaving.wait(answer["wait_s"])
                else:
                    self._work(answer)
            raise self._fenced
        finally:
            self._ended.set()
            beating.join()

    def _ask(self, *, waiting: bool = False) -> Answer:
        self.leaving.check()
        with self.clock.stage("lease"):
            answer = self._client.lease(self._place["incarnation"], self._units, waiting=waiting)
        if answer["unit"] is not None:
            fail_point("leased")
            self._units = [*self._units, answer["unit"]["id"]]
        return answer

    def _beat(self) -> None:
        """Signs of life, on a connection of their own."""
        client = self.leaving.watch(self._options.client(self._client.term))
        sequence = 0
        with closing(client):
            while not self._ended.is_set():
                sequence += 1
                try:
                    answer = client.heartbeat(
                        self._place["incarnation"],
                        sequence,
                        units=self._units,
                        meeting=self._meeting,
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
            link[1].cut()

    def _figures(self) -> Answer:
        before, present = self._stale
        stale = before.with_present(present)
        return {
            **self._options.figures(),
            "metrics": self._metrics.url,
            "uptime_s": round(time.monotonic() - self._started, 1),
            "most_in_flight": self._most_in_flight,
            "meetings": self._meeting,
            "staleness_pushes": stale.pushes,
            "staleness_sum": stale.sum,
            "staleness_most": stale.most,
            **{f"units_{result}": number for result, number in self._units_ended.items()},
            **figures_of(self._networks, self.clock),
        }

    def _metrics_text(self) -> str:
        return trainer_text(self._place.get("index", 0), self._figures(), dict(self.clock.seconds))

    def _work(self, answer: Answer) -> None:
        """Train what was leased; what a lost server interrupts is given back."""
        try:
            servers = self._connect(answer["shards"])
            if answer["group"] is not None:
                SyncGroup(self, servers, answer).run()
            else:
                self._train(servers, Unit(**answer["unit"]), answer)
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
            self.leaving.wait(_RETRY_S)
        except Left:
            # what it pushed is known by its name: another trainer goes on behind it
            self._say(f"trainer {self._place['index']}: leaves, unit {answer['unit']['id']} is given back")
            self._give_back()
            raise
        finally:
            self._units = []

    def _count_attempt(self, error: UnavailableError) -> None:
        """Give up after `retries`. One that comes before a dead server can have been replaced tells nothing new."""
        now, ps = time.monotonic(), self._job.train.ps
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
            self._link = (incarnations, self._servers.cutter())
            self._stale = (self._stale[0], self._servers.staleness)
        return self._servers

    def _open(self, addresses: list[str]) -> _core.PsClient:
        security, ps = self._options.security, self._job.train.ps
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

    def _train(self, servers: _core.PsClient, unit: Unit, answer: Answer) -> None:
        """Train a unit by itself; names that are everywhere are left out."""
        skip = frozenset(answer["skip"])
        for network in self._networks:
            network.buffer_share = 1 / (answer["trainers"] * len(self._networks))
        if self._job.train.strategy == "async":
            source = Source(partial(self._lease_beside, servers), self._begin, self._take, self._parser)
            stream = UnitStream(source, answer)

            def step(network: RemoteNetwork, one: Named, pulling: _core.Pulling) -> _core.Pushing:
                return network.step(servers, stream.seen_of(one.batch), one, pulling)

            steps = [partial(step, network) for network in self._networks]
            lanes = Lanes(servers, steps, self.done, self._job.train.ps, self.clock)
            with closing(stream.run()) as batches:
                lanes.run(batches)
            self._most_in_flight = max(self._most_in_flight, lanes.most)
            return
        with closing(self._groups(unit)) as groups:
            lacking = (group for group in groups if group.index not in skip)
            if self._job.train.strategy == "geo":
                Geo(self._job, self.network, servers).run(unit.id, unit.seen, lacking, answer["trainers"])
            else:
                self._meeting = answer["meeting"]
                HalfAsync(self.network, servers, self._meet).run(unit.id, unit.seen, lacking)

    def _lease_beside(self, servers: _core.PsClient) -> Answer | None:
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

    def _begin(self, unit: Unit) -> Batches:
        """Begin to read a unit."""
        with self._losing(unit):
            check_unchanged([unit])
            return open_batches(self._job, self._parser, [unit], shuffle=self._job.data.shuffle)

    @contextmanager
    def _losing(self, unit: Unit) -> Iterator[None]:
        """While a unit is read: data that is gone raises `LostError` where the job allows it."""
        try:
            yield
        except UnavailableError:
            raise
        except (OSError, SampleError) as error:
            if self._job.data.on_missing == "fail" or not is_lost(unit):
                raise
            reason = (error.strerror or "").lower() if isinstance(error, OSError) else ""
            raise LostError(unit.id, f"{unit.path}: {reason}" if reason else str(error)) from None

    def _take(self, unit: Unit, reader: Batches) -> Iterator[_core.Batch]:
        """Batches as they come; between two of them the trainer may leave."""
        batches = iter(reader)
        while True:
            self.leaving.check()
            if unit.id in self._dropped:
                raise UnavailableError("its lease ran out, another trainer has it")
            with self._losing(unit), self.clock.stage("wait"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def batches(self, unit: Unit) -> Generator[Named]:
        """The batches of a unit, named."""
        with closing(self._begin(unit)) as reader:
            yield from named(self._take(unit, reader), partial(self._parser.empty, unit.id))

    def _groups(self, unit: Unit) -> Generator[Group]:
        """The merge groups of a unit."""
        empty = partial(self._parser.empty, unit.id)
        with closing(self._begin(unit)) as reader:
            yield from grouped(self._take(unit, reader), self._job.train.merge_size, empty)

    def _meet(self) -> None:
        """Wait until the other trainers that have a unit are as far."""
        self._meeting += 1
        while not self._client.meet(self._place["incarnation"], self._meeting)["go"]:
            if self._fenced is not None:
                raise self._fenced
            self.leaving.check()
            time.sleep(_MEET_AGAIN_S)
