"""Tests on what clients hold out, for all clients at once."""

from __future__ import annotations

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.bound import Bound
from kedge.core.tree import Weights
from kedge.data.federation import Federation
from kedge.engines.mapped import over_clients

ROWS = 1024  # samples in one pass, of all clients together


@torch.no_grad()
def held_sums(
    bound: Bound, federation: Federation, weights: Weights, own: bool
) -> list[dict[str, Tensor]]:
    """What the metric is made of, client by client, on the host; ``{}`` for one that holds nothing
    out. ``own`` says that weights are stacked, one model per client."""
    held = federation.held
    count = [len(rows) for rows in held]
    index = torch.nn.utils.rnn.pad_sequence(held, batch_first=True)  # [N, most]
    place = torch.arange(index.shape[1], device=index.device)
    mask = (place < torch.tensor(count, device=index.device)[:, None]).to(federation.dtype)

    def test(weights: Weights, rows: Tensor, mask: Tensor) -> dict[str, Tensor]:
        batch = federation.clean(rows)
        logits = bound.model.forward(weights, batch.x, "eval").logits
        return federation.task.sums(logits, batch, mask.to(logits.dtype))

    every = over_clients(test, 0 if own else None, 0, 0)
    total: dict[str, Tensor] = {}
    for piece in torch.split(place, max(1, ROWS // len(held))):
        sums = every(weights, index[:, piece], mask[:, piece])
        total = tree.add(total, sums) if total else sums
    total = tree.map(lambda x: x.cpu(), total)
    return [tree.take(total, k) if n else {} for k, n in enumerate(count)]
