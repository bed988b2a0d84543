"""Gradients of convolutions with a defined memory format, for compiled steps.

A tensor such as ``[N, C, 1, 1]`` is contiguous and channels-last at once. The strides of its
dimensions of size 1 address no element, but torch infers the memory format from them. The compiler
expects each gradient of a convolution in the memory format of the tensor that it belongs to. cuDNN
infers that of the weight gradient from input and output gradient, and that of the input gradient
from output gradient and weight. If one of the three is ambiguous, the two may differ, and the
compiled step fails its check of strides ("expected size 3==3, stride 1==512"). An example are
ResNets whose last feature maps have one pixel.
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
