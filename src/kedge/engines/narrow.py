"""Convolutions with few channels, for one client at a time on a CPU.

In channels-last, a CPU computes 16 channels at once, so a convolution with 6 output channels takes
as long as one with 16. Here two neighbouring columns of the output are computed at once, as one
convolution of stride 2 with twice the channels and a filter that is one column wider; the filter
of the second column is shifted by one. In channels-last, the result has the memory of the output
itself. The gradient of an input with few channels is computed in the same way.

Maximum pooling of 8 channels takes less than half the time of 6, so a convolution with few channels
that a pool follows computes 8 and drops the rest. A ReLU between the two moves behind the pool: the
values and the gradients are the same, and it has a quarter of the elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.engines import convolutions
from kedge.engines.layout import EngineLayout
from kedge.engines.torch_private import transforms_active

MAX_CHANNELS = 8  # two columns of as many fill a vector
MIN_WIDTH = 3  # of a filter; the wider one multiplies (width + 1) / width as much
Pair = tuple[int, int]
Pooling = tuple[Any, Any, Any, Any, bool]  # size, stride, padding, dilation, ceil_mode
_convolution_backward = torch.ops.aten.convolution_backward


@dataclass(frozen=True)
class LoopLayout(EngineLayout):
    """The layout of one client at a time on a CPU."""

    def replace_layers(self, net: nn.Module) -> None:
        super().replace_layers(net)
        if not self.channels_last:
            return
        for layer in net.modules():
            if _is_narrow(layer):
                layer.__class__ = NarrowConv2d
                layer.pool = None  # type: ignore[assignment]
        if type(net) is nn.Sequential:  # what is inside its children cannot be cut
            for child in net.children():
                pool_early(child)


def _is_narrow(layer: nn.Module) -> bool:
    """Whether a layer gains if two columns are computed at once."""
    return (
        isinstance(layer, convolutions.Conv2d)
        and min(layer.in_channels, layer.out_channels) <= MAX_CHANNELS
        and layer.stride == (1, 1)
        and layer.kernel_size[1] >= MIN_WIDTH
        and all(p < k for p, k in zip(_padding(layer), layer.kernel_size, strict=True))
    )


def pool_early(net: nn.Module) -> None:
    """In a sequential module, move pools in front of the ReLU before them, and into a convolution
    with few channels before that, in place."""
    if type(net) is not nn.Sequential:
        return
    places = [i for i in range(len(net)) if type(net[i]) is not nn.Identity]
    for n, place in enumerate(places):
        pool = net[place]
        pool_early(pool)
        if type(pool) is not nn.MaxPool2d or pool.return_indices:
            continue
        if n and type(net[places[n - 1]]) is nn.ReLU:
            n -= 1
            net[place], net[places[n]] = net[places[n]], pool
        before = net[places[n - 1]] if n else None
        if isinstance(before, NarrowConv2d) and before.out_channels <= MAX_CHANNELS:
            before.pool, net[places[n]] = pool, nn.Identity()


class NarrowConv2d(convolutions.Conv2d):
    """A convolution that computes two columns at once where it has few channels."""

    pool: nn.MaxPool2d | None  # behind it

    def forward(self, x: Tensor) -> Tensor:
        pool = self.pool
        plain = transforms_active() or torch.is_autocast_enabled(x.device.type) or x.ndim != 4
        columns = x.shape[-1] + 2 * _padding(self)[1] - self.kernel_size[1] + 1
        few_out = self.out_channels <= MAX_CHANNELS and columns % 2 == 0
        few_in = self.in_channels <= MAX_CHANNELS and x.shape[-1] % 2 == 0 and x.requires_grad
        if plain or not (few_out or few_in):
            y = super().forward(x)
            return y if pool is None else pool(y)
        arguments = x, self.weight, self.bias, _padding(self), few_out, few_in
        if pool is None or not few_out:
            y = _Convolution.apply(*arguments, None)
            return y if pool is None else pool(y)
        stride = pool.stride if pool.stride is not None else pool.kernel_size
        pooling = pool.kernel_size, stride, pool.padding, pool.dilation, pool.ceil_mode
        return _Convolution.apply(*arguments, pooling)


class _Convolution(torch.autograd.Function):
    """A convolution with two columns at once, in its result (``few_out``), in the gradient of its
    input (``few_in``), or in both. The gradients can be differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, padding: Pair, few_out: bool,
        few_in: bool, pooling: Pooling | None,
    ) -> Tensor:  # fmt: skip
        ctx.padding, ctx.few_out, ctx.few_in, ctx.pooling = padding, few_out, few_in, pooling
        if not few_out:
            ctx.save_for_backward(x, w)
            return F.conv2d(x, w, b, padding=padding)
        if pooling is None:
            ctx.save_for_backward(x, w)
            return _in_pairs(x, w, b, padding)
        more = MAX_CHANNELS - len(w)
        wide = None if b is None else F.pad(b, (0, more))
        y = _in_pairs(x, _more_filters(w, more), wide, padding)
        pooled, indices = F.max_pool2d_with_indices(y, *pooling)
        ctx.save_for_backward(x, w, y, indices)
        return pooled[:, : len(w)]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w, *pooled = ctx.saved_tensors
        needs_x, needs_w, needs_b, *_ = ctx.needs_input_grad
        count, filters = len(w), w
        if pooled:
            more = MAX_CHANNELS - count
            g, filters = (
                _unpooled(g, more, pooled[0], pooled[1], ctx.pooling),
                _more_filters(w, more),
            )
        gx = gw = gb = None
        if needs_x and ctx.few_in:
            gx = _input_gradient(g[:, :count], w, ctx.padding)
        elif needs_x:
            gx = _gradients(g, x, filters, 1, ctx.padding, [True, False, False])[0]
        if needs_w or needs_b:
            stride = 2 if ctx.few_out else 1
            if ctx.few_out:
                g, filters = _separated(g), _two_columns(filters)
            _, gw, gb = _gradients(g, x, filters, stride, ctx.padding, [False, needs_w, needs_b])
            if ctx.few_out:  # the sum over both columns
                half = len(filters) // 2
                second = slice(half, half + count)
                gw = gw[:count, ..., :-1] + gw[second, ..., 1:] if needs_w else None
                gb = gb[:count] + gb[second] if needs_b else None
        return gx, gw, gb, None, None, None, None


def _padding(layer: nn.Conv2d) -> Pair:
    assert not isinstance(layer.padding, str)
    rows, columns = layer.padding
    return rows, columns


def _in_pairs(x: Tensor, w: Tensor, b: Tensor | None, padding: Pair) -> Tensor:
    """A convolution with two columns at once."""
    twice = None if b is None else torch.cat((b, b))
    return _interleaved(F.conv2d(x, _two_columns(w), twice, (1, 2), padding))


def _gradients(
    g: Tensor, x: Tensor, w: Tensor, stride: int, padding: Pair, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The wanted gradients of a convolution: input, filters, bias."""
    return _convolution_backward(
        g, x, w, [len(w)], (1, stride), padding, (1, 1), False, (0, 0), 1, wanted
    )


def _input_gradient(g: Tensor, w: Tensor, padding: Pair) -> Tensor:
    """The gradient of the input: a convolution of ``g`` with the mirrored filters, which is faster
    in the default memory format."""
    rows, columns = (k - 1 - p for k, p in zip(w.shape[2:], padding, strict=True))
    filters = _two_columns(w.flip(2, 3).transpose(0, 1)).contiguous()
    return _interleaved(F.conv2d(g.contiguous(), filters, None, (1, 2), (rows, columns)))


def _unpooled(g: Tensor, more: int, y: Tensor, indices: Tensor, pooling: Pooling) -> Tensor:
    """The gradient of ``y``, of which ``more`` channels were dropped after the pool."""
    g = F.pad(g, (0, 0, 0, 0, 0, more)).contiguous(memory_format=torch.channels_last)
    backward = torch.ops.aten.max_pool2d_with_indices_backward
    size, stride, padding, dilation = (_pair(value) for value in pooling[:4])
    return backward(g, y, size, stride, padding, dilation, pooling[4], indices)


def _pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def _more_filters(w: Tensor, more: int) -> Tensor:
    """Filters with as many more that are zero."""
    return F.pad(w, (0, 0, 0, 0, 0, 0, 0, more))


def _two_columns(w: Tensor) -> Tensor:
    """Filters ``[C, I, H, W]`` for two neighbouring columns, ``[2 C, I, H, W + 1]``."""
    both = torch.cat((F.pad(w, (0, 1)), F.pad(w, (1, 0))))
    return both.contiguous(memory_format=torch.channels_last)


def _interleaved(y: Tensor) -> Tensor:
    """Columns ``[N, 2 C, H, W]`` as one image ``[N, C, H, 2 W]``; a view in channels-last."""
    n, channels, h, w = y.shape
    return y.permute(0, 2, 3, 1).reshape(n, h, 2 * w, channels // 2).permute(0, 3, 1, 2)


def _separated(y: Tensor) -> Tensor:
    """The inverse of :func:`_interleaved`."""
    n, channels, h, w = y.shape
    return y.permute(0, 2, 3, 1).reshape(n, h, w // 2, 2 * channels).permute(0, 3, 1, 2)
