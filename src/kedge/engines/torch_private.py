"""The private interfaces of torch that kedge uses, each with a fallback to public ones.

``torch.func`` flattens trees by general rules and records the backward pass for a second
differentiation, which takes half the time of a small step. kedge's trees hold only tensors, dicts
and named tuples, and a step differentiates once. So :func:`over_clients` and :func:`gradient` call
the functions below ``torch.func``.

A release of torch that moves a private interface makes kedge slower, but does not break it.
``KEDGE_PUBLIC_TORCH=1`` forces the fallback; the tests use it. Those of its compiler are in
``torch_compiler.py``.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kedge.core import eager, tree
from kedge.core.ops import no_saved_tensor_hooks
from kedge.core.tree import Params, Tree


def _private(module: str, *names: str) -> Any:
    """A private module of torch; None if it is missing, or lacks one of the names."""
    if os.environ.get("KEDGE_PUBLIC_TORCH"):
        return None
    try:
        found = importlib.import_module(module)
    except ImportError:
        return None
    return found if all(hasattr(found, name) for name in names) else None


layers = _private(
    "torch._C._functorch",
    "_vmap_increment_nesting",
    "_vmap_decrement_nesting",
    "_add_batch_dim",
    "_remove_batch_dim",
    "_grad_increment_nesting",
    "_grad_decrement_nesting",
    "_wrap_for_grad",
    "_unwrap_for_grad",
    "get_interpreter_stack",
    "get_inplace_requires_grad_allowed",
    "set_inplace_requires_grad_allowed",
    "TransformType",
)
_core = _private("torch._C", "_are_functorch_transforms_active", "_len_torch_dispatch_stack")


# -- maps ---------------------------------------------------------------------------------------


def over_clients(fn: Callable[..., Tree], *dims: Any) -> Callable[..., Tree]:
    """Map ``fn`` over clients, as ``torch.func.vmap`` does.

    Args:
        fn: of trees, returns a tree.
        dims: for each argument 0, if it is stacked along a first axis, or None, if clients share
            it; for a named tuple, also a named tuple with 0 or None for every field.

    Returns:
        A function whose result is stacked along a first axis.

    >>> over_clients(lambda x, y: x + y, 0, None)(torch.ones(3), torch.ones(()))
    tensor([2., 2., 2.])
    """
    if layers is None:
        return _counted(torch.func.vmap(fn, in_dims=dims))

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
    """Load the vmap rules that torch registers on the first public call."""
    torch.func.vmap(torch.neg)(torch.zeros(1))


def _counts(value: Tree, dim: Any) -> Any:
    """The number of clients, from every stacked leaf."""
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


# -- gradients under vmap -----------------------------------------------------------------------


def gradient(fn: Callable[[Params], tuple[Tensor, Tree]], params: Params) -> tuple[Params, Tree]:
    """Gradient of a function under ``vmap``.

    The gradient itself can be differentiated inside another gradient, and on a GPU, where some
    operators have a vmap rule only then.

    Args:
        fn: ``fn(params)`` returns a scalar and a tree.
        params: the point.

    Returns:
        The gradient of the scalar, zero for unused parameters, and the tree.
    """
    if layers is None:
        with no_saved_tensor_hooks():
            return _counted(torch.func.grad(fn, has_aux=True))(params)
    is_nested = any(
        i.key() == layers.TransformType.Grad for i in layers.get_interpreter_stack() or ()
    )
    level = layers._grad_increment_nesting()
    try:
        with torch.enable_grad(), no_saved_tensor_hooks():
            leaves = {n: _leaf(p, level) for n, p in params.items()}
            value, rest = fn(leaves)
            found = torch.autograd.grad(
                value,
                list(leaves.values()),
                create_graph=is_nested or value.is_cuda,
                allow_unused=True,
            )

        def out(x: Tensor) -> Tensor:
            return layers._unwrap_for_grad(x, level)

        grads = {
            n: out(torch.zeros_like(leaves[n]) if g is None else g)
            for n, g in zip(params, found, strict=True)
        }
        return grads, tree.map(out, rest)
    finally:
        layers._grad_decrement_nesting()


def _leaf(x: Tensor, level: int) -> Tensor:
    before = layers.get_inplace_requires_grad_allowed()
    layers.set_inplace_requires_grad_allowed(True)
    try:
        return layers._wrap_for_grad(x, level).requires_grad_()
    finally:
        layers.set_inplace_requires_grad_allowed(before)


# -- gradients of one client --------------------------------------------------------------------

_autograd = _private("torch.autograd.variable", "Variable")


def gradients(value: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Gradients of a scalar on a CPU; None for a leaf that it does not depend on.

    ``torch.autograd.grad`` checks its arguments in Python, which takes as long as the backward pass
    of a linear layer.
    """
    if _autograd is None:
        return torch.autograd.grad(value, leaves, allow_unused=True)
    engine, one = _autograd.Variable._execution_engine, torch.ones_like(value)
    keep, differentiable, unreachable, accumulate = False, False, True, False
    return engine.run_backward(
        (value,), (one,), keep, differentiable, tuple(leaves), unreachable, accumulate
    )


# -- active transforms --------------------------------------------------------------------------


class _Depth(threading.local):
    """The number of kedge's own transforms around this thread, for the fallback."""

    transforms = 0


_depth = _Depth()


def _counted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Count a public transform as active while it runs."""

    def call(*args: Any) -> Any:
        _depth.transforms += 1
        try:
            return fn(*args)
        finally:
            _depth.transforms -= 1

    return call


def transforms_active() -> bool:
    """Whether the caller is inside ``vmap`` or a mapped gradient, where tensors have no memory
    format. The fallback knows the transforms of kedge's engines only."""
    if _core is None:
        return _depth.transforms > 0
    return _core._are_functorch_transforms_active()


def _is_eager(x: Tensor) -> bool:
    return not _core._are_functorch_transforms_active() and not _core._len_torch_dispatch_stack()


if _core is not None:
    eager.set_predicate(_is_eager)


# -- lists of tensors ----------------------------------------------------------------------------

_lists = _private(
    "torch", "_foreach_add", "_foreach_add_", "_foreach_mul", "_foreach_div", "_foreach_sqrt"
)
_copies = _private("torch", "_foreach_copy_")
Tensors = Sequence[Tensor]


def foreach_add(a: Tensors, b: Tensors, alpha: float = 1) -> Tensors:
    """``a + alpha * b`` for lists of tensors."""
    if _lists is None:
        return [torch.add(x, y, alpha=alpha) for x, y in zip(a, b, strict=True)]
    return _lists._foreach_add(a, b, alpha=alpha)


def foreach_add_(a: Tensors, b: Tensors, alpha: float = 1) -> None:
    """``a += alpha * b`` for lists of tensors."""
    if _lists is None:
        for x, y in zip(a, b, strict=True):
            x.add_(y, alpha=alpha)
    else:
        _lists._foreach_add_(a, b, alpha=alpha)


def foreach_mul(a: Tensors, factor: Tensor | float) -> Tensors:
    """Every tensor times a scalar, which may be on the device."""
    return [x * factor for x in a] if _lists is None else _lists._foreach_mul(a, factor)


def foreach_square(a: Tensors) -> Tensors:
    return [x * x for x in a] if _lists is None else _lists._foreach_mul(a, a)


def foreach_ratio(a: Tensors, b: Tensors, scale: Tensor, eps: float) -> Tensors:
    """``a / (sqrt(b) * scale + eps)`` for lists of tensors and a scalar on the device."""
    if _lists is None:
        return [x / (torch.sqrt(y) * scale + eps) for x, y in zip(a, b, strict=True)]
    below = _lists._foreach_add(foreach_mul(_lists._foreach_sqrt(b), scale), eps)
    return _lists._foreach_div(a, below)


def foreach_copy_(a: Tensors, b: Tensors) -> None:
    """``a[i].copy_(b[i])`` for lists of tensors; on a GPU those of equal layout in few kernels."""
    alike: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for x, y in zip(a, b, strict=True):
        same = x.dtype == y.dtype and x.device == y.device and x.stride() == y.stride()
        if _copies is not None and x.is_cuda and same:
            alike.setdefault(x.dtype, []).append((x, y))
        else:
            x.copy_(y)
    for pairs in alike.values():
        _copies._foreach_copy_([x for x, _ in pairs], [y for _, y in pairs])


# -- memory -------------------------------------------------------------------------------------


@contextmanager
def watching_operators(watch: Callable[[str, Any, Any], None]) -> Iterator[bool]:
    """Call ``watch(name, inputs, outputs)`` for every operator, with a name such as ``aten::mm``;
    yields whether torch supports it."""
    module = _private("torch.utils._python_dispatch", "TorchDispatchMode")
    if module is None:
        yield False
        return

    class OperatorMode(module.TorchDispatchMode):  # type: ignore[name-defined]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # True would import torch's compiler, which takes seconds

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            watch(func.name(), (args, kwargs), out)
            return out

    with OperatorMode():
        yield True
