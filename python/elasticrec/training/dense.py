"""The network's parameters as one flat vector, used by the optimizer, checkpoints and versions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from elasticrec.config import Job
from elasticrec.errors import ModelError

Vector = npt.NDArray[np.float32]

# Values per cache line: tensors are aligned to it in memory and in the file.
_ALIGN = 16

# State vectors of each optimizer, by torch's names.
_STATE = {"adam": ("exp_avg", "exp_avg_sq"), "adagrad": ("sum",), "sgd": ()}


@dataclass(frozen=True)
class FlatTensor:
    """Position of a parameter or buffer in the flat vector; the offset counts values."""

    name: str
    shape: tuple[int, ...]
    offset: int

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of a manifest, with the offset in bytes."""
        return {"name": self.name, "shape": list(self.shape), "offset": 4 * self.offset}


class FlatParameters:
    """Moves the parameters and float buffers of a module into one vector and steps them together."""

    def __init__(self, module: nn.Module, job: Job) -> None:
        parameters = dict(module.named_parameters())
        buffers = {name: buffer for name, buffer in module.named_buffers() if buffer.is_floating_point()}
        for name, tensor in (parameters | buffers).items():
            if tensor.dtype != torch.float32:
                raise ModelError(f"model: `{name}`: expected float32, got {tensor.dtype}")
        self.tensors: list[FlatTensor] = []
        end = self._append(parameters, 0)
        self.num_parameters = end
        end = self._append(buffers, end)
        self.values = torch.zeros(end)
        self._gradient = torch.zeros(self.num_parameters)
        for entry, tensor in zip(self.tensors, (parameters | buffers).values(), strict=True):
            where = slice(entry.offset, entry.offset + tensor.numel())
            self.values[where] = tensor.detach().flatten()
            tensor.data = self.values[where].view(entry.shape)
            if entry.name in parameters:
                tensor.grad = self._gradient[where].view(entry.shape)
        parameter = nn.Parameter(self.values[: self.num_parameters])
        parameter.grad = self._gradient
        self._parameter = parameter
        self.kind = job.dense.optimizer.kind
        self._optimizer = _optimizer(self.kind, parameter, job.dense.optimizer.learning_rate)

    def _append(self, tensors: Mapping[str, Tensor], end: int) -> int:
        for name, tensor in tensors.items():
            self.tensors.append(FlatTensor(name, tuple(tensor.shape), end))
            end += -(-tensor.numel() // _ALIGN) * _ALIGN
        return end

    def zero_gradient(self) -> None:
        """Reset the gradient."""
        self._gradient.zero_()

    @property
    def gradient(self) -> Vector:
        """The gradient of the parameters, in memory shared with torch."""
        gradient: Vector = self._gradient.numpy()
        return gradient

    def buffers(self) -> Tensor:
        """Return a copy of the float buffers, such as the means of BatchNorm."""
        return self.values[self.num_parameters :].clone()

    def change(self, before: Tensor, share: float = 1.0) -> Vector:
        """Return the gradient of the parameters, followed by the buffers' changes since `before` times `share`."""
        if not len(before):
            return self.gradient
        changes = (self.values[self.num_parameters :] - before) * share
        return np.concatenate([self.gradient, changes.numpy()])

    def step(self) -> None:
        """Run one optimizer step; the caller checks `gradient_is_finite` first."""
        self._optimizer.step()

    def gradient_is_finite(self) -> bool:
        """Return whether the gradient is finite; its sum is finite only if all values are."""
        return bool(torch.isfinite(self._gradient.sum()))

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the vectors of a checkpoint, in file order."""
        return ("value", *_STATE[self.kind])

    def state(self) -> tuple[int, dict[str, Vector]]:
        """Return the number of steps and the vectors of a checkpoint, padded to one length."""
        state = self._optimizer.state.get(self._parameter, {})
        vectors: dict[str, Vector] = {"value": self.values.numpy().copy()}
        for name in _STATE[self.kind]:
            vector = np.zeros(len(self.values), np.float32)
            if name in state:
                vector[: self.num_parameters] = state[name].numpy()
            vectors[name] = vector
        return int(state.get("step", 0)), vectors

    def restore(self, step: int, vectors: dict[str, Vector]) -> None:
        """Restore what `state` returned."""
        self.values.copy_(torch.from_numpy(vectors["value"]))
        if not step:
            return
        state: dict[str, Tensor] = {"step": torch.tensor(float(step))}
        for name in _STATE[self.kind]:
            state[name] = torch.from_numpy(vectors[name][: self.num_parameters].copy())
        self._optimizer.state[self._parameter] = state


def _optimizer(kind: str, parameter: nn.Parameter, learning_rate: float) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.Adam([parameter], lr=learning_rate, fused=True)
    if kind == "adagrad":
        return torch.optim.Adagrad([parameter], lr=learning_rate)
    return torch.optim.SGD([parameter], lr=learning_rate)
