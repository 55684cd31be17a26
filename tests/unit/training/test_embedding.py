"""The bridge to the table: pulls, pushes and counts against a dictionary of rows in plain torch."""

import json
import random
from collections import Counter

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.models import Column
from elasticrec.training.embedding import Embedding, table_spec
from support.small import MakeJob, sample_lines

COLUMNS = (Column("wide", 1, init="zero"), Column("deep", 3))
WIDTH = 4
MASK = 2**64 - 1


def mix(value: int) -> int:
    """Hash as specified in `docs/formats/part.md`."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        value = ((value ^ (value >> 33)) * factor) & MASK
    return value ^ (value >> 33)


def initial(seed: int, sign: int, scale: float) -> Tensor:
    """Return the initial values of a row, as specified in `docs/formats/table.md`."""
    state = mix(sign ^ mix(seed ^ xxhash.xxh3_64_intdigest(b"main")))
    values = []
    for at in range(WIDTH):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        unit = np.float32(mix(state) >> 40) / np.float32(2**24)
        values.append((np.float32(2) * unit - np.float32(1)) * np.float32(0.0 if at == 0 else scale))
    return torch.tensor(np.array(values, np.float32))


class Reference:
    """A dictionary from sign to row; torch pools and differentiates, the formula of Adagrad steps."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rows: dict[int, Tensor] = {}
        self.sums: dict[int, Tensor] = {}

    def read(self, sign: int) -> Tensor:
        return self.rows.get(sign, torch.zeros(WIDTH)).clone().requires_grad_()

    def pull(self, lines: list[str]) -> tuple[Tensor, dict[int, Tensor]]:
        names = {slot.name: at for at, slot in enumerate(self.job.data.slots)}
        leaves: dict[int, Tensor] = {}
        samples = []
        for line in lines:
            cells: list[list[Tensor]] = [[] for _ in names]
            for field in line.split()[2:]:
                sign, slot = field.split(":")
                if slot in names:
                    leaf = leaves.setdefault(int(sign), self.read(int(sign)))
                    cells[names[slot]].append(leaf)
            samples.append(torch.stack([self.pool(cell, at) for at, cell in enumerate(cells)]))
        return torch.stack(samples), leaves

    def pool(self, cell: list[Tensor], slot: int) -> Tensor:
        if not cell:
            return torch.zeros(WIDTH)
        total = torch.stack(cell).sum(0)
        divisors = {"sum": 1.0, "mean": len(cell), "sqrtn": len(cell) ** 0.5}
        return total / divisors[self.job.data.slots[slot].pooling or "sum"]

    def push(self, leaves: dict[int, Tensor], scale: float) -> None:
        optimizer, seed = self.job.sparse.optimizer, self.job.train.seed
        for sign, leaf in leaves.items():
            assert leaf.grad is not None
            gradient = scale * leaf.grad
            row = self.rows.setdefault(sign, initial(seed, sign, self.job.sparse.init_scale))
            total = self.sums.setdefault(sign, torch.full((WIDTH,), optimizer.initial_accumulator))
            total += gradient**2
            row -= optimizer.learning_rate * gradient / (total.sqrt() + optimizer.epsilon)


def pooled_job(make_job: MakeJob) -> Job:
    slots = [{"name": 0, "pooling": "sum"}, {"name": 1, "pooling": "mean"}, {"name": 2, "pooling": "sqrtn"}]
    return make_job(data={"slots": slots}, sparse={"init_scale": 0.5}, train={"seed": 7})


def parse(job: Job, lines: list[str]) -> _core.Batch:
    return _core.Parser(json.dumps(job.features())).parse("\n".join(lines).encode(), labels=True)


def crowded_lines(count: int, seed: int) -> list[str]:
    """Return lines with few signs, shared by samples and slots; with repeats, empty slots and a slot not in the job."""
    rng = random.Random(seed)
    lines = []
    for _ in range(count):
        show = rng.randint(1, 4)
        signs = rng.choices([0, 1, 2, 3, 2**64 - 1], k=rng.randint(0, 8))
        fields = [f"{sign}:{rng.randint(0, 3)}" for sign in signs]
        lines.append(" ".join([str(show), str(rng.randint(0, show)), *fields]))
    return lines


def test_pull_and_push_match_the_reference(make_job: MakeJob) -> None:
    job = pooled_job(make_job)
    embedding, reference = Embedding(job, COLUMNS), Reference(job)
    for step in range(30):
        lines = crowded_lines(20, step)
        batch = parse(job, lines)
        pooled = embedding.pull(batch)
        expected, leaves = reference.pull(lines)
        torch.testing.assert_close(pooled, expected, rtol=1e-4, atol=1e-5)
        torch.manual_seed(step)
        target = torch.randn(expected.shape)
        for tensor in (pooled, expected):
            if tensor.requires_grad:
                torch.autograd.backward(((tensor - target) ** 2 * torch.from_numpy(batch.weights)[:, None, None]).sum())
        assert embedding.push(batch, pooled, scale=0.25, seen=step)
        reference.push(leaves, 0.25)
    assert len(embedding.table) == len(reference.rows) == 5
    for sign, row in reference.rows.items():
        found = embedding.table.get(sign)
        assert found is not None
        np.testing.assert_allclose(found[3], row, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found[4], reference.sums[sign], rtol=1e-4)


def test_absent_rows_read_as_zero_and_pulls_create_no_rows(make_job: MakeJob) -> None:
    job = pooled_job(make_job)
    embedding = Embedding(job, COLUMNS)
    lines = sample_lines(100, 1)
    for _ in range(2):
        pooled = embedding.pull(parse(job, lines))
        assert pooled.shape == (100, 3, WIDTH)
        assert not pooled.any()
        assert len(embedding.table) == 0
    assert embedding.table.get(0) is None


def test_the_push_that_creates_a_row_starts_from_its_initial_value(make_job: MakeJob) -> None:
    job = pooled_job(make_job)
    embedding = Embedding(job, COLUMNS)
    batch = parse(job, ["1 0 42:0 18446744073709551615:1"])
    pooled = embedding.pull(batch)
    pooled.grad = torch.zeros_like(pooled)
    embedding.push(batch, pooled, scale=1.0, seen=3)
    for sign in (42, 2**64 - 1):
        found = embedding.table.get(sign)
        assert found is not None
        assert found[2] == 3
        assert found[3] == initial(7, sign, 0.5).tolist()
        assert found[3][0] == 0
        assert any(found[3])


def test_shows_and_clicks_are_exact(make_job: MakeJob) -> None:
    job = pooled_job(make_job)
    embedding = Embedding(job, COLUMNS)
    lines = sample_lines(2000, 4) + crowded_lines(500, 5)
    for start in range(0, len(lines), 64):
        batch = parse(job, lines[start : start + 64])
        pooled = embedding.pull(batch)
        pooled.grad = torch.ones_like(pooled)
        embedding.push(batch, pooled, scale=1e-3, seen=0)
        # an evaluation in between does not change the counts
        embedding.pull(parse(job, lines[:50]))
    shows, clicks = Counter[int](), Counter[int]()
    for line in lines:
        show, click, *fields = line.split()
        for field in fields:
            sign, slot = field.split(":")
            if slot in "012":
                shows[int(sign)] += int(show)
                clicks[int(sign)] += int(click)
    assert len(embedding.table) == len(shows)
    for sign in shows:
        found = embedding.table.get(sign)
        assert found is not None
        assert found[:2] == (shows[sign], clicks[sign]), sign


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_counted_but_not_applied(make_job: MakeJob, value: float) -> None:
    job = pooled_job(make_job)
    embedding = Embedding(job, COLUMNS)
    batch = parse(job, ["2 1 5:0 6:1", "1 0 6:2"])
    for gradient in (1.0, value):
        pooled = embedding.pull(batch)
        pooled.grad = torch.ones_like(pooled)
        pooled.grad[0, 0, 0] = gradient
        before = [embedding.table.get(sign) for sign in (5, 6)]
        assert embedding.push(batch, pooled, scale=1.0, seen=0) == (gradient == 1.0)
    for sign, row, counts in ((5, before[0], (2, 1)), (6, before[1], (3, 1))):
        found = embedding.table.get(sign)
        assert row is not None
        assert found is not None
        assert found[:2] == (2 * counts[0], 2 * counts[1])
        assert found[3:] == row[3:]


def test_training_continues_after_an_evaluation_with_larger_batches(make_job: MakeJob) -> None:
    """A buffer allocated in inference mode cannot be used by autograd."""
    job = pooled_job(make_job)
    embedding = Embedding(job, COLUMNS)
    with torch.inference_mode():
        embedding.pull(parse(job, sample_lines(200, 1)))
    batch = parse(job, sample_lines(50, 2))
    pooled = embedding.pull(batch)
    torch.autograd.backward((pooled + 1).square().sum())
    assert embedding.push(batch, pooled, scale=1.0, seen=0)


def test_a_batch_without_samples(make_job: MakeJob) -> None:
    job = pooled_job(make_job)
    pooled = Embedding(job, COLUMNS).pull(parse(job, []))
    assert pooled.shape == (0, 3, WIDTH)


def test_the_spec_of_the_table(make_job: MakeJob) -> None:
    job = make_job(sparse={"init_scale": 0.25, "partitions": 3}, train={"seed": 9})
    spec = table_spec(job, COLUMNS)
    assert (spec["name"], spec["seed"], spec["partitions"]) == ("main", 9, 3)
    assert [column["init_scale"] for column in spec["columns"]] == [0.0, 0.25]
    assert spec["optimizer"]["kind"] == "adagrad"
