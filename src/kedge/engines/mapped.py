"""``vmap`` and ``grad`` of functions of trees.

Those of ``torch.func`` take every tree apart and put it together by general rules, and record the
backward pass to be differentiated again, which is half the time of a small step. kedge's trees are
nothing but tensors, dicts and named tuples, and a step differentiates once; so it goes by the
functions that ``torch.func`` is made of.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as layers

from kedge.core import tree
from kedge.core.tree import Params, Tree


def over_clients(fn: Callable[..., Tree], *dims: Any) -> Callable[..., Tree]:
    """``fn`` for all clients at once.

    Each of its arguments has the clients along a first axis (0), or is common to them (None), or,
    if it is a named tuple, has one of the two for every field.
    """

    def every(*trees: Tree) -> Tree:
        _load_rules()
        count = next(n for pair in zip(trees, dims, strict=True) for n in _counts(*pair))
        level = layers._vmap_increment_nesting(count, "error")
        try:
            pairs = zip(trees, dims, strict=True)
            found = fn(*(_batched(value, dim, level) for value, dim in pairs))
            return tree.map(lambda x: layers._remove_batch_dim(x, level, count, 0), found)
        finally:
            layers._vmap_decrement_nesting()

    return every


@cache
def _load_rules() -> None:
    """Those by which operators are mapped that have no other come with the first public call."""
    torch.func.vmap(torch.neg)(torch.zeros(1))


def _counts(value: Tree, dim: Any) -> Any:
    """The number of clients, as every leaf that has them tells it."""
    if isinstance(dim, tuple):
        for field, own in zip(value, dim, strict=True):
            yield from _counts(field, own)
    elif dim == 0:
        yield from (len(x) for x in tree.leaves(value))


def _batched(value: Tree, dim: Any, level: int) -> Tree:
    if isinstance(dim, tuple):
        fields = zip(value, dim, strict=True)
        return type(value)(*(_batched(field, own, level) for field, own in fields))
    return value if dim is None else tree.map(lambda x: layers._add_batch_dim(x, 0, level), value)


def gradient(fn: Callable[[Params], tuple[Tensor, Tree]], params: Params) -> tuple[Params, Tree]:
    """Gradient of ``fn``, which works under ``vmap``, and what else it returns.

    It can be differentiated where that is asked for, and on a GPU, where steps are recorded once
    and some operators can only then be mapped.
    """
    again = any(i.key() == layers.TransformType.Grad for i in layers.get_interpreter_stack() or ())
    level = layers._grad_increment_nesting()
    try:
        with torch.enable_grad(), without_hooks():
            leaves = {n: _leaf(p, level) for n, p in params.items()}
            value, rest = fn(leaves)
            found = torch.autograd.grad(
                value,
                list(leaves.values()),
                create_graph=again or value.is_cuda,
                allow_unused=True,
            )
        out = partial(_unwrapped, level)
        grads = {
            n: out(torch.zeros_like(leaves[n]) if g is None else g)
            for n, g in zip(params, found, strict=True)
        }
        return grads, tree.map(out, rest)
    finally:
        layers._grad_decrement_nesting()


def without_hooks() -> AbstractContextManager[None]:
    """Refuses what would compute a part of the pass again later: by then the weights of another
    client may be in the model."""
    return torch.autograd.graph.disable_saved_tensors_hooks(
        "the model uses hooks on saved tensors, such as torch.utils.checkpoint; leave them out: a "
        "client's pass is not there any more when they want to repeat it"
    )


def _leaf(x: Tensor, level: int) -> Tensor:
    before = layers.get_inplace_requires_grad_allowed()
    layers.set_inplace_requires_grad_allowed(True)
    try:
        return layers._wrap_for_grad(x, level).requires_grad_()
    finally:
        layers.set_inplace_requires_grad_allowed(before)


def _unwrapped(level: int, x: Tensor) -> Tensor:
    return layers._unwrap_for_grad(x, level)


def transforms_active() -> bool:
    """Whether this is inside ``vmap`` or a mapped gradient, where tensors have no layout."""
    return torch._C._are_functorch_transforms_active()
