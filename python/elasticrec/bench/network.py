"""The limit of training: the same network, loss and optimizer on tensors in memory."""

import json
import time
from collections.abc import Callable

import torch

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.machine import num_cores
from elasticrec.training.dense import FlatParameters
from elasticrec.training.network import Scorer, build_model, loss_of

WARM_UP_STEPS = 10


def dense_only_rate(job: Job, text: bytes, seconds: float) -> tuple[float, int]:
    """Return samples per second with the best number of threads, and that number; `text` is one batch of lines."""
    rates = {threads: _rate(job, text, seconds, threads) for threads in range(1, num_cores() + 1)}
    best = max(rates, key=lambda threads: rates[threads])
    return rates[best], best


def _rate(job: Job, text: bytes, seconds: float, threads: int) -> float:
    step, num_samples = dense_step(job, text, threads)
    for _ in range(WARM_UP_STEPS):
        step()
    steps = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        step()
        steps += 1
    return steps * num_samples / (time.perf_counter() - start)


def dense_step(job: Job, text: bytes, threads: int) -> tuple[Callable[[], None], int]:
    """Return a function that runs one step of the network on a batch in memory, and the samples of the batch."""
    torch.set_num_threads(threads)
    model = build_model(job)
    dense, scorer = FlatParameters(model, job), Scorer(model)
    width = sum(column.width for column in model.columns)
    batch = _core.Parser(json.dumps(job.features())).parse(text, labels=True)
    values = torch.from_numpy(batch.dense)
    rows = torch.rand(batch.num_samples, model.shape.num_slots, width) * 0.02 - 0.01

    def step() -> None:
        pooled = rows.detach().requires_grad_()
        loss = loss_of(scorer.logits(pooled, values), batch)
        dense.zero_gradient()
        torch.autograd.backward(loss.mean)
        dense.step()

    return step, batch.num_samples
