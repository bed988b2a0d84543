"""The layout of an engine's model: memory format, and replaced layers.

Under ``vmap``, torch's BatchNorm has no backward pass in bfloat16 or channels-last, so that a step
converts every map to float32 and another memory format, and back. In a traced step a
:class:`BatchNorm` is plain arithmetic instead, with the backward pass in closed form. The compiler
fuses it with what follows (ReLU, sums of branches, casts), in the dtype and the memory format of
the convolutions. So it is for maps of one channel under ``vmap``, of which ``vmap`` makes a view
that cuDNN refuses. Elsewhere it is torch's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.core import rng, tree
from kedge.core.layers.dropout import Dropout
from kedge.core.model import NORMS, Layout, Model
from kedge.core.tree import Params, Tree, Weights
from kedge.engines import convolutions
from kedge.engines.conv_results import Pair, to_front
from kedge.engines.torch_compiler import is_traced
from kedge.engines.torch_private import transforms_active


class BatchNorm(nn.modules.batchnorm._BatchNorm):
    """A BatchNorm that is plain arithmetic in a traced step of all clients, or on one channel."""

    def forward(self, x: Tensor) -> Tensor:
        plain = transforms_active() and (is_traced() or (x.ndim > 2 and x.shape[1] == 1))
        if self.momentum is None or not plain:
            return super().forward(native_input(x))
        self._check_input_dim(x)
        if not self.training and self.running_mean is not None and self.running_var is not None:
            shape = _channel_shape(x, 0)
            inverse = torch.rsqrt(self.running_var + self.eps)
            centred = x.to(inverse.dtype) - self.running_mean.reshape(shape)
            y = centred * inverse.reshape(shape)
            return _affine(y, self.weight, self.bias, shape).to(x.dtype)
        y, mean, var = _Normalised.apply(x, self.weight, self.bias, self.eps, 0)
        if self.training and self.track_running_stats:
            self._update(mean.detach().flatten(), var.detach().flatten(), x.numel() // x.shape[1])
        return y

    def _update(self, mean: Tensor, var: Tensor, count: int) -> None:
        """Update the running statistics by those of a batch."""
        factor = self.momentum
        assert factor is not None
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.running_mean is None or self.running_var is None:
            return
        unbiased = var * (count / max(count - 1, 1))
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.copy_(factor * value + (1 - factor) * running)


#: The replacement of each of torch's layers, which has its name.
KINDS: dict[type[nn.Module], type[nn.Module]] = {
    kind: type(kind.__name__, (BatchNorm, kind), {})
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
}


def replace_norms(net: nn.Module) -> None:
    """Replace, in place, the BatchNorm layers of a network."""
    for layer in net.modules():
        if type(layer) in KINDS:
            layer.__class__ = KINDS[type(layer)]


class _Normalised(torch.autograd.Function):
    """``weight * (x - mean) / sqrt(var + eps) + bias``, the mean and the (biased) variance of the
    batch.

    ``lead`` axes of clients come before those of the batch and of the channels. Since mean and
    variance are results, the backward pass reads them, and it can itself be differentiated.
    """

    @staticmethod
    def forward(
        x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, lead: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        full = x.to(torch.promote_types(x.dtype, torch.float32))
        var, mean = _moments(full, _batch_axes(x, lead), x.element_size() < 4)
        y = _affine((full - mean) * torch.rsqrt(var + eps), w, b, _channel_shape(x, lead))
        return y.to(x.dtype), mean, var

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, b, ctx.eps, ctx.lead = inputs
        ctx.has_bias = b is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w, *output[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, by_mean: Tensor | None, by_var: Tensor | None) -> Any:
        x, w, mean, var = ctx.saved_tensors
        dims, shape = _batch_axes(x, ctx.lead), _channel_shape(x, ctx.lead)
        centred = x.to(mean.dtype) - mean
        count = centred.numel() // mean.numel()
        dx, dw, db = torch.zeros_like(centred), None, None
        if g is not None:
            g, inverse = g.to(mean.dtype), torch.rsqrt(var + ctx.eps)
            y = centred * inverse
            total, product = g.sum(dims, keepdim=True), (g * y).sum(dims, keepdim=True)
            scale = inverse if w is None else inverse * w.reshape(shape)
            dx = scale * (g - (total + y * product) / count)
            if w is not None:
                dw, db = (t.reshape(w.shape).to(w.dtype) for t in (product, total))
        if by_mean is not None:
            dx = dx + by_mean / count
        if by_var is not None:
            dx = dx + by_var * centred * (2 / count)
        return dx.to(x.dtype), dw, db if ctx.has_bias else None, None, None

    @staticmethod
    def vmap(
        info: Any, dims: Any, x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, lead: int
    ) -> Any:
        def stacked(t: Tensor | None, dim: int | None) -> Tensor | None:
            if t is None:
                return None
            return t.expand(info.batch_size, *t.shape) if dim is None else to_front(t, dim)

        every = [stacked(t, d) for t, d in zip((x, w, b), dims[:3], strict=True)]
        return _Normalised.apply(*every, eps, lead + 1), (0, 0, 0)


def _moments(x: Tensor, dims: list[int], fast: bool) -> tuple[Tensor, Tensor]:
    """Biased variance and mean. ``fast``: by the mean of squares, which is one quick pass, and as
    precise as inputs of 16 bits are unless the mean is a hundred times the deviation."""
    if not fast:
        return torch.var_mean(x, dims, correction=0, keepdim=True)
    mean = x.mean(dims, keepdim=True)
    return ((x * x).mean(dims, keepdim=True) - mean * mean).clamp_min(0), mean


def _batch_axes(x: Tensor, lead: int) -> list[int]:
    return [lead, *range(lead + 2, x.ndim)]


def _channel_shape(x: Tensor, lead: int) -> list[int]:
    """The shape in which a vector of channels is broadcast over ``x``."""
    return [*x.shape[:lead], 1, x.shape[lead + 1], *[1] * (x.ndim - lead - 2)]


def _affine(y: Tensor, w: Tensor | None, b: Tensor | None, shape: list[int]) -> Tensor:
    y = y if w is None else y * w.reshape(shape)
    return y if b is None else y + b.reshape(shape)


def native_input(x: Tensor) -> Tensor:
    """The input of torch's BatchNorm: under ``vmap`` its backward pass supports neither bfloat16
    nor channels-last."""
    if not transforms_active():
        return x
    x = x.float() if x.dtype == torch.bfloat16 else x
    x = x.contiguous()
    if x.ndim == 4 and x.shape[-2:] == (1, 1):
        x = x.flatten(1).reshape(x.shape)  # contiguous() keeps the strides of either memory format
    return x


MAX_CONV_WEIGHTS = 4_000_000  # with more, converting them costs more than channels-last gains


@dataclass(frozen=True)
class EngineLayout(Layout):
    """The layout of a model that an engine has prepared."""

    channels_last: bool = False  # memory format of one client at a time
    stacked: bool = False  # convolutions of all clients at once have a client axis

    def replace_layers(self, net: nn.Module) -> None:
        convolutions.replace_layers(net)
        replace_norms(net)
        for layer in net.modules():
            if isinstance(layer, convolutions.Conv2d):
                layer.stacked = self.stacked
            elif isinstance(layer, NORMS) and not isinstance(layer, BatchNorm):
                layer.register_forward_pre_hook(_native_input)
            elif self.channels_last and isinstance(layer, nn.MaxPool2d):
                layer.register_forward_hook(pool_grad_to_channels_last)
            elif self.channels_last and type(layer) is Dropout:
                layer.__class__ = ChannelsLastDropout

    def arrange(self, x: Tensor, params: Params) -> tuple[Tensor, Params]:
        if self.channels_last and x.ndim == 4 and not transforms_active():
            return to_channels_last(x), to_channels_last(params)
        return x, params

    def place(self, values: Tree) -> Tree:
        """Contiguous tensors, or in channels-last, so that weights are converted once per round."""
        return (
            to_channels_last(values) if self.channels_last else tree.map(Tensor.contiguous, values)
        )


def initial_weight(model: Model, w: Tensor) -> Tensor:
    """An initial weight in the memory format that the kernels of stacked convolutions read."""
    is_filter = isinstance(model.layout, EngineLayout) and model.layout.stacked and w.ndim == 4
    return w.contiguous(memory_format=torch.channels_last) if is_filter else w


def layout_of(model: Model) -> EngineLayout:
    """The layout of a model that an engine has prepared."""
    assert isinstance(model.layout, EngineLayout)
    return model.layout


def prefers_channels_last(model: Model, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether channels-last is faster for one client at a time.

    On a GPU it is for all convolutions. On a CPU it is for those in float32 (by a factor of 1.1 to
    1.6), except in networks with normalisation layers, where GroupNorm loses more than convolutions
    gain, and in those with many weights such as VGG-11, where the conversion takes longer.
    """
    layers = list(model.template.modules())
    filters = [layer.weight.numel() for layer in layers if isinstance(layer, nn.Conv2d)]
    if not filters or device.type == "cuda":
        return bool(filters)
    normalised = any(isinstance(layer, (*NORMS, nn.GroupNorm)) for layer in layers)
    return dtype == torch.float32 and not normalised and sum(filters) < MAX_CONV_WEIGHTS


def to_channels_last(values: Tree) -> Tree:
    """Tensors of four dimensions in channels-last, the others contiguous."""

    def convert(x: Tensor) -> Tensor:
        memory_format = torch.channels_last if x.ndim == 4 else torch.contiguous_format
        return x.contiguous(memory_format=memory_format)

    return tree.map(convert, values)


def pool_grad_to_channels_last(pool: nn.Module, args: Any, out: Any) -> None:
    """Forward hook of a pool: convert its output gradient to channels-last. A contiguous gradient,
    as a flatten layer returns it, would make the pool convert its whole input twice."""
    if isinstance(out, Tensor) and out.requires_grad and not transforms_active():
        out.register_hook(to_channels_last)


class ChannelsLastDropout(Dropout):
    """Dropout whose mask has the same values in channels-last."""

    def draws(self, key: Tensor, x: Tensor) -> Tensor:
        if self.channels or x.ndim != 4 or x.device.type != "cpu" or transforms_active():
            return super().draws(key, x)
        return rng.bits_at(key, _counter(tuple(x.shape)))


@lru_cache(maxsize=64)
def _counter(shape: tuple[int, ...]) -> Tensor:
    """0, 1, 2, ... in channels-last; cached, since the conversion is slow."""
    return to_channels_last(torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape))


def _native_input(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook of normalisation layers that are torch's own."""
    return (native_input(args[0]),)


# -- The layout of models in the server's steps on a GPU: channels-last, several models as one -----


CHANNELS = 8  # kernels for 16 bits need a multiple of this number


@dataclass(frozen=True)
class ServerLayout(EngineLayout):
    """Channels-last from the first map on, also in a generator, whose input is a vector."""

    channels_last: bool = True
    whole: bool = False  # only the result of a pass is read, not a map inside

    def replace_layers(self, net: nn.Module) -> None:
        super().replace_layers(net)
        for layer in net.modules():
            if type(layer) is nn.Unflatten:
                layer.__class__ = MapOfVector
            elif isinstance(layer, convolutions.Conv2d):
                layer.__class__ = ServerConv2d
        if self.whole:
            for layer in net.modules():
                if isinstance(layer, nn.Sequential):
                    _join_upsampling(layer)

    def arrange(self, x: Tensor, params: Params) -> tuple[Tensor, Params]:
        if transforms_active():
            return x, params
        return to_channels_last(x), to_channels_last(params)


class MapOfVector(nn.Unflatten):
    """An ``nn.Unflatten`` whose maps are in channels-last."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if transforms_active() else to_channels_last(y)


class ServerConv2d(convolutions.Conv2d):
    """A convolution with a model axis under ``vmap``, and else torch's own, whose gradients are one
    operation that reads what the forward pass read.

    In 16 bits, cuDNN converts its maps or falls back to slow kernels unless the number of channels
    is a multiple of eight. So filters of zeros are added to few, and their results left out.
    """

    def forward(self, x: Tensor) -> Tensor:
        if transforms_active():
            return super().forward(x)
        weight, padding = self._used(x)
        missing = -self.out_channels % CHANNELS
        if not missing or not torch.is_autocast_enabled(x.device.type):
            return F.conv2d(x, weight, self.bias, self.stride, padding)
        weight = F.pad(weight, (0, 0, 0, 0, 0, 0, 0, missing))
        y = F.conv2d(x, to_channels_last(weight), None, self.stride, padding)
        y = y[:, : self.out_channels]
        return y if self.bias is None else y + self.bias.to(y.dtype).reshape(-1, 1, 1)


class UpsampledConv2d(convolutions.Conv2d):
    """A 3x3 convolution of a map of twice the size, read from the small map.

    An even row of the result meets the rows i - 1, i, i of the small map, an odd one i, i, i + 1.
    So each of the four classes of pixels is a 2x2 convolution of the small map, with sums of taps:
    half of the products, and the large map is never written.
    """

    def forward(self, x: Tensor) -> Tensor:
        y = _Interleaved.apply(F.conv2d(x, _by_class(self.weight), None, 1, 1))
        return y if self.bias is None else y + self.bias.to(y.dtype).reshape(-1, 1, 1)


def _by_class(w: Tensor) -> Tensor:
    """Filters ``[O, C, 3, 3]`` as those of even and odd rows and columns, ``[4 O, C, 2, 2]``."""
    odd, tap, new = (torch.arange(n, device=w.device) for n in (2, 3, 2))
    # tap r of an odd (1) or even (0) row a is on row (a + r - 1) // 2, the first being a - 1
    first = odd[:, None] - 1
    at = torch.div(first + tap, 2, rounding_mode="floor") - first  # [2, 3]
    sums = (at[:, None] == new[:, None]).to(w.dtype)  # [odd, new, tap]
    w = (w[:, :, None, None] * sums[..., None]).sum(-2)  # [O, C, odd, new, 3]
    w = (w[..., None, None, :] * sums).sum(-1)  # [O, C, odd row, new, odd column, new]
    return to_channels_last(w.permute(2, 4, 0, 1, 3, 5).flatten(0, 2))


class _Interleaved(torch.autograd.Function):
    """Maps ``[B, 4 O, H + 1, W + 1]`` of four classes of pixels as one, ``[B, O, 2 H, 2 W]``.

    It reads by index, which a compiler fuses with what comes after.
    """

    @staticmethod
    def forward(y: Tensor) -> Tensor:
        (row, odd_row), (column, odd_column) = (
            (i // 2 + i % 2, i % 2)
            for i in (torch.arange(2 * n - 2, device=y.device) for n in y.shape[-2:])
        )
        y = y.permute(0, 2, 3, 1).unflatten(3, (2, 2, -1))  # [B, H + 1, W + 1, 2, 2, O]
        y = y[:, row[:, None], column, odd_row[:, None], odd_column]  # [B, 2 H, 2 W, O]
        return y.permute(0, 3, 1, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        pairs = [(a, b) for a in (0, 1) for b in (0, 1)]
        parts = [F.pad(g[..., a::2, b::2], (b, 1 - b, a, 1 - a)) for a, b in pairs]
        return to_channels_last(torch.cat(parts, 1))


def _join_upsampling(net: nn.Sequential) -> None:
    layers = list(net._modules.items())
    for (name, up), (_, conv) in pairwise(layers):
        doubles = type(up) is nn.Upsample and up.mode == "nearest" and up.size is None
        if not doubles or up.scale_factor != 2 or not isinstance(conv, nn.Conv2d):
            continue
        if _can_be_joined(conv):
            net._modules[name] = nn.Identity()
            conv.__class__ = UpsampledConv2d


def _can_be_joined(conv: nn.Conv2d) -> bool:
    shape = conv.kernel_size, conv.padding, conv.stride
    return isinstance(conv, convolutions.Conv2d) and shape == ((3, 3), (1, 1), (1, 1))


def as_read(model: Model, weights: Weights) -> Weights:
    """Weights in the dtype and the memory format in which passes of a prepared model read them.

    Leaves may have further axes first, for several models: their filters are then in the order of
    the kernels of :mod:`kedge.engines.convolutions`. A pass gives the same result, but converts
    nothing.
    """
    layers = dict(model.template.named_modules())
    dtype = torch.bfloat16 if model.precision == "bf16" else None

    def convert(name: str, w: Tensor) -> Tensor:
        layer = layers.get(name.rpartition(".")[0])
        if not name.endswith("weight") or not isinstance(layer, (nn.Conv2d, nn.Linear)):
            return w
        w = w if dtype is None else w.to(dtype)
        if not isinstance(layer, nn.Conv2d):
            return w.contiguous()
        if w.ndim == 4:
            return to_channels_last(w)
        return w.movedim((-4, -3), (-2, -1)).contiguous().movedim((-2, -1), (-4, -3))

    return weights._replace(params={n: convert(n, w) for n, w in weights.params.items()})


# -- The layout of one client at a time on a CPU, whose convolutions may have few channels ---------


MAX_CHANNELS = 8  # two columns of as many fill a vector
MIN_WIDTH = 3  # of a filter; the wider one multiplies (width + 1) / width as much
Pooling = tuple[Any, Any, Any, Any, bool]  # size, stride, padding, dilation, ceil_mode
_convolution_backward = torch.ops.aten.convolution_backward


@dataclass(frozen=True)
class LoopLayout(EngineLayout):
    """Convolutions with few channels, for one client at a time on a CPU.

    In channels-last, a CPU computes 16 channels at once, so a convolution with 6 output channels
    takes as long as one with 16. Here two neighbouring columns of the output are computed at once,
    as one convolution of stride 2 with twice the channels and a filter that is one column wider;
    the filter of the second column is shifted by one. In channels-last, the result has the memory
    of the output itself. The gradient of an input with few channels is computed in the same way.

    Maximum pooling of 8 channels takes less than half the time of 6, so a convolution with few
    channels that a pool follows computes 8 and drops the rest. A ReLU between the two moves behind
    the pool: the values and the gradients are the same, and it has a quarter of the elements.
    """

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
