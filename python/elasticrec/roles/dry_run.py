"""A dry run of training with servers: one trainer reads and trains batches without pulls and pushes.

Its throughput is the upper limit of a trainer: servers and the network take no time.
"""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

from elasticrec import _core
from elasticrec.config import Job, match_files
from elasticrec.data.batches import open_batches
from elasticrec.data.units import UnitSplit, plan_units
from elasticrec.errors import ConfigError
from elasticrec.training.clock import StageClock
from elasticrec.training.groups import UnitBatch
from elasticrec.training.lanes import Lanes
from elasticrec.training.remote import RemoteNetwork, make_networks, network_figures
from elasticrec.training.stop import stop_on_signals
from elasticrec.training.strategies import find_strategy

logger = logging.getLogger(__name__)


class _NoServers:
    """Replaces the servers; answers at once."""

    def pull(self, batch: _core.Batch, *, dense: bool) -> Any:
        return None

    def wait_for_ack(self, pushing: Any) -> tuple[bool, bool]:
        return False, False


def run_dry(job: Job) -> None:
    """Train once over the data with rows of zeros, and report the throughput; write nothing."""
    if job.train.mode != "ps":
        raise ConfigError(f"{job.source}: train.mode: expected `ps` for a dry run without servers, got `local`")
    clock = StageClock(find_strategy(job.train.strategy).num_lanes(job))
    networks = make_networks(job, clock)
    units = plan_units(match_files(job, "train"), UnitSplit.of(job), 0, 0)
    parser = _core.Parser(json.dumps(job.features()))
    stop_requests: list[bool] = []

    def rate() -> tuple[int, float]:
        samples: int = network_figures(networks, clock)["samples"]
        return samples, samples / max(clock.elapsed, 1e-9)

    def until_stopped(batches: Iterator[_core.Batch]) -> Iterator[UnitBatch]:
        next_line = job.train.print_every_s
        while not stop_requests:
            with clock.stage("read"):
                batch = next(batches, None)
            if batch is None:
                return
            if clock.elapsed >= next_line:
                next_line = clock.elapsed + job.train.print_every_s
                logger.info("{:>12,} samples, {:,.0f} samples/s".format(*rate()))
            yield UnitBatch(batch, is_last=False)

    steps = [partial(_learn, network) for network in networks]
    lanes = Lanes(_NoServers(), steps, lambda _: None, job.train.ps, clock)
    start = time.monotonic()
    with (
        stop_on_signals(lambda: stop_requests.append(True)),
        closing(open_batches(job, parser, units, shuffle=False)) as reader,
    ):
        lanes.run(until_stopped(iter(reader)))
    seconds = time.monotonic() - start
    shares = ", ".join(f"{name} {share:.0%}" for name, share in clock.shares().items() if share >= 0.01)
    samples, _ = rate()
    speed = f"{samples:,} samples in {seconds:.1f} s, {samples / seconds:,.0f} samples/s"
    logger.info(f"dry run of one trainer: {speed}; {shares}")


def _learn(network: RemoteNetwork, one: UnitBatch, _: Any) -> Any:
    width = sum(column.width for column in network.model.columns)
    network.learn(one.batch, network.rows_of(one.batch, width).zero_())
