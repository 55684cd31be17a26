"""The base class of models: table columns, and logits from pooled columns and dense values.

Shapes in names: B samples, S slots, D dense values, L labels, W the width of a column.
"""

import collections.abc
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Column:
    """A group of weights that the table stores for every sign."""

    name: str
    width: int
    init: Literal["zero", "uniform"] = "uniform"


@dataclass(frozen=True)
class Sequence:
    """A slot whose signs are not pooled: cells `first` to `first + length`, padded with zeros at the end."""

    first: int
    length: int
    target: int | None
    """Cell of the slot whose rows the sequence shares."""


@dataclass(frozen=True)
class Shape:
    """The sizes of the data that a model is built for.

    `num_slots` counts the vectors of a sample: one per slot, and one per position of a sequence.
    """

    num_slots: int
    num_dense: int
    num_labels: int
    sequences: tuple[Sequence, ...] = ()


@dataclass(frozen=True)
class Options:
    """The `model` section of a job; each model uses the options it needs."""

    dim: int = 9
    hidden: tuple[int, ...] = (400, 400, 400)
    cross_layers: int = 3
    experts: int = 4
    expert_hidden: tuple[int, ...] = (128,)
    attention_hidden: tuple[int, ...] = (36,)
    extra: collections.abc.Mapping[str, Any] = field(default_factory=dict)
    """`model.options` of the job: options of a custom model."""


class Model(nn.Module):
    """A network from pooled columns `[B, S, W]` and dense values `[B, D]` to logits `[B, L]`."""

    columns: tuple[Column, ...]

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, columns: Inputs, dense_BD: Tensor) -> Tensor:
        """Return logits `[B, L]`, one per label."""
        raise NotImplementedError


class Linear(nn.Module):
    """The linear part of a model: a weight for every sign, a weight for every dense value, a bias."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(shape.num_labels))
        self.dense = nn.Linear(shape.num_dense, shape.num_labels, bias=False) if shape.num_dense else None

    def forward(self, wide_BSL: Tensor, dense_BD: Tensor) -> Tensor:
        """Return logits, `[B, L]`."""
        logits_BL = wide_BSL.sum(1) + self.bias
        return logits_BL if self.dense is None else logits_BL + self.dense(dense_BD)


def mlp(num_inputs: int, hidden: collections.abc.Sequence[int], num_outputs: int) -> nn.Sequential:
    """Return linear layers with ReLU in between."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(num_inputs, width), nn.ReLU()]
        num_inputs = width
    return nn.Sequential(*layers, nn.Linear(num_inputs, num_outputs))
