"""Arithmetic on trees: a tree is a tensor, a dict of trees, or a named tuple of trees.

Parameters, buffers, a part's state and messages are trees. ``map`` takes its structure from the
first tree; the others may have more keys than the first, never fewer, so ``map(f, public, all)``
works on the public leaves alone. Dicts are visited in the first tree's order. The empty tree is
``{}``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

Tree: TypeAlias = Any  # Tensor | dict[str, Tree] | NamedTuple of Trees
Params: TypeAlias = dict[str, Tensor]
Index: TypeAlias = int | slice | list[int] | Tensor  # of rows
T = TypeVar("T")

SEPARATOR = "|"  # between the keys in the name of a leaf


class Weights(NamedTuple):
    """The weights of a model: trainable parameters, and buffers, by name."""

    params: Params  # what an optimiser changes
    buffers: Params  # such as the running statistics of BatchNorm


# The name follows the papers' notation for "apply to each leaf"; builtins.map is not used here.
def map(fn: Callable[..., Tree], first: Tree, *rest: Tree) -> Tree:
    """Apply ``fn`` leaf by leaf.

    >>> map(lambda a, b: a + b, {"w": 1.0}, {"w": 2.0, "only here": 3.0})
    {'w': 3.0}
    """
    if isinstance(first, dict):
        return {k: map(fn, v, *(r[k] for r in rest)) for k, v in first.items()}
    if isinstance(first, tuple):
        items = [map(fn, v, *(r[i] for r in rest)) for i, v in enumerate(first)]
        return type(first)(*items) if items else first
    return fn(first, *rest)


def leaves(tree: Tree) -> Iterator[Tensor]:
    """All leaves, in order."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, tuple):
        for value in tree:
            yield from leaves(value)
    else:
        yield tree


def zeros_like(a: Tree) -> Tree:
    return map(torch.zeros_like, a)


def add(a: Tree, b: Tree) -> Tree:
    return map(torch.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    return map(torch.sub, a, b)


def scale(a: Tree, factor: Tensor | float) -> Tree:
    return map(lambda x: x * factor, a)


def axpy(factor: Tensor | float, a: Tree, b: Tree) -> Tree:
    """``factor * a + b``."""
    return map(lambda x, y: factor * x + y, a, b)


def detach(a: Tree) -> Tree:
    return map(lambda x: x.detach(), a)


def dot(a: Tree, b: Tree) -> Tensor:
    """Inner product over all leaves of ``a``."""
    return _total(map(lambda x, y: (x * y).sum(), a, b))


def sq_norm(a: Tree) -> Tensor:
    return _total(map(lambda x: (x * x).sum(), a))


def sq_dist(a: Tree, b: Tree) -> Tensor:
    """The squared distance of two trees of the same structure, over all leaves."""
    return _total(map(lambda x, y: ((x - y) ** 2).sum(), a, b))


def _total(tree: Tree) -> Tensor:
    parts = list(leaves(tree))
    if not parts:
        return torch.zeros(())
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def numel(tree: Tree) -> int:
    """Number of elements in all leaves."""
    return sum(x.numel() for x in leaves(tree))


def nbytes(tree: Tree) -> int:
    return sum(x.numel() * x.element_size() for x in leaves(tree))


def stack(trees: list[Tree]) -> Tree:
    """``[tree, ...]`` to one tree with a leading client axis."""
    return map(lambda *xs: torch.stack(xs), *trees)


def concat(trees: list[Tree]) -> Tree:
    return trees[0] if len(trees) == 1 else map(lambda *xs: torch.cat(xs), *trees)


def take(tree: Tree, index: Index) -> Tree:
    """Rows (or one row) of every leaf."""
    return map(lambda x: x[index], tree)


def under(tree: dict[str, T], prefix: str) -> dict[str, T]:
    """The entries ``prefix/name`` as ``name``."""
    start = prefix + "/"
    return {k[len(start) :]: v for k, v in tree.items() if k.startswith(start)}


def is_finite(a: Tree) -> bool:
    """Whether all numbers are finite; whole numbers are.

    >>> is_finite({"w": torch.ones(2)}), is_finite({"w": torch.tensor([1.0, -torch.inf])})
    (True, False)
    """
    # a finite sum has finite summands, and needs no temporary arrays; finite ones may overflow
    return all(bool(x.sum().isfinite()) or bool(x.isfinite().all()) for x in leaves(a))


def equal(a: Tree, b: Tree) -> bool:
    """Same structure and equal leaves, bit for bit but for the sign of zero (NaN equals NaN)."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def gap(a: Tree, b: Tree) -> float:
    """Largest difference between two trees, relative to the largest value where that is above 1.

    Infinite where shapes differ, or where one is not finite and the other something else.
    """
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return math.inf
        return max((gap(a[k], b[k]) for k in a), default=0.0)
    if isinstance(a, tuple):
        return max((gap(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    if a.shape != b.shape:
        return math.inf
    x, y = a.detach().double(), b.detach().double()
    finite = x.isfinite() & y.isfinite()
    if not bool((finite | (x == y) | (x.isnan() & y.isnan())).all()):
        return math.inf
    x, y = x[finite], y[finite]
    return float((x - y).abs().max()) / max(1.0, float(y.abs().max())) if len(x) else 0.0


def to_wire(tree: Tree, prefix: str = "") -> dict[str, Tensor]:
    """Flatten a tree to a dict of named tensors, for safetensors or a Flower record."""
    if isinstance(tree, Weights):
        tree = {"params": tree.params, "buffers": tree.buffers}
    if not isinstance(tree, dict):
        if not isinstance(tree, Tensor):
            raise TypeError(
                f"{prefix or 'the tree'} holds a {type(tree).__name__}; only tensors "
                "and dicts of tensors can cross the wire"
            )
        return {prefix: tree}
    flat: dict[str, Tensor] = {}
    for key, value in tree.items():
        flat |= to_wire(value, _path(prefix, key))
    return flat


def from_wire(flat: dict[str, Tensor], like: Tree, prefix: str = "") -> Tree:
    """The inverse of :func:`to_wire`: named tensors in the structure of ``like``."""
    if isinstance(like, Weights):
        both = from_wire(flat, {"params": like.params, "buffers": like.buffers}, prefix)
        return Weights(both["params"], both["buffers"])
    if isinstance(like, dict):
        return {key: from_wire(flat, value, _path(prefix, key)) for key, value in like.items()}
    return flat[prefix]


def escaped(key: str) -> str:
    """A key without the separator, so that the names of two leaves are never equal."""
    return key.replace("%", "%25").replace(SEPARATOR, "%7C")


def _path(prefix: str, key: str) -> str:
    return f"{prefix}{SEPARATOR}{escaped(key)}" if prefix else escaped(key)
