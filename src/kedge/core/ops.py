"""The arithmetic of a round that engines may replace, and its reference in plain PyTorch.

An :class:`Ops` computes gradients, updates parameters and reduces replies. Each engine has its own.
:data:`REFERENCE` is the definition that all of them must match.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.tree import Params, Tree

Objective = Callable[[Params], tuple[Tensor, Tree]]  # parameters -> (scalar, auxiliary results)
Axpy = Callable[[Tensor | float, Params, Params], Params]


class Ops(NamedTuple):
    """An engine's implementation of the arithmetic of a round."""

    #: Gradient of an objective, and its auxiliary results, detached.
    gradient: Callable[[Objective, Params], tuple[Params, Tree]]
    #: ``factor * a + b``, leaf by leaf.
    axpy: Axpy
    #: ``axpy`` for the new parameters; an engine may overwrite ``b``.
    move: Axpy
    #: ``sum_k w_k x_k`` of ``x`` ``[K, ...]`` and ``w`` ``[K]``.
    weighted_sum: Callable[[Tensor, Tensor], Tensor]
    #: Squared norm of each client's update, ``[K]``, from leaves ``[K, ...]`` and ``w`` ``[K]``.
    sq_norms: Callable[[Params, Tensor], Tensor]


def gradient(objective: Objective, params: Params) -> tuple[Params, Tree]:
    """Gradient and detached auxiliary results of an objective, by autograd."""
    with no_saved_tensor_hooks():
        return gradient_by(partial(torch.autograd.grad, allow_unused=True), objective, params)


def gradient_by(
    differentiate: Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor | None]],
    objective: Objective,
    params: Params,
) -> tuple[Params, Tree]:
    """:func:`gradient`, by a function from a scalar and leaves to the gradients of the leaves."""
    leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
    with torch.enable_grad():
        value, aux = objective(leaves)
        flat = differentiate(value, tuple(leaves.values()))
    grads = {
        n: torch.zeros_like(params[n]) if g is None else g
        for n, g in zip(leaves, flat, strict=True)
    }
    return grads, tree.detach(aux)


def no_saved_tensor_hooks() -> AbstractContextManager[None]:
    """Reject hooks on saved tensors, which recompute parts of a pass later: by then the module may
    contain the weights of another client."""
    return torch.autograd.graph.disable_saved_tensors_hooks(
        "the model uses hooks on saved tensors, such as torch.utils.checkpoint; remove "
        "them: a client's weights are no longer in the module when they recompute its pass"
    )


def axpy(factor: Tensor | float, a: Params, b: Params) -> Params:
    """``factor * a + b``; each leaf has the memory format of ``b``."""
    return tree.map(lambda x, y: y + factor * x, a, b)


def weighted_sum(x: Tensor, w: Tensor) -> Tensor:
    """Weighted sum over clients, ``x`` ``[K, ...]``, ``w`` ``[K]``; integers become floats."""
    if not x.is_floating_point():
        x = x.to(w.dtype)
    if len(x) == 1:  # fast path with the same result
        return x[0] * w[0].to(x.dtype)
    return (x * w.reshape(-1, *(1,) * (x.ndim - 1)).to(x.dtype)).sum(0)


def sq_norms(stacked: Params, w: Tensor) -> Tensor:
    """Squared norm of each client's update, ``[K]``."""
    norms = ((x * x).reshape(len(x), -1).sum(1) for x in stacked.values())
    return sum(norms, start=torch.zeros_like(w))


REFERENCE = Ops(gradient, axpy, axpy, weighted_sum, sq_norms)
