"""The metrics of shards and trainers for Prometheus (docs/metrics.md)."""

from elasticrec.net.messages import Figures
from elasticrec.net.metrics import Families


def shard_text(index: int, figures: Figures) -> str:
    """Return the metrics of a shard from its counters and its status; a shard that is loading has few."""
    found = Families("elasticrec_ps_", shard=str(index))

    def seconds(name: str) -> float | None:
        return None if name not in figures else figures[name] / 1e9

    found.add("serving", "Whether the shard has loaded its partitions.", figures["serving"])
    found.add("lease_left_seconds", "Time until the shard's lease expires.", figures["lease_left_s"])
    found.add("rows", "Rows of the shard's partitions.", figures.get("num_rows"))
    found.add("memory_bytes", "Memory of the rows.", figures.get("num_bytes"))
    found.add("pulls_total", "Answered pulls.", figures.get("pulls"))
    found.add("pulled_signs_total", "Signs in pulls.", figures.get("pulled_signs"))
    found.add("pull_seconds_total", "Time spent on pulls, including waits for the shard's lock.", seconds("pull_nanos"))
    found.add("pushes_total", "Answered pushes.", figures.get("pushes"))
    found.add("pushed_signs_total", "Signs in pushes.", figures.get("pushed_signs"))
    found.add(
        "push_seconds_total", "Time spent on pushes, including waits for the shard's lock.", seconds("push_nanos")
    )
    found.add("applied_pushes_total", "Pushes that were applied by at least one partition.", figures.get("applied"))
    found.add("repeated_pushes_total", "Pushes that all partitions had applied before.", figures.get("repeated"))
    found.add(
        "non_finite_pushes_total",
        "Pushes with NaN or infinity: counted, but not applied to weights.",
        figures.get("non_finite"),
    )
    found.add("evicted_rows_total", "Evicted rows.", figures.get("evicted"))
    found.add("refused_total", "Refused requests.", figures.get("refused"))
    found.add("malformed_total", "Connections closed because of a malformed request.", figures.get("malformed"))
    found.add_by(
        "snapshots_total",
        "Parts of checkpoints by result.",
        "result",
        {result: figures[f"snapshot_{result}"] for result in ("written", "failed")},
    )
    found.add("snapshot_seconds_total", "Time to write parts of checkpoints.", figures["snapshot_s"])
    found.add_by(
        "publishes_total",
        "Parts of versions by result.",
        "result",
        {result: figures[f"publish_{result}"] for result in ("written", "failed")},
    )
    found.add("publish_seconds_total", "Time to write parts of versions.", figures["publish_s"])
    return found.text()


def trainer_text(index: int, figures: Figures, seconds: dict[str, float]) -> str:
    """Return the metrics of a trainer from its figures and the time of its stages."""
    found = Families("elasticrec_trainer_", trainer=str(index))
    found.add("samples_total", "Samples pushed.", figures["samples"])
    found.add_by(
        "units_total",
        "Units by result.",
        "result",
        {result: figures[f"units_{result}"] for result in ("done", "given_back")},
    )
    found.add("batches_total", "Trained batches.", figures["batches"])
    found.add("pulls_total", "Pulls, each from all shards.", figures["pulls"])
    found.add("pushes_total", "Pushes, each to all shards.", figures["pushes"])
    found.add("meetings_total", "Meetings of `half_async`.", figures["meetings"])
    found.add(
        "staleness_total",
        "Sum of the staleness of pushes: pushes that a shard applied between a pull and its push; not for `geo`.",
        figures["staleness_sum"],
    )
    found.add("stale_pushes_total", "Pushes whose staleness was measured.", figures["staleness_pushes"])
    found.add("staleness_most", "Largest staleness of a push.", figures["staleness_most"])
    found.add(
        "in_flight_batches_most",
        "Largest number of batches in flight between pull and acknowledgement.",
        figures["most_in_flight"],
    )
    found.add_by(
        "stage_seconds_total",
        "Time of the training loop by stage, summed over lanes; `wait` is for data, `idle` for a unit.",
        "stage",
        dict(sorted(seconds.items())),
    )
    found.add("uptime_seconds", "Time since the start of the process.", figures["uptime_s"])
    return found.text()
