"""DIN (Zhou et al. 2018): the user's history, weighted by its relevance for the shown item."""

import torch
from torch import Tensor, nn

from elasticrec.models.base import Column, Inputs, Model, Options, Shape, mlp


class DIN(Model):
    """logits = MLP(vectors of ordinary slots, Σ_t a(e_t, v) · e_t of each sequence, dense values)

    v is the vector of the slot whose rows the sequence shares. a = MLP(e, v, e − v, e ⊙ v) is not normalized, so that
    the sum grows with the part of the history that is relevant for v. Positions after a short history are zero.
    """

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        self.columns = (Column("deep", options.dim),)
        self.attention = nn.ModuleList(mlp(4 * options.dim, options.attention_hidden, 1) for _ in shape.sequences)
        num_vectors = shape.num_slots - sum(sequence.length - 1 for sequence in shape.sequences)
        self.deep = mlp(num_vectors * options.dim + shape.num_dense, options.hidden, shape.num_labels)

    def forward(self, columns: Inputs, dense_BD: Tensor) -> Tensor:
        vectors_BSW = columns["deep"]
        parts, end = [], 0
        for sequence, attention in zip(self.shape.sequences, self.attention, strict=True):
            assert sequence.target is not None, "the job was checked"
            parts.append(vectors_BSW[:, end : sequence.first].flatten(1))
            end = sequence.first + sequence.length
            e_BTW = vectors_BSW[:, sequence.first : end]
            v_BTW = vectors_BSW[:, sequence.target].unsqueeze(1).expand_as(e_BTW)
            weights_BT1 = attention(torch.cat([e_BTW, v_BTW, e_BTW - v_BTW, e_BTW * v_BTW], 2))
            parts.append((weights_BT1 * e_BTW).sum(1))
        logits_BL: Tensor = self.deep(torch.cat([*parts, vectors_BSW[:, end:].flatten(1), dense_BD], 1))
        return logits_BL
