"""The coordinator's metrics for Prometheus (docs/metrics.md)."""

from collections import Counter

from elasticrec.net.messages import CheckpointStatus, PublishStatus, StatusResponse, UnitFigures
from elasticrec.net.metrics import Families


def render(status: StatusResponse) -> str:
    """Return the metrics of a status in the text format of Prometheus."""
    found = Families("elasticrec_coordinator_")
    found.add("term", "Term of the coordinator.", status["term"])
    found.add("map_epoch", "Epoch of the partition map.", status["epoch"])
    found.add("passes", "Passes that have started.", status["passes"]["begun"])
    _add_units(found, status["units"], status["counters"])
    meetings = status["meetings"]
    found.add("meetings_total", "Meetings of `half_async`, summed over all trainers.", meetings["attended"])
    found.add("meetings_ahead_most", "Largest lead of a trainer over another, in meetings.", meetings["most_ahead"])
    _add_members(found, status)
    _add_checkpoints(found, status["checkpoint"])
    if status["publish"] is not None:
        _add_publishes(found, status["publish"])
    return found.text()


def _add_units(found: Families, units: UnitFigures, counters: dict[str, int]) -> None:
    found.add("units_planned", "Units of the passes that have started.", units["planned"])
    found.add("units_complete", "Units that every partition has applied.", units["complete"])
    found.add("units_leased", "Units leased to trainers.", units["leased"])
    found.add("units_settling", "Units that are pushed, but not yet confirmed by all shards.", units["settling"])
    found.add("units_behind", "Units that a restored shard lacks.", units["behind"])
    found.add("leases_total", "Leases of units.", counters["given"])
    found.add("replays_total", "Leases of units that were leased before.", counters["replayed"])
    found.add_by(
        "leases_ended_total",
        "Leases that ended before the unit was pushed, and pushed units that shards did not confirm.",
        "reason",
        {reason: counters[reason] for reason in ("lapsed", "given_back", "unsettled")},
    )


def _add_members(found: Families, status: StatusResponse) -> None:
    shards, trainers, wanted = status["shards"], status["trainers"], status["wanted"]
    states = Counter(one["state"] for one in shards)
    found.add_by(
        "shards",
        "Shards by state.",
        "state",
        {state: states[state] for state in ("serving", "loading", "unheard", "down")},
    )
    states = Counter(one["state"] for one in trainers)
    found.add_by(
        "trainers", "Trainers by state.", "state", {state: states[state] for state in ("alive", "unheard", "silent")}
    )
    found.add_by(
        "wanted", "Requested number of processes.", "role", {"ps": wanted["servers"], "trainer": wanted["trainers"]}
    )
    found.add_by(
        "starts_total",
        "Processes that registered, including replacements.",
        "role",
        {role: status["started"].get(role, 0) for role in ("ps", "trainer")},
    )
    found.add(
        "lease_left_seconds",
        "Time until the member's lease expires.",
        *(({"role": "ps", "index": str(one["index"])}, one["lease_left_s"]) for one in shards),
        *(({"role": "trainer", "index": str(one["index"])}, one["lease_left_s"]) for one in trainers),
    )
    found.add("samples_per_second", "Throughput of all trainers over the last seconds.", status["samples_per_s"])


def _add_checkpoints(found: Families, checkpoint: CheckpointStatus) -> None:
    found.add_by(
        "checkpoints_total",
        "Checkpoints of this coordinator.",
        "result",
        {"committed": checkpoint["committed"], "failed": checkpoint["failed"]},
    )
    found.add("checkpoint_seconds_total", "Time of committed checkpoints from start to commit.", checkpoint["seconds"])
    found.add("checkpoint_age_seconds", "Time since this coordinator's last checkpoint.", checkpoint["age_s"])


def _add_publishes(found: Families, publish: PublishStatus) -> None:
    found.add("version", "Newest published version.", publish["version"])
    found.add_by(
        "publishes_total",
        "Publishes of this coordinator.",
        "result",
        {"committed": publish["committed"], "failed": publish["failed"]},
    )
    found.add("publish_seconds_total", "Time of committed publishes from start to commit.", publish["seconds"])
    found.add("publish_age_seconds", "Time since this coordinator's last publish.", publish["age_s"])
    found.add("publish_next_seconds", "Time until the next publish is due.", publish["next_s"])
    found.add("publish_rows", "Rows of the last version.", publish["rows"])
    found.add("publish_changed_rows", "Rows written for the last version.", publish["changed"])
    found.add("publish_removed_rows", "Signs removed by the last version.", publish["removed"])
    found.add("publish_bytes", "Bytes of the last version's part files.", publish["num_bytes"])
