"""Strategy `half_async`: the gradients of a merge group make one push, then the trainers meet."""

from collections.abc import Callable, Iterable

from elasticrec import _core
from elasticrec.training.groups import Group
from elasticrec.training.remote import RemoteNetwork


class HalfAsync:
    """Runs merge groups of a unit; `meet` returns when the other trainers are as far."""

    def __init__(self, network: RemoteNetwork, servers: _core.PsClient, meet: Callable[[], None]) -> None:
        self._network, self._servers, self._meet = network, servers, meet
        self._merging = _core.Merging()

    def run(self, unit: int, seen: int, groups: Iterable[Group]) -> None:
        """Train on groups, each applied before the next is pulled."""
        for group in groups:
            for batch in group.batches:
                self._add(batch)
            with self._network.clock.stage("push"):
                self._network.num_pushes += 1
                pushing = self._merging.push(self._servers, unit=unit, index=group.index, last=group.is_last, seen=seen)
                self._servers.acknowledged(pushing)
            with self._network.clock.stage("meet"):
                self._meet()

    def _add(self, batch: _core.Batch) -> None:
        network = self._network
        pulling = self._servers.pull(batch, dense=True)
        learned = network.learn(batch, network.receive(self._servers, pulling, batch, dense=True))
        with network.clock.stage("merge"):
            self._merging.add(
                batch,
                learned.gradient,
                learned.dense,
                scale=learned.scale,
                weight=learned.weight,
                sums=learned.sums,
            )
