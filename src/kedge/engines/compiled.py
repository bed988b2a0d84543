"""Steps fused by torch's compiler.

``make_fx`` traces a mapped step to a graph of plain tensors, with ``vmap`` and ``grad`` resolved,
and inductor fuses the graph into few kernels. Tensors that the step closes over (the dataset, for
instance) become arguments of the compiled function, so they are not copied.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from kedge.core import tree
from kedge.engines import torch_compiler
from kedge.engines.conv_backward import fix_layouts
from kedge.engines.counters import group_counters

PLACEHOLDER = object()  # stands for a tensor
MAX_NODES = 5000  # of a graph; larger ones take too long to compile


def compile_function(function: Callable[..., Any], *examples: Any) -> Callable[..., Any]:
    """Compile a pure function of trees of tensors.

    The function itself is returned if its graph has more than ``MAX_NODES`` nodes, or, with a
    warning, if torch's compiler is missing or fails.

    Args:
        function: of trees; its result is a tree of tensors and constants.
        examples: trees of the shapes, dtypes and devices of later arguments.
    """
    if not torch_compiler.can_compile():
        warnings.warn(
            "steps run eagerly: this version of torch has no supported compiler", stacklevel=2
        )
        return function
    structure: list[Any] = []

    def flat(*leaves: Tensor) -> list[Tensor]:
        remaining = iter(leaves)
        result = function(*(_fill(e, remaining) for e in examples))
        structure[:] = [tree.map(lambda x: PLACEHOLDER if isinstance(x, Tensor) else x, result)]
        return [x for x in tree.leaves(result) if isinstance(x, Tensor)]

    leaves = [_dense(x.detach()) for x in tree.leaves(examples)]
    strides = [x.stride() for x in leaves]
    graph = torch_compiler.trace(flat, *leaves)
    _inline_constants(graph, leaves[0].device)
    fix_layouts(graph)
    graph.graph = torch_compiler.eliminate_common_subexpressions(graph.graph)
    group_counters(graph.graph)
    if len(graph.graph.nodes) > MAX_NODES:
        return function
    constants = _lift_constants(graph)
    try:
        run = torch_compiler.inductor(graph, [*leaves, *constants])
    except Exception as error:  # noqa: BLE001  (the function itself still works)
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        warnings.warn(f"steps could not be compiled and run eagerly: {first}", stacklevel=2)
        return function

    def call(*arguments: Any) -> Any:
        pairs = zip(tree.leaves(arguments), strides, strict=True)
        results = run(*(_with_strides(x.detach(), s) for x, s in pairs), *constants)
        return _fill(structure[0], iter(results))

    return call


def _dense(x: Tensor) -> Tensor:
    """The tensor, or a contiguous copy if it is expanded (elements share memory)."""
    return x.contiguous() if 0 in x.stride() and x.numel() > 1 else x


def _with_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A tensor with the strides of the compiled function: a view if only strides of dimensions of
    size 1 differ, which do not matter, else a copy."""
    current = x.stride()
    if current == strides:
        return x
    if all(a == b or n == 1 for a, b, n in zip(current, strides, x.shape, strict=True)):
        return x.as_strided(x.shape, strides)
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _fill(structure: Any, leaves: Iterator[Tensor]) -> Any:
    """A tree with its placeholders and tensors replaced by ``leaves``; constants stay."""
    return tree.map(
        lambda x: next(leaves) if x is PLACEHOLDER or isinstance(x, Tensor) else x, structure
    )


def _inline_constants(graph: fx.GraphModule, device: torch.device) -> None:
    """Inline integer constants that ``vmap`` turned into tensors. The compiler would convert them
    to float32, which cannot represent those of the random number generator."""
    for node in graph.graph.nodes:
        is_copy = node.op == "call_function" and node.target is torch.ops.aten._to_copy.default
        if is_copy and isinstance(node.args[0], (int, float)):
            node.target = torch.ops.aten.full.default
            options = {"dtype": node.kwargs.get("dtype"), "device": device}
            node.args, node.kwargs = ([], node.args[0]), options


def _lift_constants(graph: fx.GraphModule) -> list[Tensor]:
    """Turn the tensors that a graph holds into its last arguments, and return them."""
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
                last = found[name] = graph.graph.placeholder(f"constant_{len(found)}")
                last.meta = dict(node.meta)
            constants.append(value)
        node.replace_all_uses_with(found[name])
        graph.graph.erase_node(node)
    graph.graph.lint()
    graph.recompile()
    return constants
