"""Methods that leave a part of the model on the client. FedRep (Collins et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from kedge.core.part import Doc, Range, register
from kedge.core.tree import Params
from kedge.core.view import View
from kedge.parts.layers import OwnHead


@register
@dataclass(frozen=True)
class FedRep(OwnHead):
    r"""Learn the representation together and the head alone.

    Each round a client first trains its own head :math:`h_k` with the body :math:`\phi` fixed,
    then the body with the head fixed; only bodies are averaged (algorithm 1).

    Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML
    2021, arXiv:2102.07078.

    Deviation: the paper counts epochs (10 for the head, 1 for the body); here the head gets a
    share of the local steps, so that every method does the same amount of work. Keeps: the head,
    which is neither sent nor uploaded.
    """

    head_share: Annotated[
        float, Doc("share of the local steps that train the head"), Range(0, 1)
    ] = 0.5

    def trainable(self, v: View, params: Params) -> dict[str, Tensor | bool]:
        head = v.step < torch.floor(self.head_share * v.info.num_steps)
        own = set(v.spec.model.head_names())
        return {n: head if n in own else ~head for n in params}
