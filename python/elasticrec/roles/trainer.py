"""The process of a trainer: it leases units, pulls, steps the network and pushes; it keeps nothing of its own."""

import json
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.coordinator.client import CoordinatorClient
from elasticrec.coordinator.messages import FencedError
from elasticrec.data.batches import open_batches
from elasticrec.data.units import Unit, check_unchanged
from elasticrec.errors import ModelError, UnavailableError
from elasticrec.roles.shard import RoleOptions
from elasticrec.roles.start import read_start
from elasticrec.training.clock import StageClock
from elasticrec.training.dense import FlatParameters
from elasticrec.training.flight import Flight, Named
from elasticrec.training.metrics import FLAT_SIZE, flat_sums
from elasticrec.training.network import Scorer, build_model, loss_of, num_threads
from elasticrec.training.own_model import seeded

Answer = dict[str, Any]
Say = Callable[[str], None]
Places = npt.NDArray[np.uint32]
Values = npt.NDArray[np.float64]

_RETRY_S = 0.2


class TrainerProcess:
    """Trains units until the coordinator has no more."""

    def __init__(self, job: Job, options: RoleOptions, say: Say) -> None:
        torch.set_num_threads(num_threads(job))
        self._job, self._options, self._say = job, options, say
        self._start = read_start(options.run)
        self._parser = _core.Parser(json.dumps(job.features()))
        self._model = build_model(job)
        self._scorer = Scorer(self._model, job.data.negative_rate)
        self._dense = FlatParameters(self._model, job)
        self._num_cells = sum(slot.sequence or 1 for slot in job.data.inputs)
        self._client = CoordinatorClient(options.coordinator, token=options.token or None)
        self._place: Answer = {}
        self._servers: _core.PsClient | None = None
        self._units: list[int] = []
        self._ended = threading.Event()
        self._fenced: FencedError | None = None
        self._samples = 0
        self._clock = StageClock()
        self._most_in_flight = 0

    def run(self) -> None:
        """Work until there is nothing left."""
        self._place = self._register()
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

    def _register(self) -> Answer:
        nonce = secrets.token_hex(8)
        while True:
            answer = self._client.register("trainer", nonce, index=self._options.index)
            if answer["incarnation"] is not None:
                return answer
            time.sleep(answer["wait_s"])

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
        shares = {f"share_{name}": round(share, 4) for name, share in self._clock.shares().items()}
        return {"samples": self._samples, "most_in_flight": self._most_in_flight, **shares}

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
        self._scorer.train()
        step = _Step(self, servers, unit.epoch)
        flight = Flight(servers, step.take, self._job.train.ps.max_in_flight)
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


class _Step:
    """One batch: receive, forward, backward, push."""

    def __init__(self, trainer: TrainerProcess, servers: _core.PsClient, epoch: int) -> None:
        self._trainer, self._servers, self._epoch = trainer, servers, epoch
        self._buffer = torch.empty(0)

    def take(self, named: Named, pulling: _core.Pulling) -> _core.Pushing:
        """What the batch learned is sent, not yet acknowledged."""
        trainer, batch = self._trainer, named.batch
        dense, clock = trainer._dense, trainer._clock
        shape = (batch.num_samples, trainer._num_cells, self._servers.width)
        size = math.prod(shape)
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size)
        pooled = self._buffer[:size].view(shape)
        with clock.stage("pull"):
            self._servers.receive(pulling, batch, pooled.numpy(), dense.values.numpy()[: dense.num_parameters])
        for line in batch.bad:
            trainer._say(f"bad record: {line}")
        if not batch.num_samples:
            nothing = np.zeros(0, np.float32)
            sums = self._with_records(batch, np.zeros(0, np.uint32), np.zeros(0))
            return self._servers.push(
                pulling, batch, pooled.numpy(), nothing, scale=1.0, last=named.is_last, seen=self._epoch, sums=sums
            )
        pooled.grad = None
        pooled.requires_grad_()
        with clock.stage("forward"), seeded(trainer._job, batch):
            logits = trainer._scorer.logits(pooled, torch.from_numpy(batch.dense))
            loss = loss_of(logits, batch)
            mean = loss.mean.item()
        if not math.isfinite(mean):
            raise ModelError(
                f"unit {batch.unit} batch {batch.index} ({batch.places}): expected a finite loss, got {mean}; "
                "lower the learning rates or look at the data"
            )
        with clock.stage("backward"):
            dense.zero_gradient()
            torch.autograd.backward(loss.mean)
        with clock.stage("metrics"):
            sums = self._with_records(batch, *flat_sums(logits.detach().numpy(), batch.labels, batch.weights))
        with clock.stage("push"):
            # all of a batch is applied or nothing: without a number for a scale the push only counts
            scale = loss.weight if dense.gradient_is_finite() else math.nan
            gradient = pooled.grad.numpy() if pooled.grad is not None else np.zeros(shape, np.float32)
            pushing = self._servers.push(
                pulling,
                batch,
                gradient,
                dense.gradient,
                scale=scale,
                last=named.is_last,
                seen=self._epoch,
                sums=sums,
            )
        trainer._samples += batch.num_samples
        return pushing

    def _with_records(self, batch: _core.Batch, places: Places, values: Values) -> tuple[Places, Values]:
        """The sums of a batch, with its records and bad records behind them."""
        end = FLAT_SIZE * len(self._trainer._job.data.labels)
        counts = np.array([batch.num_records, batch.num_bad], np.float64)
        return np.append(places, np.array([end, end + 1], np.uint32)), np.append(values, counts)
