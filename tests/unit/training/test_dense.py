"""The flat vector of a network: the same steps as the optimizers of torch, the same bits after a restore."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from elasticrec.errors import ModelError
from elasticrec.training.dense import FlatParameters
from support.small import MakeJob

OPTIMIZERS = {"adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}
KINDS = sorted(OPTIMIZERS)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3), nn.Linear(3, 1))


def loss(module: nn.Module, step: int) -> Tensor:
    torch.manual_seed(step)
    inputs = torch.randn(32, 5)
    return ((module(inputs)[:, 0] - inputs.sum(1)) ** 2).mean()


def flat_step(module: nn.Module, flat: FlatParameters, step: int) -> None:
    flat.zero_gradient()
    torch.autograd.backward(loss(module, step))
    flat.step()


def make(make_job: MakeJob, kind: str, learning_rate: float = 0.01) -> tuple[nn.Module, FlatParameters]:
    module = network()
    job = make_job(dense={"optimizer": {"kind": kind, "learning_rate": learning_rate}})
    return module, FlatParameters(module, job)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_those_of_torch(make_job: MakeJob, kind: str) -> None:
    plain = network()
    start = copy.deepcopy(plain.state_dict())
    module, flat = make(make_job, kind)
    optimizer = OPTIMIZERS[kind](plain.parameters(), lr=0.01)
    for step in range(50):
        flat_step(module, flat, step)
        optimizer.zero_grad()
        torch.autograd.backward(loss(plain, step))
        optimizer.step()
    assert not torch.allclose(plain.state_dict()["0.weight"], start["0.weight"])
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], expected, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [0, 1, 20])
def test_a_restored_optimizer_continues_with_the_same_bits(make_job: MakeJob, kind: str, before: int) -> None:
    module, flat = make(make_job, kind)
    for step in range(before):
        flat_step(module, flat, step)
    steps, vectors = flat.state()
    assert steps == (0 if kind == "sgd" else before)
    other, restored = make(make_job, kind)
    restored.values.fill_(7)
    restored.restore(steps, {name: vector.copy() for name, vector in vectors.items()})
    for step in range(before, before + 20):
        flat_step(module, flat, step)
        flat_step(other, restored, step)
    left, right = flat.state(), restored.state()
    assert left[0] == right[0]
    assert {name: vector.tobytes() for name, vector in left[1].items()} == {
        name: vector.tobytes() for name, vector in right[1].items()
    }
    assert list(left[1]) == list(flat.vectors)


def test_the_state_is_a_copy(make_job: MakeJob) -> None:
    module, flat = make(make_job, "adam")
    flat_step(module, flat, 0)
    _, vectors = flat.state()
    kept = {name: vector.copy() for name, vector in vectors.items()}
    flat_step(module, flat, 1)
    for name, vector in vectors.items():
        np.testing.assert_array_equal(vector, kept[name], name)


def test_every_tensor_is_a_view_of_the_vector_at_its_offset(make_job: MakeJob) -> None:
    module, flat = make(make_job, "adam")
    tensors = dict(module.named_parameters()) | {
        name: buffer for name, buffer in module.named_buffers() if buffer.is_floating_point()
    }
    assert [entry.name for entry in flat.tensors] == list(tensors)
    flat_step(module, flat, 0)
    end = 0
    for entry in flat.tensors:
        assert entry.offset % 16 == 0
        assert entry.offset >= end
        tensor = tensors[entry.name]
        end = entry.offset + tensor.numel()
        np.testing.assert_array_equal(flat.values[entry.offset : end].view(entry.shape), tensor.detach())
        assert tensor.data_ptr() == flat.values.data_ptr() + 4 * entry.offset
    assert len(flat.values) % 16 == 0
    assert flat.num_parameters % 16 == 0


def test_buffers_are_in_the_vector_and_no_optimizer_changes_them(make_job: MakeJob) -> None:
    module, flat = make(make_job, "sgd", learning_rate=0.1)
    entries = {entry.name: entry for entry in flat.tensors}
    mean = entries["1.running_mean"]
    assert mean.offset >= flat.num_parameters
    torch.manual_seed(0)
    batch = torch.randn(32, 5)
    expected = 0.1 * module[0](batch).mean(0)  # type: ignore[index]
    module(batch)
    flat.zero_gradient()
    flat.step()
    torch.testing.assert_close(flat.values[mean.offset : mean.offset + 7], expected.detach())
    assert flat.values[entries["1.running_var"].offset] != 1
    assert "1.num_batches_tracked" not in entries


def test_a_scalar_parameter(make_job: MakeJob) -> None:
    module = nn.Module()
    module.scale = nn.Parameter(torch.tensor(2.0))
    module.shift = nn.Parameter(torch.tensor([1.0, 2.0]))
    flat = FlatParameters(module, make_job())
    assert [(entry.shape, entry.offset) for entry in flat.tensors] == [((), 0), ((2,), 16)]
    assert flat.values[[0, 16, 17]].tolist() == [2, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tensors_of_another_type_are_refused_by_name(make_job: MakeJob, dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=dtype))
    with pytest.raises(ModelError, match=f"^model: `1.weight`: expected float32, got {dtype}$"):
        FlatParameters(module, make_job())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_is_detected(make_job: MakeJob, value: float) -> None:
    module, flat = make(make_job, "sgd")
    torch.autograd.backward(loss(module, 0))
    assert flat.gradient_is_finite()
    weight = next(module.parameters())
    assert weight.grad is not None
    weight.grad[1, 2] = value
    assert not flat.gradient_is_finite()
    flat.zero_gradient()
    assert flat.gradient_is_finite()
