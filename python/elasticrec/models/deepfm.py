"""DeepFM (Guo et al. 2017): FM beside a deep network of the same vectors."""

import torch
from torch import Tensor

from elasticrec.models.base import Column, Inputs, Linear, Model, Options, Shape, mlp
from elasticrec.models.fm import interactions


class DeepFM(Model):
    """logits = FM(signs, dense values) + MLP(vectors of all slots, dense values)"""

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        width = shape.num_labels * options.dim
        self.columns = (Column("wide", shape.num_labels, init="zero"), Column("factors", width))
        self.linear = Linear(shape)
        self.deep = mlp(shape.num_slots * width + shape.num_dense, options.hidden, shape.num_labels)

    def forward(self, columns: Inputs, dense_BD: Tensor) -> Tensor:
        factors_BSW = columns["factors"]
        fm_BL = self.linear(columns["wide"], dense_BD) + interactions(factors_BSW, self.shape.num_labels)
        logits_BL: Tensor = fm_BL + self.deep(torch.cat([factors_BSW.flatten(1), dense_BD], 1))
        return logits_BL
