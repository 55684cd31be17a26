"""The speed and size of the table: random pulls and Adagrad updates on one core, compared with plain memory access."""

import json
import platform
import statistics
from collections.abc import Callable
from typing import Any

from elasticrec import _core
from elasticrec.machine import num_cores, resident_bytes

_WIDTH = 10
SPEC = {
    "name": "bench",
    "seed": 1,
    "partitions": 256,
    "columns": [{"name": "wide", "width": 1, "init_scale": 0.0}, {"name": "deep", "width": 9, "init_scale": 0.01}],
    "optimizer": {"kind": "adagrad", "learning_rate": 0.05, "initial_accumulator": 1.0, "epsilon": 1e-8},
}
# The minimum per key: weights, Adagrad's sums, show and click.
_PAYLOAD_BYTES = 4 * _WIDTH + 4 * _WIDTH + 8
_BATCHES = 200


def run(rows: int, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the rates of the table and of plain memory access, medians of `repeats`, and the bytes per key."""
    say(f"filling a table with {rows:,} rows")
    before = resident_bytes()
    bench = _core.TableBench(json.dumps(SPEC), rows)
    resident = resident_bytes() - before
    say("measuring")
    times = [bench.measure(_BATCHES) for _ in range(repeats)]
    pull, pull_probe, push, push_probe = (1 / statistics.median(column) for column in zip(*times, strict=True))
    say("measuring with changes listed for a publish")
    bench.take_changes()
    listed, taken = [], []
    for _ in range(repeats):
        listed.append(bench.measure(_BATCHES)[2])
        taken.append(bench.take_changes())
    return {
        "rows": rows,
        "repeats": repeats,
        "cores": num_cores(),
        "machine": platform.machine(),
        "row_bytes": bench.row_bytes,
        "pulls_per_s": round(pull),
        "probe_pulls_per_s": round(pull_probe),
        "pull_ratio": round(pull / pull_probe, 3),
        "updates_per_s": round(push),
        "probe_updates_per_s": round(push_probe),
        "update_ratio": round(push / push_probe, 3),
        "listed_updates_per_s": round(1 / statistics.median(listed)),
        "listed_ratio": round(1 / statistics.median(listed) / push, 3),
        "taken_rows_per_s": round(sum(number for number, _ in taken) / sum(seconds for _, seconds in taken)),
        "bytes_per_key": round(resident / rows - _PAYLOAD_BYTES, 2),
    }


def describe(result: dict[str, Any]) -> list[str]:
    """Return the figures as lines of text."""
    return [
        f"table of {result['rows']:,} rows of 1 + 9 columns, Adagrad, one core, uniform signs:",
        f"pulls: {result['pulls_per_s'] / 1e6:.1f} M/s, {result['pull_ratio']:.2f} of plain memory access "
        f"({result['probe_pulls_per_s'] / 1e6:.1f} M/s)",
        f"updates: {result['updates_per_s'] / 1e6:.1f} M/s, {result['update_ratio']:.2f} of plain memory access "
        f"({result['probe_updates_per_s'] / 1e6:.1f} M/s)",
        f"updates with changes listed for a publish: {result['listed_updates_per_s'] / 1e6:.1f} M/s, "
        f"{result['listed_ratio']:.2f} of updates without the list; changes are collected at "
        f"{result['taken_rows_per_s'] / 1e6:.1f} M/s",
        f"bytes per key in addition to weights, state, show and click: {result['bytes_per_key']:.1f}",
    ]
