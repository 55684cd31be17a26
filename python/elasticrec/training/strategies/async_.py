"""Strategy `async`: each trainer pulls, steps and pushes on its own, with several batches in flight."""

from contextlib import closing
from functools import partial

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.net.messages import UnitLease
from elasticrec.training.groups import UnitBatch
from elasticrec.training.lanes import Lanes, num_lanes
from elasticrec.training.remote import RemoteNetwork
from elasticrec.training.strategies.base import Strategy
from elasticrec.training.unit_stream import UnitSource, UnitStream


class Async(Strategy):
    """Streams unit after unit through the lanes of the trainer, without a gap between units."""

    name = "async"

    @staticmethod
    def num_lanes(job: Job) -> int:
        """Return the number of batches that a trainer steps at once."""
        return num_lanes(job)

    def run(self, lease: UnitLease) -> None:
        """Train units until no other unit can be leased."""
        trainer, servers = self.trainer, self.servers
        self.share_buffers(lease["trainers"])
        source = UnitSource(partial(trainer.lease_ahead, servers), trainer.open_unit, trainer.read, trainer.parser)
        stream = UnitStream(source, lease)

        def step(network: RemoteNetwork, one: UnitBatch, pulling: _core.PullTicket) -> _core.PushTicket:
            return network.step(servers, stream.seen_of(one.batch), one, pulling)

        steps = [partial(step, network) for network in trainer.networks]
        lanes = Lanes(servers, steps, trainer.report_done, trainer.job.train.ps, trainer.clock)
        with closing(stream.run()) as batches:
            lanes.run(batches)
        trainer.most_in_flight = max(trainer.most_in_flight, lanes.most_in_flight)
