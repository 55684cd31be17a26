"""The coordinator's metrics, in the text that Prometheus reads."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

_PREFIX = "elasticrec_coordinator_"

Sample = tuple[dict[str, str], float | int | None]


def render(status: dict[str, Any]) -> str:
    """The text for a status."""
    units, counters, checkpoint = status["units"], status["counters"], status["checkpoint"]
    lines: list[str] = []

    def add(name: str, kind: str, help_text: str, *samples: Sample) -> None:
        lines.extend(_family(_PREFIX + name, kind, help_text, samples))

    def one(value: float | int | None) -> Sample:
        return {}, value

    add("term", "gauge", "Term of the coordinator.", one(status["term"]))
    add("map_epoch", "gauge", "Epoch of the partition map.", one(status["epoch"]))
    add("passes", "gauge", "Passes that have begun.", one(status["passes"]["begun"]))
    add("units_planned", "gauge", "Units of the passes that have begun.", one(units["planned"]))
    add("units_complete", "gauge", "Units that every partition has.", one(units["complete"]))
    add("units_leased", "gauge", "Units that trainers work on.", one(units["leased"]))
    add("units_settling", "gauge", "Units that are pushed and not yet reported by all shards.", one(units["settling"]))
    add("units_behind", "gauge", "Units that a shard that went back lacks.", one(units["behind"]))
    add("leases_total", "counter", "Units given to trainers.", one(counters["given"]))
    add("replays_total", "counter", "Of those, units that somebody had before.", one(counters["replayed"]))
    add(
        "leases_ended_total",
        "counter",
        "Leases that ended before their unit was pushed, and units that the shards did not report.",
        *(({"reason": reason}, counters[reason]) for reason in ("lapsed", "given_back", "unsettled")),
    )
    add("shards", "gauge", "Shards by state.", *_by_state(status["shards"], ("serving", "loading", "down")))
    add("trainers", "gauge", "Trainers by state.", *_by_state(status["trainers"], ("alive", "silent")))
    add(
        "checkpoints_total",
        "counter",
        "Checkpoints of this coordinator.",
        *(({"result": result}, checkpoint[result]) for result in ("committed", "failed")),
    )
    add("checkpoint_age_seconds", "gauge", "Since the last commit of this coordinator.", one(checkpoint["age_s"]))
    return "".join(f"{line}\n" for line in lines)


def _by_state(members: list[dict[str, Any]], states: Iterable[str]) -> list[Sample]:
    counts = Counter(member["state"] for member in members)
    return [({"state": state}, counts[state]) for state in states]


def _family(name: str, kind: str, help_text: str, samples: Iterable[Sample]) -> Iterable[str]:
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        if value is not None:
            text = ",".join(f'{key}="{label}"' for key, label in labels.items())
            yield f"{name}{{{text}}} {value:g}" if text else f"{name} {value}"
