"""The process of a trainer: it leases units, pulls, steps the network and pushes; it keeps nothing of its own."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.coordinator.client import CoordinatorClient
from elasticrec.coordinator.messages import FencedError
from elasticrec.data.batches import open_batches
from elasticrec.data.units import Unit, check_unchanged
from elasticrec.errors import UnavailableError
from elasticrec.roles.place import Answer, RoleOptions, join
from elasticrec.roles.start import read_start
from elasticrec.training.flight import Flight, Named
from elasticrec.training.remote import RemoteNetwork

Say = Callable[[str], None]

_RETRY_S = 0.2


class TrainerProcess:
    """Trains units until the coordinator has no more."""

    def __init__(self, job: Job, options: RoleOptions, say: Say) -> None:
        self._job, self._options, self._say = job, options, say
        self._start = read_start(options.run)
        self._parser = _core.Parser(json.dumps(job.features()))
        self._network = RemoteNetwork(job, say)
        self._client = options.client()
        self._place: Answer = {}
        self._servers: _core.PsClient | None = None
        self._units: list[int] = []
        self._ended = threading.Event()
        self._fenced: FencedError | None = None
        self._most_in_flight = 0

    def run(self) -> None:
        """Work until there is nothing left."""
        self._place = join(self._client, "trainer", self._options.index)
        beating = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        beating.start()
        try:
            while self._fenced is None:
                answer = self._client.lease(self._place["incarnation"], self._units)
                if answer.get("finished") or any(c["command"] == "stop" for c in answer["commands"]):
                    return
                if answer["unit"] is None:
                    time.sleep(answer["wait_s"])
                else:
                    self._work(answer)
            raise self._fenced
        finally:
            self._ended.set()
            beating.join()

    def _beat(self) -> None:
        """Signs of life, on a connection of their own."""
        client = CoordinatorClient(self._options.coordinator, token=self._options.token or None, term=self._client.term)
        sequence = 0
        with closing(client):
            while not self._ended.is_set():
                sequence += 1
                try:
                    answer = client.heartbeat(
                        self._place["incarnation"], sequence, units=self._units, figures=self._figures()
                    )
                except FencedError as error:
                    self._fenced = error
                    return
                except UnavailableError as error:
                    self._say(f"trainer {self._place['index']}: {error}")
                    continue
                self._ended.wait(answer["next_s"])
            try:
                client.heartbeat(self._place["incarnation"], sequence + 1, leaving=True)
            except UnavailableError:
                # it is gone too, and knows by its clock
                return

    def _figures(self) -> Answer:
        shares = {f"share_{name}": round(share, 4) for name, share in self._network.clock.shares().items()}
        return {"samples": self._network.num_samples, "most_in_flight": self._most_in_flight, **shares}

    def _work(self, answer: Answer) -> None:
        """Train a unit; one that a lost server interrupts is given back."""
        unit = Unit(**answer["unit"])
        self._units = [unit.id]
        incarnation = self._place["incarnation"]
        try:
            servers = self._connect(answer["shards"])
            self._train(servers, unit, frozenset(answer["skip"]))
        except UnavailableError as error:
            if isinstance(error, FencedError):
                raise
            self._say(f"trainer {self._place['index']}: unit {unit.id}: {error}")
            self._servers = None
            self._client.give_back(incarnation, unit.id)
            time.sleep(_RETRY_S)
        else:
            self._client.done(incarnation, unit.id)
        finally:
            self._units = []

    def _connect(self, shards: list[Answer]) -> _core.PsClient:
        """Connections to the present servers."""
        incarnations = [shard["incarnation"] for shard in shards]
        if self._servers is None or self._servers.incarnations != incarnations:
            self._servers = _core.PsClient(
                [shard["address"] for shard in shards],
                run=self._start.run_id,
                token=self._options.token,
                partitions=self._start.num_partitions,
                timeout_s=self._job.train.ps.deadline_s,
            )
        return self._servers

    def _train(self, servers: _core.PsClient, unit: Unit, skip: frozenset[int]) -> None:
        check_unchanged([unit])
        step = partial(self._network.step, servers, unit.epoch)
        flight = Flight(servers, step, self._job.train.ps.max_in_flight)
        reader = open_batches(self._job, self._parser, [unit], shuffle=self._job.data.shuffle)
        with closing(reader):
            flight.run(self._named(iter(reader), unit, skip))
        self._most_in_flight = max(self._most_in_flight, flight.most)

    def _named(self, batches: Iterator[_core.Batch], unit: Unit, skip: frozenset[int]) -> Iterator[Named]:
        """The batches of a unit that are not everywhere yet, the last one marked; an empty one if it has none."""
        batch = next(batches, None)
        if batch is None:
            yield Named(self._parser.empty(unit.id), is_last=True)
        while batch is not None:
            following = next(batches, None)
            if batch.index not in skip:
                yield Named(batch, is_last=following is None)
            batch = following
