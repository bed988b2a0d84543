"""The arithmetic that a client round leaves to its engine, and its reference in plain PyTorch.

A round says *what* is computed; an :class:`Ops` says *how* a gradient is taken, how parameters are
moved, and how replies are reduced. Engines bring their own. :data:`REFERENCE` is the definition
that each of them must agree with.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.tree import Params, Tree

Objective = Callable[[Params], tuple[Tensor, Tree]]  # parameters -> (scalar, what else is wanted)
Axpy = Callable[[Tensor | float, Params, Params], Params]


class Ops(NamedTuple):
    """How an engine computes what a round asks for."""

    #: Gradient of an objective, and what else the objective returns, detached.
    gradient: Callable[[Objective, Params], tuple[Params, Tree]]
    #: ``factor * a + b``, leaf by leaf.
    axpy: Axpy
    #: The same for the new parameters; an engine may write them over ``b``.
    move: Axpy
    #: ``sum_k w_k x_k`` of ``x`` ``[K, ...]`` and ``w`` ``[K]``.
    weighted_sum: Callable[[Tensor, Tensor], Tensor]
    #: Squared norm of each client's update, ``[K]``, from leaves ``[K, ...]`` and ``w`` ``[K]``.
    sq_norms: Callable[[Params, Tensor], Tensor]


def gradient(objective: Objective, params: Params) -> tuple[Params, Tree]:
    """By plain autograd."""
    leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
    with torch.enable_grad(), no_saved_tensor_hooks():
        value, aux = objective(leaves)
        flat = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    grads = {
        n: torch.zeros_like(params[n]) if g is None else g
        for n, g in zip(leaves, flat, strict=True)
    }
    return grads, tree.detach(aux)


def no_saved_tensor_hooks() -> AbstractContextManager[None]:
    """Reject hooks that recompute a part of the pass later: by then the model may hold the weights
    of another client."""
    return torch.autograd.graph.disable_saved_tensors_hooks(
        "the model uses hooks on saved tensors, such as torch.utils.checkpoint; leave them out: a "
        "client's pass is not there any more when they want to repeat it"
    )


def axpy(factor: Tensor | float, a: Params, b: Params) -> Params:
    """``factor * a + b``; every leaf keeps the memory format that it has in ``b``."""
    return tree.map(lambda x, y: y + factor * x, a, b)


def weighted_sum(x: Tensor, w: Tensor) -> Tensor:
    """Sum over clients, weighted; whole numbers are summed as floats."""
    if not x.is_floating_point():
        x = x.to(w.dtype)
    if len(x) == 1:  # the same number, in a fifth of the time
        return x[0] * w[0].to(x.dtype)
    return (x * w.reshape(-1, *(1,) * (x.ndim - 1)).to(x.dtype)).sum(0)


def sq_norms(stacked: Params, w: Tensor) -> Tensor:
    """Squared norm of each client's update, ``[K]``."""
    norms = ((x * x).reshape(len(x), -1).sum(1) for x in stacked.values())
    return sum(norms, start=torch.zeros_like(w))


REFERENCE = Ops(gradient, axpy, axpy, weighted_sum, sq_norms)
