"""What every rival of `elasticrec bench serve` holds: the same network and the same rows, in numpy and torch."""

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

# more cores are the business of the server, which starts more processes
torch.set_num_threads(1)


class Model:
    """Signs and dense values to scores."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        signs, rows = np.load(directory / "signs.npy"), np.load(directory / "rows.npy")
        # behind the last row one of zeros, for signs that have none
        self._signs = np.append(signs, np.uint64(2**64 - 1))
        self._rows = np.append(rows, np.zeros((1, rows.shape[1]), np.float32), axis=0)
        self._missing = len(signs)
        # deprecated, and still the fastest for one instance: a third less than the module itself takes
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self._network = torch.jit.optimize_for_inference(torch.jit.load(str(directory / "network.pt")).eval())
        # the first calls compile the network
        for count in (1, 1, 1, 2, 2, 2):
            self.predict(np.zeros((count, SLOTS), np.uint64), np.zeros((count, DENSE), np.float32))
        # the benchmark waits until each process has said so
        print(LOADED, flush=True)

    def __reduce__(self) -> tuple[Callable[[Path], "Model"], tuple[Path]]:
        """A server that hands its model to other processes has them load it."""
        return Model, (self._directory,)

    def predict(self, signs: Signs, dense: Floats) -> Floats:
        """Scores `[B]` of signs `[B, SLOTS]` and dense values `[B, DENSE]`."""
        # faster than a dict of a million signs, for one instance and for many
        at = self._signs.searchsorted(signs)
        at[self._signs[at] != signs] = self._missing
        # the network has learned from logarithms; the server gets the values as they are
        logs = np.copysign(np.log1p(np.abs(dense)), dense)
        with torch.inference_mode():
            scores: Floats = self._network(torch.from_numpy(self._rows[at]), torch.from_numpy(logs)).numpy()[:, 0]
        return scores


def split(body: bytes) -> tuple[Signs, Floats]:
    """Signs and dense values out of bytes that have all signs before all dense values."""
    num_instances = len(body) // (8 * SLOTS + 4 * DENSE)
    signs = np.frombuffer(body, np.uint64, num_instances * SLOTS).reshape(-1, SLOTS)
    return signs, np.frombuffer(body, np.float32, offset=signs.nbytes).reshape(-1, DENSE)


def arguments(description: str | None) -> argparse.Namespace:
    """What all rivals are started with."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("directory", type=Path, help="signs.npy, rows.npy and network.pt")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--grpc-port", type=int, default=0, help="of those that have gRPC")
    parser.add_argument("--workers", type=int, default=1, help="processes that score")
    parser.add_argument("--batch", type=int, default=1, help="most requests that are scored together")
    return parser.parse_args()
