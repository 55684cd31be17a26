"""Small versions in a repository without a training, for tests of the repository."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from elasticrec.durable import write_synced
from elasticrec.manifest import FileEntry
from elasticrec.repository.repository import Repository
from elasticrec.repository.version import DENSE_FILE, GRAPH_FILE, Content, Version, part_name

FEATURES: dict[str, Any] = {
    "format": "slots",
    "hash": 1,
    "slots": [{"name": "0", "pooling": "sum"}],
    "dense": [],
    "labels": ["click"],
}


def content(**changes: Any) -> Content:
    """Return the manifest content of a small version."""
    values: dict[str, Any] = {
        "run": "small",
        "checkpoint": "step-000000000001",
        "features": FEATURES,
        "partitions": 4,
        "columns": [{"name": "wide", "width": 1}],
        "rows": 100,
        "inputs": ["pooled"],
        "tensors": [{"name": "w", "shape": [2], "offset": 0}],
        "metrics": {"train": [{"auc": 0.7, "log_loss": 0.4, "samples": 300}], "eval": None},
        "data": {"samples": 300, "until": None},
    }
    return Content(**values | changes)


def write_version(
    repository: Repository,
    parent: int | None = None,
    *,
    dense: bytes | None = None,
    owned: tuple[range, ...] = (range(4),),
    **changes: Any,
) -> Version:
    """Write a base or a delta whose files contain their version number; `owned` gives the partitions of each part."""
    with repository.begin() if parent is None else repository.begin_delta(parent) as draft:
        values = np.array([draft.number, 0.5], np.float32).tobytes() if dense is None else dense
        files = {DENSE_FILE: FileEntry(*write_synced(draft.directory / DENSE_FILE, values))}
        for part in range(len(owned)):
            rows = f"rows of {draft.number}{f' in {part}' if part else ''}".encode() * 50
            files[part_name(part)] = FileEntry(*write_synced(draft.directory / part_name(part), rows))
        if len(owned) > 1:
            changes["parts"] = {part_name(part): partitions for part, partitions in enumerate(owned)}
        if parent is None:
            files[GRAPH_FILE] = FileEntry(*write_synced(draft.directory / GRAPH_FILE, b"the graph of all"))
        return repository.commit(draft, content(**changes), files)


def read_current(path: Path) -> dict[str, Any]:
    """Read CURRENT from disk."""
    current: dict[str, Any] = json.loads((path / "CURRENT").read_bytes())
    return current
