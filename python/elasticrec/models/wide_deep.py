"""Wide & Deep (Cheng et al. 2016): a linear model of every sign beside a deep network of their vectors."""

import torch
from torch import Tensor, nn

from elasticrec.models.base import Column, Inputs, Model, Options, Shape, mlp


class WideDeep(Model):
    """logits = linear(signs, dense values) + MLP(vectors of all slots, dense values)"""

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        self.columns = (Column("wide", shape.num_labels, init="zero"), Column("deep", options.dim))
        self.deep = mlp(shape.num_slots * options.dim + shape.num_dense, options.hidden, shape.num_labels)
        self.wide = nn.Linear(shape.num_dense, shape.num_labels) if shape.num_dense else None

    def forward(self, columns: Inputs, dense_BD: Tensor) -> Tensor:
        deep_BL = self.deep(torch.cat([columns["deep"].flatten(1), dense_BD], 1))
        logits_BL: Tensor = deep_BL + columns["wide"].sum(1)
        return logits_BL if self.wide is None else logits_BL + self.wide(dense_BD)
