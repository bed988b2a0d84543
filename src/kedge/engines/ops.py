"""Fast ``Ops`` of the engines, in place of the reference of :mod:`kedge.core.ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from kedge.core import ops
from kedge.core.bound import Bound
from kedge.core.ops import Ops
from kedge.core.tree import Params
from kedge.engines.torch_private import foreach_add, foreach_add_, foreach_mul, gradient

MAX_DOT_ELEMENTS = 1 << 16  # of one dot product; longer ones lose precision
RETAINING_HOOKS = ("ascend", "trainable", "project", "observe")  # their parts may keep weights


def foreach_axpy(factor: Tensor | float, a: Params, b: Params) -> Params:
    """``factor * a + b`` for all leaves at once, on a CPU in one pass over memory. Does not work
    under ``vmap``."""
    first, second = [b[name] for name in a], list(a.values())
    if isinstance(factor, Tensor) and factor.device.type != "cpu":  # float() would synchronize
        new = foreach_add(first, foreach_mul(second, factor), 1.0)
    else:
        new = foreach_add(first, second, float(factor))
    return dict(zip(a, new, strict=True))


def axpy_in_place(factor: Tensor | float, a: Params, b: Params) -> Params:
    """``factor * a + b`` on a CPU, written to ``b``."""
    foreach_add_([b[name] for name in a], list(a.values()), float(factor))
    return b


def sq_norms_of_one(stacked: Params, w: Tensor) -> Tensor:
    """Squared norms of updates, ``[K]``; of one client on a CPU without a copy."""
    if len(w) > 1 or w.device.type != "cpu":
        return ops.sq_norms(stacked, w)
    return sum((_sq_norm(x) for x in stacked.values()), start=torch.zeros_like(w))


def _sq_norm(x: Tensor) -> Tensor:
    update = x[0]
    if update.ndim == 4 and update.is_contiguous(memory_format=torch.channels_last):
        update = update.permute(0, 2, 3, 1)
    pieces = update.reshape(-1).split(MAX_DOT_ELEMENTS)
    return torch.stack([torch.dot(piece, piece) for piece in pieces]).sum(0, keepdim=True)


#: Under ``vmap``.
MAPPED = ops.REFERENCE._replace(gradient=gradient)
#: One client at a time.
FOREACH = Ops(ops.gradient, foreach_axpy, foreach_axpy, ops.weighted_sum, sq_norms_of_one)
#: One client at a time on a CPU, overwriting the old parameters.
IN_PLACE = FOREACH._replace(move=axpy_in_place)


def may_overwrite(bound: Bound) -> bool:
    """Whether a step may overwrite the weights: only if no part may retain them."""
    return not any(bound.parts_with(hook) for hook in RETAINING_HOOKS)
