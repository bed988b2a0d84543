"""What a part sees of a forward pass."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Out(NamedTuple):
    """The network's outputs for a batch: the real rows, and the rows that this part injected."""

    logits: Tensor  # [B, C]
    features: Tensor  # [B, F], input of the head
    at: dict[str, Tensor]  # activations at the part's cuts
    mine: Any = ()  # an Out of the rows that this part injected
