"""A dry run of training with servers: batches are read and learned from, and nothing is asked for or sent.

What it reaches is what trainers could reach if servers and network took no time.
"""

import json
import time
from collections.abc import Callable
from contextlib import closing

from elasticrec import _core
from elasticrec.config import Job, match_files
from elasticrec.data.batches import open_batches
from elasticrec.data.units import plan_units
from elasticrec.errors import ConfigError
from elasticrec.training.read import cut_of
from elasticrec.training.remote import RemoteNetwork
from elasticrec.training.stop import stopping


def run_dry(job: Job, say: Callable[[str], None]) -> None:
    """One trainer over the training data once, with rows of zeros; nothing is written."""
    if job.train.mode != "ps":
        raise ConfigError(f"{job.source}: train.mode: expected `ps` for a dry run without servers, got `local`")
    network = RemoteNetwork(job, say)
    width = sum(column.width for column in network.model.columns)
    units = plan_units(match_files(job, "train"), cut_of(job), 0, 0)
    parser = _core.Parser(json.dumps(job.features()))
    asked: list[bool] = []
    start = next_line = time.monotonic()
    with stopping(lambda: asked.append(True)), closing(open_batches(job, parser, units, shuffle=False)) as reader:
        batches = iter(reader)
        while not asked:
            with network.clock.stage("read"):
                batch = next(batches, None)
            if batch is None:
                break
            network.learn(batch, network.rows_of(batch, width).zero_())
            if time.monotonic() - next_line >= job.train.print_every_s:
                next_line = time.monotonic()
                say(f"{network.num_samples:>12,} samples, {network.num_samples / (next_line - start):,.0f} a second")
    seconds = time.monotonic() - start
    shares = ", ".join(f"{name} {share:.0%}" for name, share in network.clock.shares().items() if share >= 0.01)
    say(
        f"dry run of one trainer: {network.num_samples:,} samples in {seconds:.1f} s, "
        f"{network.num_samples / seconds:,.0f} a second; {shares}"
    )
