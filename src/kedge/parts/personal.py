"""Methods that train body and head in turn. FedRep (Collins et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from kedge.core.part import Doc, Range, register
from kedge.core.tree import Params
from kedge.core.view import View
from kedge.parts.layers import PrivateHead

#: Added to a share, so that 0.29 of 100 steps are 29: more than the rounding of a share in float32,
#: and less than one step for shares of d decimals and up to 10^(7 - d) steps.
GRAIN = 1e-7


@register
@dataclass(frozen=True)
class FedRep(PrivateHead):
    r"""Learn a shared representation and a private head, one after the other in each round.

    Each round a client first trains its own head :math:`h_k` with the body :math:`\phi` fixed,
    then the body with the head fixed; only bodies are averaged (algorithm 1).

    Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML
    2021, arXiv:2102.07078.

    Deviations: the paper counts epochs (10 for the head, 1 for the body); here the head gets a
    share of the local steps, rounded down, so that all methods have the same step budget. Keeps:
    the head, which is neither sent nor uploaded.
    """

    head_share: Annotated[
        float, Doc("share of the local steps that train the head"), Range(0, 1)
    ] = 0.5

    def trainable(self, v: View, params: Params) -> dict[str, Tensor | bool]:
        head_step = v.step < torch.floor((self.head_share + GRAIN) * v.info.num_steps.double())
        head = set(v.spec.model.head_names())
        return {n: head_step if n in head else ~head_step for n in params}
