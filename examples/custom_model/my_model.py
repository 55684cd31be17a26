"""NFM (He and Chua 2017): an MLP over the sum of the products of all pairs of slots."""

import torch
from torch import Tensor

from elasticrec.models import Column, Inputs, Model, Options, Shape, mlp


class MyModel(Model):
    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        # Weights of a sign in the table: one per label, and a vector.
        self.columns = (Column("wide", shape.num_labels, init="zero"), Column("deep", options.dim))
        self.scale = options.extra.get("scale", 1.0)
        self.deep = mlp(options.dim + shape.num_dense, options.hidden, shape.num_labels)

    def forward(self, columns: Inputs, dense: Tensor) -> Tensor:
        vectors = columns["deep"]  # [samples, slots, dim]
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)) / 2
        logits: Tensor = self.deep(torch.cat([self.scale * pairs, dense], 1))
        return logits + columns["wide"].sum(1)
