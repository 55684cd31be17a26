"""The result of detection: a description of the data files."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from elasticrec.data.init.roles import Roles

Kind = Literal["slots", "paddlerec", "criteo", "csv", "parquet", "json"]

# Lines to inspect, over all inspected files together.
NUM_LINES = 6000
# Share of the lines that must have a format; the rest may be bad records.
MIN_GOOD = 0.98


@dataclass
class Detection:
    """The format, files and columns of a data set."""

    kind: Kind
    title: str
    """The format as a person would name it."""
    num_inspected: int
    """Samples that were inspected."""
    roles: Roles
    labels: list[str]
    files: list[Path] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)
    """Paths and globs that stand for the files in a job."""
    is_complete: bool = False
    """Whether every sample of the inspected files was inspected."""
    num_samples: int | None = None
    """Estimated samples in all files; None if unknown."""
    columns: dict[str, Any] = field(default_factory=dict)
    """CSV and Parquet: `names`, `header`, `delimiter`, `null`."""
    paths: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    """JSON: for each feature its path in the object, and the separator between several values in one text."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user, to read before training."""
    eval: dict[str, Any] = field(default_factory=lambda: {"ratio": 0.1})
    eval_note: str = "a share of all samples, selected by hash"

    def data(self) -> dict[str, Any]:
        """Return the `data` section of a job, without its files and, for JSON, without its reader."""
        if self.kind == "criteo":
            return {"format": "criteo"}
        roles = self.roles
        slots = [slot.item() for slot in roles.slots]
        dense = [column.item() for column in roles.dense]
        if self.kind not in ("csv", "parquet"):
            data: dict[str, Any] = {"format": "reader" if self.kind == "json" else self.kind, "slots": slots}
            if self.labels != ["click"]:
                data["labels"] = self.labels
            return data | ({"dense": dense} if dense else {})
        columns: dict[str, Any] = {"labels": self.labels, "sparse": slots}
        optional = {"dense": dense, "weight": roles.weight, "time": roles.time, **self.columns}
        columns |= {key: value for key, value in optional.items() if value not in (None, [])}
        return {"format": self.kind, "columns": columns}
