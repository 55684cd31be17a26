"""Events of a training: a callback receives them, and the metrics file has a record of each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from elasticrec.training.metrics import Metrics

EventKind = Literal["start", "progress", "evaluation", "epoch", "pass"]


@dataclass(frozen=True)
class Event:
    """A progress line, an evaluation, or the end of an epoch."""

    kind: EventKind
    """`start`, `progress`, `evaluation` and `epoch`; `pass` replaces `epoch` with `data.hours` and with servers."""
    steps: int
    """Steps of the network so far; 0 with servers, which do not count them together."""
    samples: int
    train: dict[str, Metrics]
    """Metrics of the training by label; empty where the event has none."""
    eval: dict[str, Metrics]
    """Metrics of the evaluation by label; empty where the event has none."""
    values: dict[str, Any]
    """The other values of the record: see docs/guide/metrics.md."""

    @classmethod
    def of_record(cls, record: Mapping[str, Any], labels: Sequence[str]) -> "Event":
        """Return the event that a record of the metrics file stands for."""
        values = {key: value for key, value in record.items() if key not in ("event", "steps", "samples")}
        return cls(
            kind=record["event"],
            steps=record.get("steps", 0),
            samples=record.get("samples", 0),
            train=_by_label(values.get("train"), labels),
            eval=_by_label(values.get("eval"), labels),
            values=values,
        )


Callback = Callable[[Event], object]
"""Called with every event; returning False stops the training with a checkpoint."""


def _by_label(metrics: Sequence[dict[str, Any]] | None, labels: Sequence[str]) -> dict[str, Metrics]:
    return {label: Metrics.from_dict(one) for label, one in zip(labels, metrics or (), strict=False)}
