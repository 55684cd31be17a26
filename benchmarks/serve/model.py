"""The model of every rival of `elasticrec bench serve`: the same network and the same rows, in numpy and torch."""

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

SLOTS, DENSE = 26, 13
LOADED = "model loaded"

Signs = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]

# Servers use more cores by starting more processes.
torch.set_num_threads(1)


class Model:
    """Scores signs and dense values."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        signs, rows = np.load(directory / "signs.npy"), np.load(directory / "rows.npy")
        # An extra row of zeros, for signs without a row.
        self._signs = np.append(signs, np.uint64(2**64 - 1))
        self._rows = np.append(rows, np.zeros((1, rows.shape[1]), np.float32), axis=0)
        self._missing = len(signs)
        # Deprecated, but the fastest for one instance: it takes a third less time than the module itself.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit")
            self._network = torch.jit.optimize_for_inference(torch.jit.load(str(directory / "network.pt")).eval())
        # The first calls compile the network.
        for count in (1, 1, 1, 2, 2, 2):
            self.predict(np.zeros((count, SLOTS), np.uint64), np.zeros((count, DENSE), np.float32))
        # The benchmark waits for this line from each process.
        print(LOADED, flush=True)

    def __reduce__(self) -> tuple[Callable[[Path], "Model"], tuple[Path]]:
        """Make other processes load the model when a server passes it to them."""
        return Model, (self._directory,)

    def predict(self, signs: Signs, dense: Floats) -> Floats:
        """Return scores `[B]` of signs `[B, SLOTS]` and dense values `[B, DENSE]`."""
        # Faster than a dict of a million signs, for one instance and for many.
        at = self._signs.searchsorted(signs)
        at[self._signs[at] != signs] = self._missing
        # The network was trained on logarithms; requests have the original values.
        logs = np.copysign(np.log1p(np.abs(dense)), dense)
        with torch.inference_mode():
            scores: Floats = self._network(torch.from_numpy(self._rows[at]), torch.from_numpy(logs)).numpy()[:, 0]
        return scores


def split(body: bytes) -> tuple[Signs, Floats]:
    """Split a body of all signs followed by all dense values."""
    num_instances = len(body) // (8 * SLOTS + 4 * DENSE)
    signs = np.frombuffer(body, np.uint64, num_instances * SLOTS).reshape(-1, SLOTS)
    return signs, np.frombuffer(body, np.float32, offset=signs.nbytes).reshape(-1, DENSE)


def arguments(description: str | None) -> argparse.Namespace:
    """Parse the command line of a rival."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("directory", type=Path, help="signs.npy, rows.npy and network.pt")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--grpc-port", type=int, default=0, help="port for gRPC, if the server has it")
    parser.add_argument("--workers", type=int, default=1, help="number of processes that score")
    parser.add_argument("--batch", type=int, default=1, help="largest number of requests scored together")
    return parser.parse_args()
