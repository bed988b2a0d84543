"""LoRA: train a low-rank update of some linear layers, and leave their weights as they are.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022 (arXiv 2106.09685). Written
here since it is short, and since frozen weights are constants in kedge, which no client sends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from kedge.errors import ModelError

#: Names of the projections to queries and values in common architectures.
ATTENTION = ("query", "value", "q_proj", "v_proj", "q_lin", "v_lin", "query_proj", "value_proj")


class LoRA(nn.Module):
    """A linear layer with frozen weights W and a trained update: W x + (alpha / rank) B A x.

    A is drawn as the weights of a linear layer, B is zero, so that training starts at W.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        self.a = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.b = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.a, math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        update: Tensor = F.linear(F.linear(x, self.a), self.b)
        return self.base(x) + self.scale * update

    def extra_repr(self) -> str:
        return f"rank={len(self.a)}, scale={self.scale:g}"


def add_lora(module: nn.Module, rank: int, alpha: float, targets: Sequence[str] = ()) -> None:
    """Freeze a module and give some of its linear layers a trained update, in place.

    Args:
        module: the network.
        rank: rank of the update.
        alpha: the update is multiplied by ``alpha / rank``.
        targets: last names of the layers; those of queries and values if empty.

    Raises:
        ModelError: there is no such layer.
    """
    module.requires_grad_(False)
    wanted = set(targets or ATTENTION)
    layers = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear)}
    chosen = {n: m for n, m in layers.items() if n.rpartition(".")[2] in wanted}
    if not chosen:
        known = sorted({n.rpartition(".")[2] for n in layers})
        raise ModelError(
            f"no linear layer is called {', '.join(targets or ATTENTION)}; name some of: "
            f"{', '.join(known)} (targets=[...])"
        )
    for name, layer in chosen.items():
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, LoRA(layer, rank, alpha))
