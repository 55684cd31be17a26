"""The coordinator's metrics, in the text that Prometheus reads; docs/metrics.md lists them."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from elasticrec.net.metrics import Families, Sample


def render(status: dict[str, Any]) -> str:
    """The text for a status."""
    found = Families("elasticrec_coordinator_")
    found.add("term", "gauge", "Term of the coordinator.", status["term"])
    found.add("map_epoch", "gauge", "Epoch of the partition map.", status["epoch"])
    found.add("passes", "gauge", "Passes that have begun.", status["passes"]["begun"])
    _add_units(found, status["units"], status["counters"])
    meetings = status["meetings"]
    found.add("meetings_total", "counter", "Meetings of `half_async`, of all trainers together.", meetings["attended"])
    found.add("meetings_ahead_most", "gauge", "The most that a trainer was ahead of another.", meetings["most_ahead"])
    _add_members(found, status)
    _add_checkpoints(found, status["checkpoint"])
    if status["publish"] is not None:
        _add_publishes(found, status["publish"])
    return found.text()


def _add_units(found: Families, units: dict[str, Any], counters: dict[str, Any]) -> None:
    found.add("units_planned", "gauge", "Units of the passes that have begun.", units["planned"])
    found.add("units_complete", "gauge", "Units that every partition has.", units["complete"])
    found.add("units_leased", "gauge", "Units that trainers work on.", units["leased"])
    found.add("units_settling", "gauge", "Units that are pushed and not yet reported by all shards.", units["settling"])
    found.add("units_behind", "gauge", "Units that a shard that went back lacks.", units["behind"])
    found.add("leases_total", "counter", "Units given to trainers.", counters["given"])
    found.add("replays_total", "counter", "Of those, units that somebody had before.", counters["replayed"])
    found.add(
        "leases_ended_total",
        "counter",
        "Leases that ended before their unit was pushed, and units that the shards did not report.",
        *(({"reason": reason}, counters[reason]) for reason in ("lapsed", "given_back", "unsettled")),
    )


def _add_members(found: Families, status: dict[str, Any]) -> None:
    shards, trainers, wanted = status["shards"], status["trainers"], status["wanted"]
    found.add("shards", "gauge", "Shards by state.", *_by_state(shards, ("serving", "loading", "unheard", "down")))
    found.add("trainers", "gauge", "Trainers by state.", *_by_state(trainers, ("alive", "unheard", "silent")))
    found.add(
        "wanted",
        "gauge",
        "Processes that the run shall have.",
        ({"role": "ps"}, wanted["servers"]),
        ({"role": "trainer"}, wanted["trainers"]),
    )
    found.add(
        "starts_total",
        "counter",
        "Processes that took a place in the run, those that replaced others too.",
        *(({"role": role}, status["started"].get(role, 0)) for role in ("ps", "trainer")),
    )
    found.add(
        "lease_left_seconds",
        "gauge",
        "Until a member counts as gone unless it is heard of.",
        *(({"role": "ps", "index": str(one["index"])}, one["lease_left_s"]) for one in shards),
        *(({"role": "trainer", "index": str(one["index"])}, one["lease_left_s"]) for one in trainers),
    )
    found.add("samples_per_second", "gauge", "Of all trainers over the last seconds.", status["samples_per_s"])


def _add_checkpoints(found: Families, checkpoint: dict[str, Any]) -> None:
    found.add(
        "checkpoints_total",
        "counter",
        "Checkpoints of this coordinator.",
        *(({"result": result}, checkpoint[result]) for result in ("committed", "failed")),
    )
    found.add(
        "checkpoint_seconds_total",
        "counter",
        "From the beginning to the commit of the checkpoints that were committed.",
        checkpoint["seconds"],
    )
    found.add("checkpoint_age_seconds", "gauge", "Since the last commit of this coordinator.", checkpoint["age_s"])


def _add_publishes(found: Families, publish: dict[str, Any]) -> None:
    found.add("version", "gauge", "Newest version that the run published.", publish["version"])
    found.add(
        "publishes_total",
        "counter",
        "Publishes of this coordinator.",
        *(({"result": result}, publish[result]) for result in ("committed", "failed")),
    )
    found.add(
        "publish_seconds_total",
        "counter",
        "From the beginning to the commit of the publishes that were committed.",
        publish["seconds"],
    )
    found.add("publish_age_seconds", "gauge", "Since the last commit of this coordinator.", publish["age_s"])
    found.add("publish_next_seconds", "gauge", "Until the next publish is due.", publish["next_s"])
    found.add("publish_rows", "gauge", "Rows of the last version.", publish["rows"])
    found.add("publish_changed_rows", "gauge", "Rows that were written for it.", publish["changed"])
    found.add("publish_removed_rows", "gauge", "Signs that it took away.", publish["removed"])
    found.add("publish_bytes", "gauge", "Bytes of its part files.", publish["num_bytes"])


def _by_state(members: list[dict[str, Any]], states: Iterable[str]) -> list[Sample]:
    counts = Counter(member["state"] for member in members)
    return [({"state": state}, counts[state]) for state in states]
