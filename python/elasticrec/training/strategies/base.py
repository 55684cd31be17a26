"""The interface of a training strategy, and the interface of the trainer's process that it uses."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from typing import ClassVar, Protocol

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.data.batches import Batches
from elasticrec.data.units import Unit
from elasticrec.net.messages import UnitLease
from elasticrec.training.clock import StageClock
from elasticrec.training.groups import MergeGroup, UnitBatch
from elasticrec.training.remote import RemoteNetwork


class TrainerContext(Protocol):
    """The trainer's process, as a strategy uses it."""

    job: Job
    clock: StageClock
    parser: _core.Parser
    networks: list[RemoteNetwork]
    """One for each lane."""
    most_in_flight: int
    """The most batches that were in flight at once, for the metrics."""
    meeting: int
    """Number of the last meeting with the other trainers, for the heartbeat."""

    def lease(self, *, waiting: bool = False) -> UnitLease | None:
        """Lease another unit; return None if there is none for now."""

    def lease_ahead(self, servers: _core.PsClient) -> UnitLease | None:
        """Lease another unit that these servers can train; return None if there is none for now."""

    def report_done(self, unit: int) -> None:
        """Report that all pushes of a unit are applied."""

    def open_unit(self, unit: Unit) -> Batches:
        """Start to read a unit."""

    def read(self, unit: Unit, reader: Batches) -> Iterator[_core.Batch]:
        """Yield the batches of a reader; raise an error when the trainer has to give up the unit."""

    def batches(self, unit: Unit) -> Generator[UnitBatch]:
        """Yield the batches of a unit."""

    def groups(self, unit: Unit) -> Generator[MergeGroup]:
        """Yield the merge groups of a unit."""

    def meet(self) -> None:
        """Wait until the other trainers that hold a unit have reached the same meeting."""


class Strategy(ABC):
    """How a trainer turns leased units into pushes.

    The trainer makes one instance for each unit that it leases while idle. Pushes have the name (unit, index), and
    servers apply each name once: a unit that was interrupted is trained again, without the names in `skip`.
    """

    name: ClassVar[str]
    """The value of `train.strategy` that selects the strategy."""

    def __init__(self, trainer: TrainerContext, servers: _core.PsClient) -> None:
        self.trainer, self.servers = trainer, servers

    @staticmethod
    def num_lanes(job: Job) -> int:
        """Return the number of batches that a trainer steps at once."""
        return 1

    @abstractmethod
    def run(self, lease: UnitLease) -> None:
        """Train the leased unit, and units leased meanwhile; return when every push is acknowledged.

        Afterwards the trainer reports the units that it still holds as done. If a server is lost, raise
        `UnavailableError`; the trainer then returns its units.
        """

    @property
    def network(self) -> RemoteNetwork:
        """The network of a strategy with one lane."""
        return self.trainer.networks[0]

    def share_buffers(self, num_trainers: int) -> None:
        """Weight changes of the network's buffers by the number of networks that change them at the same time."""
        networks = self.trainer.networks
        for network in networks:
            network.buffer_share = 1 / (num_trainers * len(networks))


def missing_groups(groups: Iterator[MergeGroup], lease: UnitLease) -> Iterator[MergeGroup]:
    """Leave out the groups that every server has applied."""
    skip = frozenset(lease["skip"])
    return (group for group in groups if group.index not in skip)
