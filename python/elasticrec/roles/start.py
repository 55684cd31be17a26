"""What a run with parameter servers starts from: the declaration of a shard and the first dense values, written once.

runs/<name>/start/shard.json   the table, the dense vector and its optimizer, the number of metric sums, the run's id
runs/<name>/start/dense.bin    the dense values before the first batch; of a warm start with their optimizer's vectors
runs/<name>/start/rows-NNNNN   of a warm start: the rows that the run begins with
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
    """What every shard of a run begins with."""

    run_id: str
    spec: dict[str, Any]
    dense: npt.NDArray[np.float32]
    """`[vectors, values]`: the values, and of a warm start the vectors of their optimizer."""
    warm: dict[str, Any]
    """Of a warm start: `checkpoint`, `steps` of the dense optimizer, `rows` (files), how many dense `vectors`."""
    directory: Path

    @property
    def rows(self) -> list[str]:
        """Part files of the rows that it begins with."""
        return [str(self.directory / name) for name in self.warm.get("rows", ())]

    @property
    def steps(self) -> int:
        """That the dense optimizer has taken."""
        return int(self.warm.get("steps", 0))

    @property
    def num_partitions(self) -> int:
        """Partitions of the table."""
        return int(self.spec["table"]["partitions"])

    def shard_spec(self, owned: range) -> str:
        """The declaration of a shard with these partitions, as JSON."""
        return json.dumps({**self.spec, "owned": {"start": owned.start, "end": owned.stop}})

    def dense_of(self, owned: range) -> npt.NDArray[np.float32]:
        """The dense values of these partitions."""
        total = self.dense.shape[1]
        first, end = (partition * total // self.num_partitions for partition in (owned.start, owned.stop))
        return np.ascontiguousarray(self.dense[:, first:end])


@dataclass(frozen=True)
class WarmStart:
    """Parameters of another run."""

    checkpoint: Path
    rows: list[Path]
    steps: int


def write_start(run: Run, spec: dict[str, Any], dense: npt.NDArray[np.float32], warm: WarmStart | None = None) -> None:
    """Write down what the run starts from; the declaration comes last and says that all is there."""
    directory = run.path / "start"
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / _DENSE, dense.astype("<f4").tobytes())
    declaration = {"run": secrets.token_hex(16), **spec}
    if warm is not None:
        names = [_take(path, directory / f"rows-{number:05d}") for number, path in enumerate(warm.rows)]
        declaration["warm"] = {
            "checkpoint": str(warm.checkpoint),
            "steps": warm.steps,
            "rows": names,
            "vectors": len(dense),
        }
    write_atomically(directory / _SHARD, json.dumps(declaration).encode())


def _take(path: Path, to: Path) -> str:
    """Have a file stay that another run may drop."""
    to.unlink(missing_ok=True)
    try:
        os.link(path, to)
    except OSError:
        # of another file system
        shutil.copyfile(path, to)
        with to.open("rb") as file:
            os.fsync(file.fileno())
    return to.name


def has_start(run: Run) -> bool:
    """Whether the run has started before."""
    return (run.path / "start" / _SHARD).is_file()


def read_start(path: Path) -> Start:
    """What was written down for the run in a directory."""
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
