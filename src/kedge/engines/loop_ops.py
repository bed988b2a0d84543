"""The arithmetic of one client at a time on a CPU, where small steps are bound by Python."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.bound import Bound
from kedge.core.ops import Objective
from kedge.core.tree import Params, Tree, Weights
from kedge.core.update import Stacked, Summed, Totals, Update, total
from kedge.engines.ops import FOREACH, IN_PLACE, MAX_DOT_ELEMENTS
from kedge.engines.torch_private import gradients


def gradient(objective: Objective, params: Params) -> tuple[Params, Tree]:
    """:func:`kedge.core.ops.gradient`. The caller rejects hooks on saved tensors, once for all
    steps of a client."""
    leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
    with torch.enable_grad():
        value, aux = objective(leaves)
        flat = gradients(value, tuple(leaves.values()))
    grads = {
        n: torch.zeros_like(params[n]) if g is None else g
        for n, g in zip(leaves, flat, strict=True)
    }
    return grads, tree.detach(aux)


#: The first step of a client, which reads the anchor.
FIRST_STEP = FOREACH._replace(gradient=gradient)
#: Later steps, if they may overwrite the parameters.
LATER_STEPS = IN_PLACE._replace(gradient=gradient)


def total_of_one(bound: Bound, update: Update, anchor: Weights) -> Totals:
    """:func:`kedge.core.update.total` of one client's update."""
    needed = any(bound.needs(what) for what in ("sum", "share_sum", "clients"))
    delta, weight = update.delta, update.weight
    if needed or update.uploads or update.contribution or weight.device.type != "cpu":
        return total(bound, tree.map(lambda x: x.unsqueeze(0), update), anchor, FOREACH)
    sq_norm = _sq_norm(delta.params, weight) * weight
    losses = {name: value.reshape(1) for name, value in update.losses.items()}
    summed = Summed(weight, tree.scale(delta, weight), sq_norm)
    return Totals({}, summed, Stacked(weight.reshape(1), losses), tree.nbytes(delta))


def _sq_norm(params: Params, like: Tensor) -> Tensor:
    """The squared norm of an update; the same sum as in :data:`~kedge.engines.ops.FOREACH`."""
    if any(x.numel() > MAX_DOT_ELEMENTS for x in params.values()):
        stacked = {name: x.unsqueeze(0) for name, x in params.items()}
        return FOREACH.sq_norms(stacked, like.reshape(1))[0]
    dots = (torch.dot(x, x) for x in map(_flat, params.values()))
    return functools.reduce(torch.add, dots) if params else torch.zeros_like(like)


def _flat(x: Tensor) -> Tensor:
    """All elements in the order of memory, so that there is no copy."""
    if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
        x = x.permute(0, 2, 3, 1)
    return x.reshape(-1)
