"""The rival of `elasticrec bench train`: good plain PyTorch for the same file and network.

DataLoader workers parse lines into index arrays. Embedding bags hold the rows, of a vocabulary known in advance, which
a table in production does not have. Sparse Adagrad updates the rows, fused Adam the network. It is measured twice:
with a bag per slot, as such scripts are usually written, and with one bag for all slots, which a numbered vocabulary
allows.
Without `--setting` it searches for the best number of workers and threads; with `--setting` it measures once, so that
the benchmark can measure it and ElasticREC in turn. The last line is one JSON value.
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
SECONDS = 4.0


class Lines(IterableDataset):
    """Yields batches of (signs, dense values, labels); workers take every n-th batch of the file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        with open(self.path) as file:
            for number in itertools.count():
                lines = list(itertools.islice(file, BATCH))
                if not lines:
                    return
                if number % step != first:
                    continue
                # Fields have a fixed order, so all values of the batch are converted at once.
                fields = [field.partition(":")[2] for line in lines for field in line.split()]
                table = np.array(fields, dtype=np.float64).reshape(len(lines), 1 + DENSE + SLOTS)
                signs = table[:, 1 + DENSE :].astype(np.int64)
                yield (
                    torch.from_numpy(signs),
                    torch.from_numpy(table[:, 1 : 1 + DENSE].astype(np.float32)),
                    torch.from_numpy(table[:, :1].astype(np.float32)),
                )


class WideDeep(nn.Module):
    """The network that ElasticREC trains."""

    def __init__(self, values: int, one_bag: bool) -> None:
        super().__init__()
        sizes = [SLOTS * values] if one_bag else [values] * SLOTS
        self.rows = nn.ModuleList(nn.EmbeddingBag(size, 1 + DIM, mode="sum", sparse=True) for size in sizes)
        for bag in self.rows:
            nn.init.uniform_(bag.weight, -0.01, 0.01)
        self.register_buffer("first_of_slot", torch.arange(SLOTS) * values)
        layers: list[nn.Module] = []
        width = SLOTS * DIM + DENSE
        for hidden in (400, 400, 400):
            layers += [nn.Linear(width, hidden), nn.ReLU()]
            width = hidden
        self.deep = nn.Sequential(*layers, nn.Linear(width, 1))
        self.wide = nn.Linear(DENSE, 1)

    def forward(self, signs: Tensor, dense: Tensor) -> Tensor:
        if len(self.rows) == 1:
            # One sign per slot: each sign is a bag.
            rows = self.rows[0]((signs + self.first_of_slot).view(-1, 1)).view(-1, SLOTS, 1 + DIM)
        else:
            rows = torch.stack([bag(signs[:, slot : slot + 1]) for slot, bag in enumerate(self.rows)], 1)
        deep = self.deep(torch.cat([rows[:, :, 1:].flatten(1), dense], 1))
        return rows[:, :, :1].sum(1) + self.wide(dense) + deep


def rate(path: str, values: int, one_bag: bool, workers: int, threads: int) -> float:
    """Return samples per second with numbers of loader processes and torch threads."""
    torch.set_num_threads(threads)
    model = WideDeep(values, one_bag)
    network = [parameter for name, parameter in model.named_parameters() if not name.startswith("rows.")]
    optimizers = [
        torch.optim.Adagrad(model.rows.parameters(), lr=0.05, initial_accumulator_value=1.0),
        torch.optim.Adam(network, lr=0.001, fused=True),
    ]
    loader = DataLoader(Lines(path), batch_size=None, num_workers=workers, prefetch_factor=4)
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


def best_setting(path: str, values: int, one_bag: bool) -> tuple[int, int]:
    """Return the fastest numbers of loader processes and torch threads."""
    choices = list(itertools.product((1, 2), (1, os.cpu_count() or 1)))
    return max(choices, key=lambda setting: rate(path, values, one_bag, *setting))


def main() -> None:
    """Search for the best settings, or measure one setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--values", type=int, required=True, help="distinct values of a slot")
    parser.add_argument("--setting", type=int, nargs=3, metavar=("ONE_BAG", "WORKERS", "THREADS"))
    arguments = parser.parse_args()
    # Skip checks of the sparse gradients, which PyTorch itself makes.
    torch.sparse.check_sparse_tensor_invariants.disable()
    if arguments.setting:
        one_bag, workers, threads = arguments.setting
        print(json.dumps(rate(arguments.file, arguments.values, bool(one_bag), workers, threads)))
        return
    print(json.dumps([[one_bag, *best_setting(arguments.file, arguments.values, bool(one_bag))] for one_bag in (0, 1)]))


if __name__ == "__main__":
    main()
