"""Strategy `geo`: a trainer steps its own copy of rows and parameters for a merge group, then sends the increments."""

import json
import math
from collections.abc import Iterable
from contextlib import closing

import numpy as np

from elasticrec import _core
from elasticrec.data.units import Unit
from elasticrec.net.messages import UnitLease
from elasticrec.training.embedding import table_spec
from elasticrec.training.groups import MergeGroup
from elasticrec.training.remote import Sums
from elasticrec.training.strategies.base import Strategy, TrainerContext, missing_groups


class Geo(Strategy):
    """Trains the merge groups of a unit: one exchange with the servers per group, no pull in between."""

    name = "geo"

    def __init__(self, trainer: TrainerContext, servers: _core.PsClient) -> None:
        super().__init__(trainer, servers)
        # Initial values do not depend on the number of partitions, so the local copy has one.
        self._spec = json.dumps(table_spec(trainer.job, self.network.model.columns) | {"partitions": 1})
        self._before = np.zeros(servers.num_dense_full, np.float32)

    def run(self, lease: UnitLease) -> None:
        """Train a unit."""
        unit = Unit.of(lease["unit"])
        self.share_buffers(lease["trainers"])
        with closing(self.trainer.groups(unit)) as groups:
            self.train_groups(unit.id, unit.seen, missing_groups(groups, lease), lease["trainers"])

    def train_groups(self, unit: int, seen: int, groups: Iterable[MergeGroup], num_trainers: int) -> None:
        """Train groups of a unit; dense increments are divided by the number of trainers."""
        pushing: _core.PushTicket | None = None
        for group in groups:
            # Servers answer in order: these rows include the increments of the group before.
            exchange = _core.GeoExchange(self.servers, group.batches)
            if pushing is not None:
                self.servers.wait_for_ack(pushing)
            pushing = self._exchange(exchange, unit, seen, group, num_trainers)
        if pushing is not None:
            self.servers.wait_for_ack(pushing)

    def _exchange(
        self, exchange: _core.GeoExchange, unit: int, seen: int, group: MergeGroup, num_trainers: int
    ) -> _core.PushTicket:
        network, servers = self.network, self.servers
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
                sums=(np.concatenate([indices for indices, _ in sums]), np.concatenate([values for _, values in sums])),
            )

    def _restore(self) -> None:
        dense = self.network.dense
        vectors = self._before.reshape(len(dense.vectors), -1)
        dense.restore(1, dict(zip(dense.vectors, vectors, strict=True)))

    def _changes(self, num_trainers: int) -> np.ndarray:
        _, vectors = self.network.dense.state()
        after = np.concatenate([vectors[name] for name in self.network.dense.vectors])
        return (after - self._before) / np.float32(num_trainers)

    def _step(self, table: _core.Table, batch: _core.Batch, seen: int) -> Sums:
        """Train one batch on the local table and network."""
        network = self.network
        pooled = network.rows_of(batch, table.width)
        table.pull(batch, pooled.numpy())
        result = network.learn(batch, pooled)
        with network.clock.stage("step"):
            table.push(batch, result.gradient, result.scale, seen)
            if batch.num_samples and math.isfinite(result.scale):
                network.dense.step()
        return result.sums
