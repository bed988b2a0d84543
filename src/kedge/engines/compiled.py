"""Steps fused by torch's compiler.

``make_fx`` writes down what a mapped step does to plain tensors, with ``vmap`` and ``grad`` already
resolved, and inductor turns that into few kernels. Whatever the step reads besides its arguments
(the dataset, say) becomes an argument of the compiled function, so nothing is copied into it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from kedge.core import tree
from kedge.engines import torch_private
from kedge.engines.conv_backward import fix_layouts

HERE = object()  # a place for a tensor
LARGEST = 5000  # operations of a function that is compiled; more would take too long


def compiled(function: Callable[..., Any], *examples: Any) -> Callable[..., Any]:
    """The same function of trees of the same shapes, compiled; it must be pure.

    A very long one is returned as it is, and so is any where torch's compiler is not found.
    """
    if not torch_private.can_compile():
        warnings.warn("steps run uncompiled: this torch has no compiler that fits", stacklevel=2)
        return function
    structure: list[Any] = []

    def flat(*leaves: Tensor) -> list[Tensor]:
        given = iter(leaves)
        result = function(*(_filled(e, given) for e in examples))
        structure[:] = [tree.map(lambda x: HERE if isinstance(x, Tensor) else x, result)]
        return [x for x in tree.leaves(result) if isinstance(x, Tensor)]

    leaves = [_dense(x.detach()) for x in tree.leaves(examples)]
    strides = [x.stride() for x in leaves]
    graph = torch_private.trace(flat, *leaves)
    _write_out_numbers(graph, leaves[0].device)
    fix_layouts(graph)
    graph.graph = torch_private.without_repeats(graph.graph)
    if len(graph.graph.nodes) > LARGEST:
        return function
    constants = _lifted(graph)
    try:
        run = torch_private.inductor(graph, [*leaves, *constants])
    except Exception as error:  # noqa: BLE001  (whatever it stumbles over, the function is fine)
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        warnings.warn(f"steps could not be compiled and run as they are: {first}", stacklevel=2)
        return function

    def call(*arguments: Any) -> Any:
        given = zip(tree.leaves(arguments), strides, strict=True)
        found = run(*(_laid(x.detach(), s) for x, s in given), *constants)
        return _filled(structure[0], iter(found))

    return call


def _dense(x: Tensor) -> Tensor:
    """As it is, or a copy where several elements share a place (what ``expand`` gives)."""
    return x.contiguous() if 0 in x.stride() and x.numel() > 1 else x


def _laid(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """With the strides that the function was compiled for: as it is, a view if only strides along
    sizes of 1 differ, which place no element, else a copy."""
    own = x.stride()
    if own == strides:
        return x
    if all(a == b or n == 1 for a, b, n in zip(own, strides, x.shape, strict=True)):
        return x.as_strided(x.shape, strides)
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _filled(shape: Any, leaves: Iterator[Tensor]) -> Any:
    """Tensors in their places; numbers stay."""
    return tree.map(lambda x: next(leaves) if x is HERE or isinstance(x, Tensor) else x, shape)


def _write_out_numbers(graph: fx.GraphModule, device: torch.device) -> None:
    """Whole numbers that ``vmap`` made tensors of, as such: the compiler would take them through
    float32, which cannot hold those of the random generator."""
    for node in graph.graph.nodes:
        is_copy = node.op == "call_function" and node.target is torch.ops.aten._to_copy.default
        if is_copy and isinstance(node.args[0], (int, float)):
            node.target = torch.ops.aten.full.default
            kind = {"dtype": node.kwargs.get("dtype"), "device": device}
            node.args, node.kwargs = ([], node.args[0]), kind


def _lifted(graph: fx.GraphModule) -> list[Tensor]:
    """Make tensors that the graph holds its last arguments; returns them."""
    last = [n for n in graph.graph.nodes if n.op == "placeholder"][-1]
    found: dict[str, fx.Node] = {}
    constants = []
    for node in list(graph.graph.nodes):
        if node.op != "get_attr":
            continue
        name = str(node.target)
        if name not in found:
            value = getattr(graph, name)
            if not isinstance(value, Tensor) or (value.ndim == 0 and not value.is_cuda):
                continue
            with graph.graph.inserting_after(last):
                last = found[name] = graph.graph.placeholder(f"held_{len(found)}")
                last.meta = dict(node.meta)
            constants.append(value)
        node.replace_all_uses_with(found[name])
        graph.graph.erase_node(node)
    graph.graph.lint()
    graph.recompile()
    return constants
