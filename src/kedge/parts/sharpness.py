"""Methods that seek flat minima. FedSAM (Qu et al. 2022, Caldarola et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from kedge.core import tree
from kedge.core.part import Doc, Part, Range, register
from kedge.core.tree import Params
from kedge.core.view import View


@register
@dataclass(frozen=True)
class FedSAM(Part):
    r"""Descend by the gradient at the worst nearby point: sharpness-aware minimisation (SAM).

    :math:`w \leftarrow w - \eta\nabla F_k\big(w + \rho\,\nabla F_k(w)/\|\nabla F_k(w)\|\big)`,
    both on the same batch (algorithm 1).

    Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022,
    arXiv:2206.02618; Caldarola et al., ECCV 2022, arXiv:2203.11834.

    Written as a correction of the gradient, so that it adds to other corrections. BatchNorm's
    running statistics are updated in the first pass only. Neutral at: rho = 0.
    """

    rho: Annotated[float, Doc("radius of the neighbourhood"), Range(0)] = 0.1

    presets = {"fedcog": {"rho": 0.5}}
    neutral = {"rho": 0.0}
    compute = "a second gradient"

    def correct(self, v: View, params: Params, grads: Params) -> Params:
        scale = self.rho / (torch.sqrt(tree.sq_norm(grads)) + 1e-12)
        worst = tree.map(lambda w, g: w + scale * g, params, grads)
        return tree.sub(v.grad(worst), grads)
