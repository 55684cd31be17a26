"""The metrics of shards and trainers, in the text that Prometheus reads; docs/metrics.md lists them."""

from typing import Any

from elasticrec.net.metrics import Families

Figures = dict[str, Any]


def shard_text(index: int, figures: Figures) -> str:
    """Of a shard, from its counters and its status; one that still loads has few."""
    found = Families("elasticrec_ps_", shard=str(index))

    def seconds(name: str) -> float | None:
        return None if name not in figures else figures[name] / 1e9

    found.add("serving", "gauge", "Whether it has loaded its partitions.", figures["serving"])
    found.add("lease_left_seconds", "gauge", "How long it may apply pushes.", figures["lease_left_s"])
    found.add("rows", "gauge", "Rows of its partitions.", figures.get("num_rows"))
    found.add("memory_bytes", "gauge", "Memory of its rows.", figures.get("num_bytes"))
    found.add("pulls_total", "counter", "Pulls that were answered.", figures.get("pulls"))
    found.add("pulled_signs_total", "counter", "Signs in pulls.", figures.get("pulled_signs"))
    found.add("pull_seconds_total", "counter", "Time in which pulls had the shard.", seconds("pull_nanos"))
    found.add("pushes_total", "counter", "Pushes that were answered.", figures.get("pushes"))
    found.add("pushed_signs_total", "counter", "Signs in pushes.", figures.get("pushed_signs"))
    found.add("push_seconds_total", "counter", "Time in which pushes had the shard.", seconds("push_nanos"))
    found.add("applied_pushes_total", "counter", "Pushes that some partition lacked.", figures.get("applied"))
    found.add("repeated_pushes_total", "counter", "Pushes that every partition knew.", figures.get("repeated"))
    found.add(
        "non_finite_pushes_total", "counter", "Pushes that were counted and not stepped.", figures.get("non_finite")
    )
    found.add("evicted_rows_total", "counter", "Rows that were evicted.", figures.get("evicted"))
    found.add("refused_total", "counter", "Requests that were refused.", figures.get("refused"))
    found.add(
        "malformed_total", "counter", "Connections that ended with bytes that are no request.", figures.get("malformed")
    )
    found.add(
        "snapshots_total",
        "counter",
        "Parts of checkpoints by what became of them.",
        *(({"result": result}, figures[f"snapshot_{result}"]) for result in ("written", "failed")),
    )
    found.add("snapshot_seconds_total", "counter", "Time of those that were written.", figures["snapshot_s"])
    found.add(
        "publishes_total",
        "counter",
        "Parts of versions by what became of them.",
        *(({"result": result}, figures[f"publish_{result}"]) for result in ("written", "failed")),
    )
    found.add("publish_seconds_total", "counter", "Time of those that were written.", figures["publish_s"])
    return found.text()


def trainer_text(index: int, figures: Figures, seconds: dict[str, float]) -> str:
    """Of a trainer, from its figures and the seconds of its stages."""
    found = Families("elasticrec_trainer_", trainer=str(index))
    found.add("samples_total", "counter", "Samples that were pushed.", figures["samples"])
    found.add(
        "units_total",
        "counter",
        "Units by what became of them.",
        *(({"result": result}, figures[f"units_{result}"]) for result in ("done", "given_back")),
    )
    found.add("batches_total", "counter", "Batches that were learned from.", figures["batches"])
    found.add("pulls_total", "counter", "Pulls, each of all shards.", figures["pulls"])
    found.add("pushes_total", "counter", "Pushes, each to all shards.", figures["pushes"])
    found.add("meetings_total", "counter", "Meetings of `half_async`.", figures["meetings"])
    found.add(
        "staleness_total",
        "counter",
        "Pushes that shards applied between a pull and the push that was learned from it, summed; not of `geo`.",
        figures["staleness_sum"],
    )
    found.add("stale_pushes_total", "counter", "Pushes whose staleness is in that sum.", figures["staleness_pushes"])
    found.add("staleness_most", "gauge", "The most of a push.", figures["staleness_most"])
    found.add(
        "in_flight_batches_most",
        "gauge",
        "The most batches at once between pull and acknowledgement.",
        figures["most_in_flight"],
    )
    found.add(
        "stage_seconds_total",
        "counter",
        "Time of the training loop by stage, of all lanes together; `wait` is for data, `idle` for a unit.",
        *(({"stage": stage}, value) for stage, value in sorted(seconds.items())),
    )
    found.add("uptime_seconds", "gauge", "Since its start.", figures["uptime_s"])
    return found.text()
