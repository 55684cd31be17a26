"""Strategy `geo`: a trainer steps rows and parameters of its own for one merge group and exchanges what changed."""

import json
import math
from collections.abc import Iterable

import numpy as np

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.training.embedding import table_spec
from elasticrec.training.groups import Group
from elasticrec.training.remote import RemoteNetwork, Sums


class Geo:
    """Runs merge groups of a unit. Between an exchange and the next nothing is pulled, and after it nothing is kept."""

    def __init__(self, job: Job, network: RemoteNetwork, servers: _core.PsClient) -> None:
        self._network, self._servers = network, servers
        # one partition: initial values do not depend on their number
        self._spec = json.dumps(table_spec(job, network.model.columns) | {"partitions": 1})
        self._before = np.zeros(servers.num_dense_full, np.float32)

    def run(self, unit: int, seen: int, groups: Iterable[Group], num_trainers: int) -> None:
        """Train on groups; dense changes count for one of so many trainers."""
        pushing: _core.Pushing | None = None
        for group in groups:
            # the servers answer in order: these rows have the changes that were sent before
            exchange = _core.Exchange(self._servers, group.batches)
            if pushing is not None:
                self._servers.acknowledged(pushing)
            pushing = self._exchange(exchange, unit, seen, group, num_trainers)
        if pushing is not None:
            self._servers.acknowledged(pushing)

    def _exchange(
        self, exchange: _core.Exchange, unit: int, seen: int, group: Group, num_trainers: int
    ) -> _core.Pushing:
        network, servers = self._network, self._servers
        table = _core.Table(self._spec)
        with network.clock.stage("pull"):
            network.num_pulls += 1
            exchange.receive(servers, table, self._before)
            self._restore()
        sums = [self._step(table, batch, seen) for batch in group.batches]
        with network.clock.stage("push"):
            network.num_pushes += 1
            has_samples = any(batch.num_samples for batch in group.batches)
            changes = self._changes(num_trainers) if has_samples else np.zeros(0, np.float32)
            return exchange.push(
                servers,
                table,
                changes,
                unit=unit,
                index=group.index,
                last=group.is_last,
                seen=seen,
                sums=(np.concatenate([places for places, _ in sums]), np.concatenate([values for _, values in sums])),
            )

    def _restore(self) -> None:
        dense = self._network.dense
        vectors = self._before.reshape(len(dense.vectors), -1)
        dense.restore(1, dict(zip(dense.vectors, vectors, strict=True)))

    def _changes(self, num_trainers: int) -> np.ndarray:
        _, vectors = self._network.dense.state()
        after = np.concatenate([vectors[name] for name in self._network.dense.vectors])
        return (after - self._before) / np.float32(num_trainers)

    def _step(self, table: _core.Table, batch: _core.Batch, seen: int) -> Sums:
        """One step of local training."""
        network = self._network
        pooled = network.rows_of(batch, table.width)
        table.pull(batch, pooled.numpy())
        learned = network.learn(batch, pooled)
        with network.clock.stage("step"):
            table.push(batch, learned.gradient, learned.scale, seen)
            if batch.num_samples and math.isfinite(learned.scale):
                network.dense.step()
        return learned.sums
