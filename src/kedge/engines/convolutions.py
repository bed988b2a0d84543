"""Convolutions of all clients at once.

Under ``vmap`` over clients with different weights, a :class:`Conv2d` becomes one operation with a
client axis. On a GPU this is a kernel of :mod:`kedge.engines.kernels`, several times faster than
the grouped convolution of ``vmap``. Inputs that clients share are expanded. If clients share their
weights, it is the ordinary convolution of all inputs as one batch, and only the gradient of the
weights, which differs between clients, has a client axis. Outside ``vmap``, and in float64 on a
GPU, it is the ordinary convolution.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input, conv2d_weight

from kedge.engines.conv_results import Pair, empty, empty_target, is_dense, is_one_pixel, to_front

# -- operators, opaque to compilers and traced graphs --------------------------------------------


def _conv(x: Tensor, w: Tensor, stride: int, padding: list[int]) -> Tensor:
    if x.is_cuda:
        from kedge.engines import kernels

        return kernels.conv(x, w, stride, (padding[0], padding[1]))
    clients = zip(x, w.permute(0, 3, 4, 1, 2), strict=True)
    results = [F.conv2d(x, w, stride=stride, padding=padding) for x, w in clients]
    return empty_target(x, w, stride, padding).copy_(torch.stack(results))


def _conv_inputs(g: Tensor, w: Tensor, size: list[int], stride: int, padding: list[int]) -> Tensor:
    if g.is_cuda:
        from kedge.engines import kernels

        return kernels.conv_inputs(g, w, (size[0], size[1]), stride, (padding[0], padding[1]))
    shape = [g.shape[1], w.shape[3], *size]
    clients = zip(g, w.permute(0, 4, 3, 1, 2), strict=True)
    results = [conv2d_input(shape, w, g, stride, padding) for g, w in clients]
    return _empty_source(g, w, size).copy_(torch.stack(results))


def _conv_weights(g: Tensor, x: Tensor, size: list[int], stride: int, padding: list[int]) -> Tensor:
    if g.is_cuda:
        from kedge.engines import kernels

        return kernels.conv_weights(g, x, (size[0], size[1]), stride, (padding[0], padding[1]))
    shape = [g.shape[2], x.shape[2], *size]
    clients = zip(g, x, strict=True)
    results = [conv2d_weight(x, shape, g, stride, padding) for g, x in clients]
    return _empty_weights(g, x, size).copy_(torch.stack(results))


def _sums(g: Tensor) -> Tensor:
    if g.is_cuda and g.dtype != torch.float64 and is_dense(g) and g[0].numel() < 2**31:
        from kedge.engines.kernels import sums

        return sums(g)
    return g.sum((1, 3, 4), dtype=accumulator(g))


def accumulator(x: Tensor) -> torch.dtype:
    """The dtype in which gradients of weights are summed."""
    return torch.promote_types(x.dtype, torch.float32)


def _empty_source(g: Tensor, w: Tensor, size: Any, *_: Any) -> Tensor:
    return empty(g.shape[0], g.shape[1], w.shape[3], size[0], size[1], like=g)


def _empty_sums(g: Tensor) -> Tensor:
    return g.new_empty((g.shape[0], g.shape[2]), dtype=accumulator(g))


def _empty_weights(g: Tensor, x: Tensor, size: Any, *_: Any) -> Tensor:
    shape = (x.shape[0], g.shape[2], *size, x.shape[2])
    return x.new_empty(shape, dtype=accumulator(x)).permute(0, 1, 4, 2, 3)


_OPERATIONS = torch.library.Library("kedge", "DEF")
for _schema, _work, _empty in (
    ("conv(Tensor x, Tensor w, int stride, int[] padding) -> Tensor", _conv, empty_target),
    (
        "conv_inputs(Tensor g, Tensor w, int[] size, int stride, int[] padding) -> Tensor",
        _conv_inputs,
        _empty_source,
    ),
    (
        "conv_weights(Tensor g, Tensor x, int[] size, int stride, int[] padding) -> Tensor",
        _conv_weights,
        _empty_weights,
    ),
    ("sums(Tensor g) -> Tensor", _sums, _empty_sums),
):
    _name = _schema.split("(")[0]
    _OPERATIONS.define(_schema)
    for _key in ("CPU", "CUDA"):
        _OPERATIONS.impl(_name, _work, _key)
    torch.library.register_fake(f"kedge::{_name}", _empty, lib=_OPERATIONS)


#: Pixels of a client's batch up to which a second copy of the weights costs more than it saves.
MAX_SHARED_PIXELS = 1024


def available() -> bool:
    """Whether Triton is installed, in which the kernels are written."""
    return importlib.util.find_spec("triton") is not None


class Conv2d(nn.Conv2d):
    """An ``nn.Conv2d`` with a client axis under ``vmap`` if ``stacked`` is set."""

    stacked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.stacked or (x.is_cuda and x.dtype == torch.float64):
            return super().forward(x)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        weight, padding = self._used(x)
        y = _Forward.apply(x, weight, self.stride[0], padding)
        if self.bias is None:
            return y
        if self.out_channels % 16:  # not in channels-last
            return y + self.bias.to(y.dtype).reshape(-1, 1, 1)
        return _Biased.apply(y, self.bias)

    def _used(self, x: Tensor) -> tuple[Tensor, Pair]:
        """The filters without taps that meet only the padding of ``x``, and their padding."""
        assert not isinstance(self.padding, str)
        rows, columns = (
            used_taps(x.shape[i - 2], self.kernel_size[i], self.stride[i], self.padding[i])
            for i in (0, 1)
        )
        weight = self.weight
        if (rows.stop - rows.start, columns.stop - columns.start) != self.kernel_size:
            weight = weight[..., rows.start : rows.stop, columns.start : columns.stop]
        return weight, (rows.padding, columns.padding)


class Taps(NamedTuple):
    """A range of taps of a filter, and the padding with which these alone give the same result."""

    start: int
    stop: int
    padding: int


def used_taps(size: int, kernel: int, stride: int, padding: int) -> Taps:
    """The taps along one axis that meet the map, not only its padding.

    Of a 3x3 filter on a padded map of one pixel it is the one in the centre: a ninth of the weights
    of the last layers of a ResNet on small images.

    >>> used_taps(1, kernel=3, stride=1, padding=1), used_taps(2, kernel=3, stride=2, padding=1)
    (Taps(start=1, stop=2, padding=0), Taps(start=1, stop=3, padding=0))
    """
    count = (size + 2 * padding - kernel) // stride + 1
    firsts = [o * stride - padding for o in range(count)]  # where the first tap lies
    used = [r for r in range(kernel) if any(0 <= first + r < size for first in firsts)]
    if used:
        found = Taps(used[0], used[-1] + 1, padding - used[0])
        length = size + 2 * found.padding - (found.stop - found.start)
        if found.padding >= 0 and length >= 0 and length // stride + 1 == count:
            return found
    return Taps(0, kernel, padding)


class GlobalPool(nn.AdaptiveAvgPool2d):
    """Global average pooling; ``nn.AdaptiveAvgPool2d`` has no vmap rule for channels-last."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((-2, -1), keepdim=True)


def replace_layers(net: nn.Module) -> None:
    """Replace, in place, the layers of a network that have a stacked version."""
    for layer in net.modules():
        if _can_be_stacked(layer):
            layer.__class__ = Conv2d
        elif type(layer) is nn.AdaptiveAvgPool2d and layer.output_size in (1, (1, 1)):
            layer.__class__ = GlobalPool


def _can_be_stacked(layer: nn.Module) -> bool:
    """Whether the kernels support a layer."""
    return (
        type(layer) is nn.Conv2d
        and layer.groups == 1
        and layer.dilation == (1, 1)
        and layer.stride[0] == layer.stride[1]
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


class _Bilinear(torch.autograd.Function):
    """A function of two tensors, and of numbers that end in a stride and a padding."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        first, second, *_, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(first, second)


class _Forward(_Bilinear):
    @staticmethod
    def forward(x: Tensor, w: Tensor, stride: int, padding: Pair) -> Tensor:
        return F.conv2d(x, w.to(x.dtype), stride=stride, padding=padding)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _Inputs.apply(g, w, tuple(x.shape[-2:]), ctx.stride, ctx.padding)
        if ctx.needs_input_grad[1]:
            dw = _Weights.apply(g, x, tuple(w.shape[-2:]), ctx.stride, ctx.padding).to(w.dtype)
        return dx, dw, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, w: Tensor, stride: int, padding: Pair) -> Any:
        if dims[1] is None:  # shared weights: one large batch
            x = to_front(x, dims[0])
            y = _Forward.apply(x.flatten(0, 1), w, stride, padding)
            return y.unflatten(0, x.shape[:2]), 0
        x, w = _stacked(info, dims, x, w)
        return _Stacked.apply(_channels_last(x), w, stride, padding), 0


class _Inputs(_Bilinear):
    """Gradient with respect to the inputs."""

    @staticmethod
    def forward(g: Tensor, w: Tensor, size: Pair, stride: int, padding: Pair) -> Tensor:
        shape = [g.shape[0], w.shape[1], *size]
        return conv2d_input(shape, w.to(g.dtype), g, stride, padding)

    @staticmethod
    def backward(ctx: Any, gg: Tensor) -> Any:  # bilinear in g and w
        g, w = ctx.saved_tensors
        dg = _Forward.apply(gg, w, ctx.stride, ctx.padding)
        dw = _Weights.apply(g, gg, tuple(w.shape[-2:]), ctx.stride, ctx.padding).to(w.dtype)
        return dg, dw, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, g: Tensor, w: Tensor, *rest: Any) -> Any:
        if dims[1] is None:
            g = to_front(g, dims[0])
            dx = _Inputs.apply(g.flatten(0, 1), w, rest[0], rest[1], rest[2])
            return dx.unflatten(0, g.shape[:2]), 0
        g, w = _stacked(info, dims, g, w)
        return _inputs(g, w, *rest), 0


class _Weights(_Bilinear):
    """Gradient with respect to the weights, in float32."""

    @staticmethod
    def forward(g: Tensor, x: Tensor, size: Pair, stride: int, padding: Pair) -> Tensor:
        shape = [g.shape[1], x.shape[1], *size]
        return conv2d_weight(x, shape, g, stride, padding).to(accumulator(x))

    @staticmethod
    def backward(ctx: Any, gw: Tensor) -> Any:
        g, x = ctx.saved_tensors
        dg = _Forward.apply(x, gw, ctx.stride, ctx.padding)
        dx = _Inputs.apply(g, gw, tuple(x.shape[-2:]), ctx.stride, ctx.padding)
        return dg, dx, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, g: Tensor, x: Tensor, *rest: Any) -> Any:
        g, x = _stacked(info, dims, g, x)
        return _weights(g, x, *rest), 0


class _Stacked(_Bilinear):
    """The operation with a client axis, for gradients taken outside ``vmap``."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, stride: int, padding: Pair) -> Tensor:
        return torch.ops.kedge.conv(
            x, _permute_weights(w, x.dtype, (0, 3, 4, 1, 2)), stride, padding
        )

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _inputs(g, w, x.shape[-2:], ctx.stride, ctx.padding)
        if ctx.needs_input_grad[1]:
            dw = _weights(g, x, w.shape[-2:], ctx.stride, ctx.padding).to(w.dtype)
        return dx, dw, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, w: Tensor, stride: int, padding: Pair) -> Any:
        x, w = _stacked(info, dims, x, w)  # two axes of clients become one
        both = _Stacked.apply(x.flatten(0, 1), w.flatten(0, 1), stride, padding)
        return both.unflatten(0, x.shape[:2]), 0


class _Biased(torch.autograd.Function):
    """The sum of maps and a bias. Its gradient is an operation of its own, since a compiler would
    compute it together with the maps' gradient, in a slow order."""

    @staticmethod
    def forward(y: Tensor, b: Tensor) -> Tensor:
        return y + b.to(y.dtype).reshape(-1, 1, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.dtype = inputs[1].dtype

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, _Sums.apply(g).to(ctx.dtype)

    @staticmethod
    def vmap(info: Any, dims: Any, y: Tensor, b: Tensor) -> Any:
        y, b = _stacked(info, dims, y, b)
        return y + b.to(y.dtype)[:, None, :, None, None], 0


class _Sums(torch.autograd.Function):
    """Sums of maps over batch and pixels, in float32."""

    @staticmethod
    def forward(g: Tensor) -> Tensor:
        return g.sum((0, 2, 3), dtype=accumulator(g))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.shape, ctx.dtype = inputs[0].shape, inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, gg: Tensor) -> Any:
        return gg.to(ctx.dtype).reshape(-1, 1, 1).expand(ctx.shape)

    @staticmethod
    def vmap(info: Any, dims: Any, g: Tensor) -> Any:
        (g,) = _stacked(info, dims, g)
        return torch.ops.kedge.sums(_channels_last(g)), 0


def _stacked(info: Any, dims: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors with the client axis first; shared ones are expanded."""
    return tuple(
        t.expand(info.batch_size, *t.shape) if d is None else to_front(t, d)
        for t, d in zip(tensors, dims, strict=False)
    )


def _inputs(g: Tensor, w: Tensor, size: Any, stride: int, padding: Any) -> Tensor:
    pixels = g.shape[1] * size[0] * size[1]
    if g.element_size() == 2 and pixels <= MAX_SHARED_PIXELS:  # the forward pass's copy serves, too
        weights = _permute_weights(w, g.dtype, (0, 3, 4, 1, 2)).transpose(3, 4)
    else:  # with the summed axis last, which TF32 needs
        weights = _permute_weights(w, g.dtype, (0, 3, 4, 2, 1))
    return torch.ops.kedge.conv_inputs(_channels_last(g), weights, size, stride, padding)


def _weights(g: Tensor, x: Tensor, size: Any, stride: int, padding: Any) -> Tensor:
    g, x = _channels_last(g), _channels_last(x)
    return torch.ops.kedge.conv_weights(g, x, size, stride, padding)


def _permute_weights(w: Tensor, dtype: torch.dtype, order: tuple[int, ...]) -> Tensor:
    """Weights ``[K, O, C, R, S]`` as contiguous ``[K, R, S, target, source]`` channels."""
    return w.permute(order).to(dtype, memory_format=torch.contiguous_format).contiguous()


def _channels_last(x: Tensor) -> Tensor:
    """Convert to the memory format of :func:`empty`; a compiler fuses the copy with the operation
    before."""
    if x.shape[2] % 16:
        return x
    if is_one_pixel(x.shape[3], x.shape[4]):
        return x.contiguous()
    return x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
