"""Gradients of convolutions whose layout is certain, for compiled steps.

A tensor such as ``[N, C, 1, 1]`` is contiguous and channels-last at once: its strides along the
sizes of 1 place no element, but they decide which of the two torch takes it for. The compiler
expects the gradients of a convolution in the layout that its input and its weight ask for. cuDNN
lays out the gradient of the weight by input and output gradient, and that of the input by output
gradient and weight. Where one of the three is ambiguous these answers may differ, and the compiled
step fails in its check of strides ("expected size 3==3, stride 1==512"). ResNets whose last maps
have one pixel do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

_OPERATIONS = torch.library.Library("kedge", "FRAGMENT")
_OPERATIONS.define(
    "convolution_backward(Tensor grad, Tensor x, Tensor w, int[]? bias_sizes, int[] stride, "
    "int[] padding, int[] dilation, bool transposed, int[] output_padding, int groups, "
    "bool[3] output_mask, bool[2] channels_last) -> (Tensor, Tensor, Tensor)"
)


def fix_layouts(graph: fx.GraphModule) -> None:
    """Replace, in a traced graph, gradients of convolutions on ambiguous tensors by ones that lie
    as what they are gradients of."""
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
    found = torch.ops.aten.convolution_backward(grad, x, w, *options)
    bias = found[2] if options[-1][2] else x.new_empty(0)
    pairs = zip(found[:2], channels_last, options[-1][:2], strict=True)
    by_input, by_weight = (_in_layout(g, last) if on else x.new_empty(0) for g, last, on in pairs)
    return by_input, by_weight, bias


def _convolution_backward_shapes(
    grad: Tensor, x: Tensor, w: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, mask, channels_last = rest
    pairs = zip((x, w), channels_last, mask[:2], strict=True)
    by_input, by_weight = (
        torch.empty_like(like, memory_format=_layout(last)) if on else x.new_empty(0)
        for like, last, on in pairs
    )
    return by_input, by_weight, x.new_empty(grad.shape[1] if mask[2] else 0)


def _in_layout(x: Tensor, channels_last: bool) -> Tensor:
    return x.contiguous(memory_format=_layout(channels_last))


def _layout(channels_last: bool) -> torch.memory_format:
    return torch.channels_last if channels_last else torch.contiguous_format


_OPERATIONS.impl("convolution_backward", _convolution_backward, "CompositeExplicitAutograd")
torch.library.register_fake(
    "kedge::convolution_backward", _convolution_backward_shapes, lib=_OPERATIONS
)
