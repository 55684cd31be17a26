"""DCN-V2 (Wang et al. 2021): layers that cross the input with itself, beside a deep network."""

import torch
from torch import Tensor, nn

from elasticrec.models.base import Column, Inputs, Model, Options, Shape, mlp


class DCNv2(Model):
    """x₀ = vectors of all slots, dense values; xₗ₊₁ = x₀ ⊙ (W xₗ + b) + xₗ; logits = linear(x_last) + MLP(x₀)"""

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        self.columns = (Column("deep", options.dim),)
        width = shape.num_slots * options.dim + shape.num_dense
        self.cross = nn.ModuleList(nn.Linear(width, width) for _ in range(options.cross_layers))
        self.out = nn.Linear(width, shape.num_labels)
        self.deep = mlp(width, options.hidden, shape.num_labels)

    def forward(self, columns: Inputs, dense_BD: Tensor) -> Tensor:
        x0_BX = torch.cat([columns["deep"].flatten(1), dense_BD], 1)
        x_BX = x0_BX
        for layer in self.cross:
            x_BX = x0_BX * layer(x_BX) + x_BX
        logits_BL: Tensor = self.out(x_BX) + self.deep(x0_BX)
        return logits_BL
