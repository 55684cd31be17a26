"""The rival of `elasticrec bench train`: what a good engineer writes in plain PyTorch for the same file and network.

DataLoader workers parse the lines into index arrays, an embedding bag holds the rows (of a known vocabulary, which a
table in production does not have), sparse Adagrad steps them, fused Adam steps the network.
The best of several numbers of workers and threads is reported. The last line printed is one JSON object.
"""

import argparse
import itertools
import json
import os
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

SLOTS, DENSE, DIM = 26, 13, 9
BATCH = 512
WARM_UP = 20
SECONDS = 12.0


class Lines(IterableDataset):
    """Batches of (signs, dense values, labels), the file dealt out to the workers batch by batch."""

    def __init__(self, path: str, values: int) -> None:
        self.path, self.values = path, values

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        first_of_slot = np.arange(SLOTS) * self.values
        with open(self.path) as file:
            for number in itertools.count():
                lines = list(itertools.islice(file, BATCH))
                if not lines:
                    return
                if number % step != first:
                    continue
                # all values of the batch at once: the names have fixed places, so that only the colons are in the way
                fields = [field.partition(":")[2] for line in lines for field in line.split()]
                table = np.array(fields, dtype=np.float64).reshape(len(lines), 1 + DENSE + SLOTS)
                signs = table[:, 1 + DENSE :].astype(np.int64) + first_of_slot
                yield (
                    torch.from_numpy(signs),
                    torch.from_numpy(table[:, 1 : 1 + DENSE].astype(np.float32)),
                    torch.from_numpy(table[:, :1].astype(np.float32)),
                )


class WideDeep(nn.Module):
    """The same network as ElasticREC's."""

    def __init__(self, values: int) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(SLOTS * values, 1 + DIM, mode="sum", sparse=True)
        nn.init.uniform_(self.rows.weight, -0.01, 0.01)
        layers: list[nn.Module] = []
        width = SLOTS * DIM + DENSE
        for hidden in (400, 400, 400):
            layers += [nn.Linear(width, hidden), nn.ReLU()]
            width = hidden
        self.deep = nn.Sequential(*layers, nn.Linear(width, 1))
        self.wide = nn.Linear(DENSE, 1)

    def forward(self, signs: Tensor, dense: Tensor) -> Tensor:
        # one sign a slot: each is a bag of its own
        rows = self.rows(signs.view(-1, 1)).view(-1, SLOTS, 1 + DIM)
        deep = self.deep(torch.cat([rows[:, :, 1:].flatten(1), dense], 1))
        return rows[:, :, :1].sum(1) + self.wide(dense) + deep


def rate(path: str, values: int, workers: int, threads: int) -> float:
    """Samples a second with so many loader processes and torch threads."""
    torch.set_num_threads(threads)
    model = WideDeep(values)
    network = [parameter for name, parameter in model.named_parameters() if not name.startswith("rows.")]
    optimizers = [
        torch.optim.Adagrad(model.rows.parameters(), lr=0.05, initial_accumulator_value=1.0),
        torch.optim.Adam(network, lr=0.001, fused=True),
    ]
    loader = DataLoader(Lines(path, values), batch_size=None, num_workers=workers, prefetch_factor=4)
    start, samples = 0.0, 0
    for step, (signs, dense, labels) in enumerate(loader):
        if step == WARM_UP:
            start, samples = time.perf_counter(), 0
        loss = functional.binary_cross_entropy_with_logits(model(signs, dense), labels)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        samples += len(labels)
        if start and time.perf_counter() - start > SECONDS:
            break
    return samples / (time.perf_counter() - start)


def main() -> None:
    """Try a few settings and report the best."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--values", type=int, required=True, help="distinct values of a slot")
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    rates = {}
    for workers, threads in itertools.product((1, 2), (1, cores)):
        rates[f"workers {workers}, threads {threads}"] = rate(arguments.file, arguments.values, workers, threads)
    best = max(rates, key=lambda setting: rates[setting])
    print(json.dumps({"torch_samples_per_s": rates[best], "torch_setting": best}))


if __name__ == "__main__":
    main()
