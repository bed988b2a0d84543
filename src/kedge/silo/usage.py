"""How many rows an update is really computed from.

A server chooses batches, class weights and the optimiser, so it can let a few rows make an update
though many are drawn. A row counts if it is drawn, and if its weight is at least a tenth of that of
the heaviest row. The weight of a row is its class weight, times what is left of its step at the end
of the round: weight decay, and a part that pulls towards the server's weights, forget earlier
steps. With a learning rate of 1 / decay only the last step is left. Where the pull is not known, or
a part chooses what a step trains, the last step alone is counted. Rows that a *model* ignores
cannot be counted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kedge.core.optim import SGD, Optimizer

LIGHT = 0.1  # rows of less than this share of the largest weight do not count


class Usage(NamedTuple):
    """What a round uses.

    Attributes:
        rows: distinct rows that count in the update.
        batch: rows that count in the batch that has fewest, ``rows`` at most.
        steps: batches.
    """

    rows: int
    batch: int
    steps: int


def usage_of(rows: Tensor, weights: Tensor, shares: Tensor) -> Usage:
    """The usage of a round.

    Args:
        rows: rows of the batches, ``[steps, batch]``.
        weights: weight of each of them in the loss, likewise.
        shares: what is left of each step in the update, ``[steps]``.

    >>> rows = torch.tensor([[0, 1], [1, 1]])
    >>> usage_of(rows, torch.ones(2, 2), torch.ones(2))
    Usage(rows=2, batch=2, steps=2)
    >>> usage_of(rows, torch.ones(2, 2), torch.tensor([0.0, 1.0]))
    Usage(rows=1, batch=1, steps=2)
    """
    left = weights * shares[:, None]
    count = len(rows[_counts(left, left.amax())].unique())
    batches = _counts(weights, weights.amax(1, keepdim=True)).sum(1)
    return Usage(count, min(count, int(batches.min())), len(rows))


def _counts(weights: Tensor, largest: Tensor) -> Tensor:
    return (weights >= LIGHT * largest) & (weights > 0)


def remaining(optim: Optimizer, lr: float, pull: float | None, steps: int) -> Tensor:
    """What is left of the gradient of each step in the update of a round, ``[steps]``.

    Args:
        optim: the local optimiser.
        lr: the learning rate.
        pull: the mu of a pull mu (w - anchor), see :meth:`kedge.core.part.Part.anchor_pull`; None
            if it is not known.
        steps: number of steps.

    >>> remaining(SGD(weight_decay=5.0), 0.1, 0.0, 3)
    tensor([0.2500, 0.5000, 1.0000], dtype=torch.float64)
    """
    decay = getattr(optim, "weight_decay", 0.0)
    if pull == 0 and decay == 0:
        return torch.ones(steps, dtype=torch.float64)
    if pull is None or not isinstance(optim, SGD):  # the last step is left, whatever is forgotten
        return (torch.arange(1, steps + 1) == steps).double()
    impulse, done, velocity = list[float](), 0.0, 0.0  # the effect of one gradient, step by step
    for t in range(steps):
        gradient = float(t == 0) - lr * (decay + pull) * done
        velocity = optim.momentum * velocity + gradient
        done += gradient + optim.momentum * velocity if optim.nesterov else velocity
        impulse.append(abs(done))
    return torch.tensor(impulse[::-1], dtype=torch.float64)
