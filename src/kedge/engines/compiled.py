"""Steps fused by torch's compiler.

``make_fx`` traces a mapped step to a graph of plain tensors, with ``vmap`` and ``grad`` resolved,
and inductor fuses the graph into few kernels. Tensors that the step closes over (the dataset, for
instance) become arguments of the compiled function, so they are not copied.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from kedge.core import tree
from kedge.engines import torch_compiler
from kedge.engines.torch_compiler import is_mutable

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


# -- Counters of BatchNorm layers in a traced graph, increased by one operation --------------------


def group_counters(graph: fx.Graph) -> None:
    """Replace the additions of one to integers by one operation on a list, which is one kernel.

    A network has a number ``num_batches_tracked`` for every BatchNorm layer, which a compiler would
    increase in a kernel each.
    """
    nodes = list(graph.nodes)
    if any(map(is_mutable, nodes)):
        return
    order = {node: i for i, node in enumerate(nodes)}
    found = [node for node in nodes if _counts(node)]
    found = [node for node in found if order[node.args[0]] < order[found[0]]]
    if len(found) < 2:
        return
    with graph.inserting_before(found[0]):
        sums = graph.call_function(
            torch.ops.aten._foreach_add.Scalar, ([node.args[0] for node in found], 1)
        )
        items = [graph.call_function(operator.getitem, (sums, i)) for i in range(len(found))]
    for node, item in zip(found, items, strict=True):
        item.meta = dict(node.meta)
        node.replace_all_uses_with(item)
        graph.erase_node(node)


def _counts(node: Any) -> bool:
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    value, one = node.args
    is_one = isinstance(one, int) and one == 1
    return is_one and isinstance(value, fx.Node) and node.meta["val"].dtype == torch.int64


# -- Gradients of convolutions with a defined memory format, for compiled steps --------------------


_OPERATIONS = torch.library.Library("kedge", "FRAGMENT")
_OPERATIONS.define(
    "convolution_backward(Tensor grad, Tensor x, Tensor w, int[]? bias_sizes, int[] stride, "
    "int[] padding, int[] dilation, bool transposed, int[] output_padding, int groups, "
    "bool[3] output_mask, bool[2] channels_last) -> (Tensor, Tensor, Tensor)"
)


def fix_layouts(graph: fx.GraphModule) -> None:
    """Replace the convolution gradients of a traced graph that involve ambiguous tensors by ones in
    the memory format of the input and the weight."""
    for node in graph.graph.nodes:
        if node.target is not torch.ops.aten.convolution_backward.default:
            continue
        grad, x, w = (arg.meta["val"] for arg in node.args[:3])
        if grad.ndim == 4 and any(map(_is_ambiguous, (grad, x, w))):
            node.target = torch.ops.kedge.convolution_backward.default
            node.args = (*node.args, [_is_channels_last(x), _is_channels_last(w)])


def _is_channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _is_ambiguous(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and x.is_contiguous()


def _convolution_backward(
    grad: Tensor, x: Tensor, w: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *options, channels_last = rest
    grads = torch.ops.aten.convolution_backward(grad, x, w, *options)
    bias = grads[2] if options[-1][2] else x.new_empty(0)
    pairs = zip(grads[:2], channels_last, options[-1][:2], strict=True)
    by_input, by_weight = (_to_format(g, last) if on else x.new_empty(0) for g, last, on in pairs)
    return by_input, by_weight, bias


def _convolution_backward_shapes(
    grad: Tensor, x: Tensor, w: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, mask, channels_last = rest
    pairs = zip((x, w), channels_last, mask[:2], strict=True)
    by_input, by_weight = (
        torch.empty_like(like, memory_format=_memory_format(last)) if on else x.new_empty(0)
        for like, last, on in pairs
    )
    return by_input, by_weight, x.new_empty(grad.shape[1] if mask[2] else 0)


def _to_format(x: Tensor, channels_last: bool) -> Tensor:
    return x.contiguous(memory_format=_memory_format(channels_last))


def _memory_format(channels_last: bool) -> torch.memory_format:
    return torch.channels_last if channels_last else torch.contiguous_format


_OPERATIONS.impl("convolution_backward", _convolution_backward, "CompositeExplicitAutograd")
torch.library.register_fake(
    "kedge::convolution_backward", _convolution_backward_shapes, lib=_OPERATIONS
)
