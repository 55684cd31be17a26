"""MMoE (Ma et al. 2018): experts shared by all labels; each label has a gate that mixes them and a tower."""

import torch
from torch import Tensor, nn

from elasticrec.models.base import Column, Inputs, Model, Options, Shape, mlp


class MMoE(Model):
    """x = vectors of all slots, dense values; logit_k = tower_k(Σ_i softmax(W_k x)_i · expert_i(x))"""

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        self.columns = (Column("deep", options.dim),)
        width = shape.num_slots * options.dim + shape.num_dense
        *inner, mixed = options.expert_hidden
        self.experts = nn.ModuleList(mlp(width, inner, mixed) for _ in range(options.experts))
        self.gates = nn.ModuleList(nn.Linear(width, options.experts, bias=False) for _ in range(shape.num_labels))
        self.towers = nn.ModuleList(mlp(mixed, options.hidden, 1) for _ in range(shape.num_labels))

    def forward(self, columns: Inputs, dense_BD: Tensor) -> Tensor:
        x_BX = torch.cat([columns["deep"].flatten(1), dense_BD], 1)
        experts_BEM = torch.stack([expert(x_BX) for expert in self.experts], 1).relu()
        logits = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            weights_BE1 = gate(x_BX).softmax(1).unsqueeze(2)
            logits.append(tower((weights_BE1 * experts_BEM).sum(1)))
        return torch.cat(logits, 1)
