"""DNN: the vectors of all slots and the dense values through one multi-layer perceptron."""

from collections.abc import Sequence

import torch
from torch import Tensor

from elasticrec.models.base import Column, Inputs, Model, Shape, mlp


class DNN(Model):
    """logits = MLP(vectors of all slots, dense values)"""

    def __init__(self, shape: Shape, dim: int, hidden: Sequence[int]) -> None:
        super().__init__(shape, dim, hidden)
        self.columns = (Column("deep", dim),)
        self.deep = mlp(shape.num_slots * dim + shape.num_dense, hidden, shape.num_labels)

    def forward(self, columns: Inputs, dense_BD: Tensor) -> Tensor:
        logits_BL: Tensor = self.deep(torch.cat([columns["deep"].flatten(1), dense_BD], 1))
        return logits_BL
