"""Compare two versions: manifests, metrics, files and rows."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elasticrec.config.document import flatten
from elasticrec.config.train import METRICS
from elasticrec.errors import ModelError
from elasticrec.repository.fetch import FetchedVersion
from elasticrec.repository.rows import open_rows

# Keys that differ between any two versions.
_VERSION_KEYS = (
    "version",
    "created",
    "self_sha256",
    "files",
    "base",
    "parent",
    "format",
    "metrics",
    "checkpoint",
    "run",
)


@dataclass(frozen=True)
class RowCounts:
    """Rows of the second version compared with the first."""

    added: int
    removed: int
    changed: int
    equal: int


@dataclass(frozen=True)
class Difference:
    """The differences between two versions."""

    keys: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Dotted keys of the manifests with different values."""
    metrics: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Files that differ: `added`, `removed` or `changed`."""
    rows: RowCounts | None = None
    note: str | None = None
    """Why rows were not compared."""

    def to_dict(self) -> dict[str, Any]:
        """Return the differences for JSON."""
        return {
            "keys": {key: list(values) for key, values in self.keys.items()},
            "metrics": {key: list(values) for key, values in self.metrics.items()},
            "files": self.files,
            "rows": None if self.rows is None else vars(self.rows),
            "note": self.note,
        }


def compare(a: FetchedVersion, b: FetchedVersion, *, rows: bool = True) -> Difference:
    """Compare two versions; with `rows`, also row by row."""
    left, right = flatten(a.version.manifest), flatten(b.version.manifest)
    keys = {
        key: (left.get(key), right.get(key))
        for key in sorted(left.keys() | right.keys())
        if key.split(".")[0] not in _VERSION_KEYS and left.get(key) != right.get(key)
    }
    counted, note = None, None
    if rows:
        if a.version.manifest["table"]["columns"] != b.version.manifest["table"]["columns"]:
            note = "rows are not compared: their columns differ"
        else:
            try:
                counted = _compare_rows(open_rows(a), open_rows(b))
            except ModelError as error:
                note = f"rows are not compared: {error}"
    return Difference(keys, _compare_metrics(a, b), _compare_files(a, b), counted, note)


def _compare_metrics(a: FetchedVersion, b: FetchedVersion) -> dict[str, tuple[float | None, float | None]]:
    left, right = metrics_of(a.version.manifest), metrics_of(b.version.manifest)
    return {key: (left.get(key), right.get(key)) for key in left | right}


def metrics_of(manifest: dict[str, Any]) -> dict[str, float]:
    """Return numeric metrics by names such as `eval LABEL auc`."""
    labels = manifest["features"]["labels"]
    found = {}
    for part in ("train", "eval"):
        for label, metrics in zip(labels, manifest["metrics"].get(part) or (), strict=False):
            for name in (*METRICS, "samples"):
                value = metrics.get(name)
                if isinstance(value, int | float):
                    found[f"{part} {label} {name}"] = value
    return found


def _compare_files(a: FetchedVersion, b: FetchedVersion) -> dict[str, str]:
    left, right = a.version.files, b.version.files
    changes = {}
    for name in sorted(left | right):
        if name not in left or name not in right:
            changes[name] = "added" if name not in left else "removed"
        elif left[name] != right[name]:
            changes[name] = "changed"
    return changes


def _compare_rows(a: Any, b: Any) -> RowCounts:
    """Count rows: look up the signs of `b` in `a`, and the signs of `a` in `b`."""
    added = changed = equal = removed = 0
    for signs, rows in b.items():
        before, present = a.lookup(signs)
        same = (before.view(np.uint32) == rows.view(np.uint32)).all(1)
        added += int((~present).sum())
        equal += int((present & same).sum())
        changed += int((present & ~same).sum())
    for signs, _ in a.items():
        _, present = b.lookup(signs)
        removed += int((~present).sum())
    return RowCounts(added, removed, changed, equal)
