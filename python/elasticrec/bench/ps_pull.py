"""Pulls through the socket per CPU second of a server, compared with the table in one process."""

import json
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from elasticrec import _core
from elasticrec.bench import table, train
from elasticrec.bench.cluster import Cluster, process_of
from elasticrec.bench.processes import cpu_seconds
from elasticrec.errors import ModelError

if TYPE_CHECKING:
    from elasticrec.bench.ps import Bench

Result = dict[str, Any]

# Samples whose signs make up a request: 520 rows, 2,080, and 8,190 as in a batch of `bench table`.
_SAMPLES_A_PULL = (20, 80, 315)
# Distinct rows to pull, more than the caches hold.
_NUM_ROWS = 1_500_000
_IN_FLIGHT = 2
_TABLE_BATCHES = 200


def run(bench: "Bench") -> Result:
    """Measure rows per CPU second of a server, compared with the table in this process, in turn."""
    bench.say(f"pulls: filling a table in this process with {bench.sizes.rows:,} rows")
    alone = _core.TableBench(json.dumps(table.SPEC), bench.sizes.rows)
    job = bench.job(1, 1)
    rates: dict[int, list[float]] = {count: [] for count in _SAMPLES_A_PULL}
    alone_rates: list[float] = []
    parser = _core.Parser(json.dumps(job.features()))
    requests = {count: _batches(parser, count, bench.sizes.rows // train.SLOTS) for count in _SAMPLES_A_PULL}
    cluster = Cluster(job, bench.checkpoint)
    # Start no trainers: only pulls are measured.
    cluster.launcher.children = [child for child in cluster.launcher.children if child.role != "trainer"]
    with cluster, cluster.servers(cluster.wait_for_servers()) as client:
        server = process_of(cluster.child("ps-0"))
        for repeat in range(bench.sizes.repeats):
            bench.say(f"pulls, {repeat + 1}/{bench.sizes.repeats}: through the socket, then the table alone")
            for count, batches in requests.items():
                rates[count].append(_rows_per_cpu_s(client, batches, server, bench.sizes.seconds))
            alone_rates.append(1 / alone.measure(_TABLE_BATCHES)[0])
    table_rate = statistics.median(alone_rates)
    medians = {count * train.SLOTS: statistics.median(rate) for count, rate in rates.items()}
    result: Result = {"pulls_per_s": table_rate}
    for rows, rate in medians.items():
        result |= {f"socket_pulls_per_s_{rows}": rate, f"pull_socket_ratio_{rows}": round(rate / table_rate, 4)}
    result["pull_socket_ratio"] = min(medians.values()) / table_rate
    return result


def _batches(parser: _core.Parser, samples: int, values: int) -> list[_core.Batch]:
    """Return batches of samples with random values, all of which have a row."""
    chance = np.random.default_rng(samples)
    batches = []
    for _ in range(max(_NUM_ROWS // (samples * train.SLOTS), 1)):
        drawn = chance.integers(0, values, (samples, train.SLOTS)).tolist()
        lines = ["click:0 " + " ".join(f"{slot}:{value}" for slot, value in enumerate(row, 1)) for row in drawn]
        batches.append(parser.parse("\n".join(lines).encode(), labels=True))
    return batches


def _rows_per_cpu_s(client: _core.PsClient, batches: list[_core.Batch], server: int, seconds: float) -> float:
    """Return the rows pulled per CPU second of the server."""
    rows = np.zeros((batches[0].num_samples, train.SLOTS, client.width), np.float32)
    pulls, in_flight, before = 0, [], cpu_seconds(server)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        batch = batches[pulls % len(batches)]
        in_flight.append((client.pull(batch, dense=False), batch))
        pulls += 1
        if len(in_flight) == _IN_FLIGHT:
            client.receive(*in_flight.pop(0), rows, None)
    while in_flight:
        client.receive(*in_flight.pop(0), rows, None)
    # A sign without a row reads as zeros and costs less.
    if not rows.any(axis=2).all():
        raise ModelError("bench: pulls: expected a row for every sign, got zeros")
    return pulls * batches[0].num_samples * train.SLOTS / max(cpu_seconds(server) - before, 1e-9)


def describe(result: Result) -> list[str]:
    """Return the figures as lines of text."""
    lines = [f"pulls of the table in one process: {result['pulls_per_s'] / 1e6:.1f} M/s per core"]
    for count in _SAMPLES_A_PULL:
        rows = count * train.SLOTS
        lines.append(
            f"through the socket, {rows:,} rows per request: {result[f'socket_pulls_per_s_{rows}'] / 1e6:.1f} M/s per "
            f"server core, {result[f'pull_socket_ratio_{rows}']:.2f} of the table in one process"
        )
    return lines
