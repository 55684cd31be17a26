"""Strategy `half_async`: push the gradients of a merge group as one, then wait for the other trainers."""

from collections.abc import Iterable
from contextlib import closing

from elasticrec import _core
from elasticrec.data.units import Unit
from elasticrec.net.messages import UnitLease
from elasticrec.training.groups import MergeGroup
from elasticrec.training.strategies.base import Strategy, missing_groups


class HalfAsync(Strategy):
    """Trains the merge groups of a unit; each push is applied before the next group is pulled."""

    name = "half_async"

    def run(self, lease: UnitLease) -> None:
        """Train a unit, meeting the other trainers after each group."""
        unit = Unit.of(lease["unit"])
        self.share_buffers(lease["trainers"])
        self.trainer.meeting = lease["meeting"]
        with closing(self.trainer.groups(unit)) as groups:
            self.train_groups(unit.id, unit.seen, missing_groups(groups, lease))

    def train_groups(self, unit: int, seen: int, groups: Iterable[MergeGroup]) -> None:
        """Train groups of a unit, one push each."""
        network, servers, merging = self.network, self.servers, _core.MergedGradients()
        for group in groups:
            for batch in group.batches:
                self._merge(merging, batch)
            with network.clock.stage("push"):
                network.num_pushes += 1
                pushing = merging.push(servers, unit=unit, index=group.index, last=group.is_last, seen=seen)
                servers.wait_for_ack(pushing)
            with network.clock.stage("meet"):
                self.trainer.meet()

    def _merge(self, merging: _core.MergedGradients, batch: _core.Batch) -> None:
        network, servers = self.network, self.servers
        pulling = servers.pull(batch, dense=True)
        result = network.learn(batch, network.receive(servers, pulling, batch, dense=True))
        with network.clock.stage("merge"):
            merging.add(
                batch,
                result.gradient,
                result.dense,
                scale=result.scale,
                weight=result.weight,
                sums=result.sums,
            )
