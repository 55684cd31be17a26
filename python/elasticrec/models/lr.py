"""LR: logistic regression, the baseline for all other models."""

from torch import Tensor

from elasticrec.models.base import Column, Inputs, Linear, Model, Options, Shape


class LR(Model):
    """logits = linear(signs, dense values)"""

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        self.columns = (Column("wide", shape.num_labels, init="zero"),)
        self.linear = Linear(shape)

    def forward(self, columns: Inputs, dense_BD: Tensor) -> Tensor:
        logits_BL: Tensor = self.linear(columns["wide"], dense_BD)
        return logits_BL
