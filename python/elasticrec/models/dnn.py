"""DNN: the vectors of all slots and the dense values through one multi-layer perceptron."""

import torch
from torch import Tensor

from elasticrec.models.base import Column, Inputs, Model, Options, Shape, mlp


class DNN(Model):
    """logits = MLP(vectors of all slots, dense values)"""

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        self.columns = (Column("deep", options.dim),)
        self.deep = mlp(shape.num_slots * options.dim + shape.num_dense, options.hidden, shape.num_labels)

    def forward(self, columns: Inputs, dense_BD: Tensor) -> Tensor:
        logits_BL: Tensor = self.deep(torch.cat([columns["deep"].flatten(1), dense_BD], 1))
        return logits_BL
