"""The metrics of a store process for Prometheus (docs/metrics.md)."""

from collections.abc import Sequence
from typing import Any

from elasticrec.net.metrics import Families

# For each bucket the upper bound in seconds and the number of requests; then the sum of all requests' seconds.
Latency = tuple[Sequence[tuple[float, int]], float]

# The server counts four buckets per doubling; Prometheus gets one for every second doubling.
_BUCKETS_MERGED = 8


def node_text(status: dict[str, Any], latency: Latency | None) -> str:
    """Return the metrics of a process from its status; a process without a version has few."""
    found = Families("elasticrec_cube_", model=status["model"], shard=str(status["shard"]))
    held, counters = status.get("held", {}), status.get("counters", {})
    found.add("ready", "Whether the current version is loaded.", int(status["ready"]))
    found.add("memory_bytes", "Memory of the process.", status["memory_bytes"])
    found.add("version", "Current version.", status.get("current"))
    found.add("newest_version", "Newest loaded version.", max(status["versions"], default=None))
    found.add("versions", "Number of loaded versions.", len(status["versions"]))
    rows = {version: figures["rows"] for version, figures in held.items()}
    found.add_by("rows", "Rows of the process's partitions by version.", "version", rows)
    sizes = {version: figures["bytes"] for version, figures in held.items()}
    found.add_by("bytes", "Bytes of files and segments by version; most are shared between versions.", "version", sizes)
    found.add("load_seconds", "Load time of the last version.", status.get("load_s"))
    found.add("loads_total", "Loaded bases and deltas.", status.get("loads"))
    found.add("load_failures_total", "Failed attempts to load a version.", status.get("load_failures"))
    found.add("requests_total", "Answered lookups.", counters.get("requests"))
    found.add("keys_total", "Signs in lookups.", counters.get("keys"))
    found.add("misses_total", "Signs without a row.", counters.get("misses"))
    found.add("row_bytes_total", "Bytes of rows sent.", counters.get("bytes"))
    found.add("refused_total", "Refused requests and peers.", counters.get("refused"))
    found.add("malformed_total", "Connections closed because of a malformed request.", counters.get("malformed"))
    found.add("connections", "Open client connections.", counters.get("connections"))
    if latency is not None:
        buckets, sum_s = latency
        found.histogram("request_seconds", "Time from a complete request to the sent answer.", _coarse(buckets), sum_s)
    return found.text()


def _coarse(buckets: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Merge neighbouring buckets."""
    found, count = [], 0
    for at, (bound_s, number) in enumerate(buckets):
        count += number
        if at % _BUCKETS_MERGED == 0 or at == len(buckets) - 1:
            found.append((bound_s, count))
            count = 0
    return found
