"""The initial state of a run with parameter servers, written once: the declaration of a shard and the dense values.

runs/<name>/start/shard.json   the table, the dense vector and its optimizer, the number of metric sums, the run's id
runs/<name>/start/dense.bin    the dense values before the first batch; for a warm start also the optimizer's vectors
runs/<name>/start/rows-NNNNN   for a warm start: the rows that the run begins with
"""

import json
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticrec.durable import write_atomically
from elasticrec.errors import ModelError
from elasticrec.run import Run

_SHARD = "shard.json"
_DENSE = "dense.bin"


@dataclass(frozen=True)
class Start:
    """The initial state of all shards."""

    run_id: str
    spec: dict[str, Any]
    dense: npt.NDArray[np.float32]
    """`[vectors, values]`: the values, for a warm start also the vectors of the optimizer."""
    warm: dict[str, Any]
    """For a warm start: `checkpoint`, `steps` of the dense optimizer, `rows` (files), number of dense `vectors`."""
    directory: Path

    @property
    def rows(self) -> list[str]:
        """The part files of the rows of a warm start."""
        return [str(self.directory / name) for name in self.warm.get("rows", ())]

    @property
    def steps(self) -> int:
        """The steps that the dense optimizer has taken."""
        return int(self.warm.get("steps", 0))

    @property
    def num_partitions(self) -> int:
        """The number of partitions of the table."""
        return int(self.spec["table"]["partitions"])

    def shard_spec(self, owned: range) -> str:
        """Return the declaration of a shard with these partitions as JSON."""
        return json.dumps({**self.spec, "owned": {"start": owned.start, "end": owned.stop}})

    def dense_of(self, owned: range) -> npt.NDArray[np.float32]:
        """Return the dense values of these partitions."""
        total = self.dense.shape[1]
        first, end = (partition * total // self.num_partitions for partition in (owned.start, owned.stop))
        return np.ascontiguousarray(self.dense[:, first:end])


@dataclass(frozen=True)
class WarmStart:
    """The parameters of another run."""

    checkpoint: Path
    rows: list[Path]
    steps: int


def write_start(run: Run, spec: dict[str, Any], dense: npt.NDArray[np.float32], warm: WarmStart | None = None) -> None:
    """Write the initial state; the declaration is written last and marks it as complete."""
    directory = run.path / "start"
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / _DENSE, dense.astype("<f4").tobytes())
    declaration = {"run": secrets.token_hex(16), **spec}
    if warm is not None:
        names = [_link_or_copy(path, directory / f"rows-{number:05d}") for number, path in enumerate(warm.rows)]
        declaration["warm"] = {
            "checkpoint": str(warm.checkpoint),
            "steps": warm.steps,
            "rows": names,
            "vectors": len(dense),
        }
    write_atomically(directory / _SHARD, json.dumps(declaration).encode())


def _link_or_copy(path: Path, to: Path) -> str:
    """Link or copy a file of another run, which may remove its own; return the new name."""
    to.unlink(missing_ok=True)
    try:
        os.link(path, to)
    except OSError:
        # The other run is on another file system.
        shutil.copyfile(path, to)
        with to.open("rb") as file:
            os.fsync(file.fileno())
    return to.name


def has_start(run: Run) -> bool:
    """Whether the run has its initial state."""
    return (run.path / "start" / _SHARD).is_file()


def read_start(path: Path) -> Start:
    """Read the initial state of the run in a directory."""
    directory = path / "start"
    try:
        spec = json.loads((directory / _SHARD).read_bytes())
        dense = np.fromfile(directory / _DENSE, "<f4")
    except ValueError as error:
        raise ModelError(f"{directory / _SHARD}: damaged: {error}") from None
    except FileNotFoundError as error:
        raise ModelError(f"{path}: not a run with parameter servers: {error.filename} is missing") from None
    if not isinstance(spec, dict) or not {"run", "num_dense", "table"} <= spec.keys():
        raise ModelError(f"{directory / _SHARD}: damaged: expected the declaration of a shard, got something else")
    run_id, warm = spec.pop("run"), spec.pop("warm", {})
    shape = (warm.get("vectors", 1), spec["num_dense"])
    if len(dense) != shape[0] * shape[1]:
        raise ModelError(f"{directory / _DENSE}: expected {shape[0] * shape[1]} values, got {len(dense)}")
    return Start(run_id, spec, dense.reshape(shape), warm, directory)
