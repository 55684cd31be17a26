"""The metrics of a store process, in the text that Prometheus reads; docs/metrics.md lists them."""

from collections.abc import Sequence
from typing import Any

from elasticrec.net.metrics import Families

# Upper bound in seconds and how many requests, of each bucket; and the seconds of all together.
Latency = tuple[Sequence[tuple[float, int]], float]

# The counts are four to a doubling: Prometheus gets every second doubling.
_EVERY = 8


def node_text(status: dict[str, Any], latency: Latency | None) -> str:
    """Of one process, from its status; one that waits for its first version has few."""
    found = Families("elasticrec_cube_", model=status["model"], shard=str(status["shard"]))
    held, counters = status.get("held", {}), status.get("counters", {})
    found.add("ready", "gauge", "Whether it has the version that is offered.", int(status["ready"]))
    found.add("memory_bytes", "gauge", "Memory of the process.", status["memory_bytes"])
    found.add("version", "gauge", "The version that is offered.", status.get("current"))
    found.add("newest_version", "gauge", "The newest version that it holds.", max(status["versions"], default=None))
    found.add("versions", "gauge", "Versions that it holds.", len(status["versions"]))
    rows = [({"version": version}, figures["rows"]) for version, figures in held.items()]
    found.add("rows", "gauge", "Rows of its partitions by version.", *rows)
    sizes = [({"version": version}, figures["bytes"]) for version, figures in held.items()]
    found.add("bytes", "gauge", "Bytes of files and segments by version; versions share most of them.", *sizes)
    found.add("load_seconds", "gauge", "Time that the last version took to load.", status.get("load_s"))
    found.add("loads_total", "counter", "Bases and deltas that were loaded.", status.get("loads"))
    found.add("load_failures_total", "counter", "Versions that could not be loaded.", status.get("load_failures"))
    found.add("requests_total", "counter", "Look-ups that were answered.", counters.get("requests"))
    found.add("keys_total", "counter", "Signs in them.", counters.get("keys"))
    found.add("misses_total", "counter", "Of those, signs without a row.", counters.get("misses"))
    found.add("row_bytes_total", "counter", "Bytes of rows that were sent.", counters.get("bytes"))
    found.add("refused_total", "counter", "Requests and peers that were refused.", counters.get("refused"))
    found.add(
        "malformed_total",
        "counter",
        "Connections that ended with bytes that are no request.",
        counters.get("malformed"),
    )
    found.add("connections", "gauge", "Open connections of clients.", counters.get("connections"))
    if latency is not None:
        buckets, sum_s = latency
        found.histogram(
            "request_seconds", "From a request that is there to an answer that is sent.", _coarse(buckets), sum_s
        )
    return found.text()


def _coarse(buckets: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Fewer buckets, each with the counts of those it is made of."""
    found, count = [], 0
    for at, (bound_s, number) in enumerate(buckets):
        count += number
        if at % _EVERY == 0 or at == len(buckets) - 1:
            found.append((bound_s, count))
            count = 0
    return found
