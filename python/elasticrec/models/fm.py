"""FM (Rendle 2010): every pair of slots interacts by the dot product of their vectors."""

from torch import Tensor

from elasticrec.models.base import Column, Inputs, Linear, Model, Options, Shape


def interactions(factors_BSW: Tensor, num_labels: int) -> Tensor:
    """Return the sum of dot products of all pairs of slots, `[B, L]`: (square of the sum − sum of the squares) / 2."""
    square_BW = factors_BSW.sum(1).square() - factors_BSW.square().sum(1)
    square_BLD = square_BW.reshape(-1, num_labels, square_BW.shape[1] // num_labels)
    return square_BLD.sum(2) / 2


class FM(Model):
    """logits = linear(signs, dense values) + sum over pairs of slots of ⟨v_i, v_j⟩; each label has its own vectors"""

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        self.columns = (
            Column("wide", shape.num_labels, init="zero"),
            Column("factors", shape.num_labels * options.dim),
        )
        self.linear = Linear(shape)

    def forward(self, columns: Inputs, dense_BD: Tensor) -> Tensor:
        linear_BL: Tensor = self.linear(columns["wide"], dense_BD)
        return linear_BL + interactions(columns["factors"], self.shape.num_labels)
