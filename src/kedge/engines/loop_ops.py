"""The arithmetic of one client at a time on a CPU, where small steps are bound by Python."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kedge.core import server, tree
from kedge.core.bound import Bound
from kedge.core.client import Reply
from kedge.core.ops import Objective
from kedge.core.server import Totals
from kedge.core.tree import Params, Tree, Weights
from kedge.engines.ops import FOREACH, IN_PLACE, MAX_DOT_ELEMENTS
from kedge.engines.torch_private import foreach_add_, gradients


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

#: Totals of a method that needs the mean of the updates only.
PLAIN_TOTALS = {
    "count", "weight", "weighted_delta", "sq_norm", "contribution", "uploads", "terms", "up_bytes",
}  # fmt: skip


def totals_of_one(bound: Bound, reply: Reply, anchor: Weights) -> Totals:
    """:func:`kedge.core.server.totals` of one client's reply."""
    needed = any(bound.needs(what) for what in ("sum", "share_sum", "clients"))
    if needed or reply.uploads or reply.contribution or reply.weight.device.type != "cpu":
        stacked = tree.map(lambda x: x.unsqueeze(0), reply)
        return server.totals(bound, stacked, anchor, FOREACH)
    delta, weight = reply.delta, reply.weight
    return {
        "count": 1,
        "weight": weight,
        "weighted_delta": tree.scale(delta, weight),
        "sq_norm": _sq_norm(delta.params, weight) * weight,
        "contribution": {},
        "uploads": {},
        "terms": {name: value.reshape(1) for name, value in reply.terms.items()},
        "up_bytes": tree.nbytes(delta),
    }


def add_totals(total: Totals, new: Totals) -> Totals:
    """:func:`kedge.core.server.add_totals` in place, with one operator for plain totals."""
    if total.keys() != PLAIN_TOTALS or total["uploads"] or total["contribution"]:
        return server.add_totals(total, new, True)
    foreach_add_(_summands(total), _summands(new))
    total["terms"] = {n: torch.cat((t, new["terms"][n])) for n, t in total["terms"].items()}
    for name in ("count", "up_bytes"):
        total[name] += new[name]
    return total


def _summands(totals: Totals) -> list[Tensor]:
    delta = totals["weighted_delta"]
    leaves = (*delta.params.values(), *delta.buffers.values())
    return [totals["weight"], totals["sq_norm"], *leaves]


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
