"""What a run with parameter servers starts from: the declaration of a shard and the first dense values, written once.

runs/<name>/start/shard.json   the table, the dense vector and its optimizer, the number of metric sums, the run's id
runs/<name>/start/dense.bin    the dense values before the first batch
"""

import json
import secrets
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

    @property
    def num_partitions(self) -> int:
        """Partitions of the table."""
        return int(self.spec["table"]["partitions"])

    def shard_spec(self, owned: range) -> str:
        """The declaration of a shard with these partitions, as JSON."""
        return json.dumps({**self.spec, "owned": {"start": owned.start, "end": owned.stop}})

    def dense_of(self, owned: range) -> npt.NDArray[np.float32]:
        """The dense values of these partitions."""
        total = len(self.dense)
        first, end = (partition * total // self.num_partitions for partition in (owned.start, owned.stop))
        return self.dense[first:end]


def write_start(run: Run, spec: dict[str, Any], dense: npt.NDArray[np.float32]) -> None:
    """Write down what the run starts from; the declaration comes last and says that all is there."""
    directory = run.path / "start"
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / _DENSE, dense.astype("<f4").tobytes())
    write_atomically(directory / _SHARD, json.dumps({"run": secrets.token_hex(16), **spec}).encode())


def has_start(run: Run) -> bool:
    """Whether the run has started before."""
    return (run.path / "start" / _SHARD).is_file()


def read_start(path: Path) -> Start:
    """What was written down for the run in a directory."""
    directory = path / "start"
    try:
        spec = json.loads((directory / _SHARD).read_bytes())
        dense = np.fromfile(directory / _DENSE, "<f4")
    except FileNotFoundError as error:
        raise ModelError(f"{path}: not a run with parameter servers: {error.filename} is missing") from None
    run_id = spec.pop("run")
    if len(dense) != spec["num_dense"]:
        raise ModelError(f"{directory / _DENSE}: expected {spec['num_dense']} values, got {len(dense)}")
    return Start(run_id, spec, dense)
