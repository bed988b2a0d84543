"""The layout of models in the server's steps on a GPU: channels-last, several models as one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.core.model import Model
from kedge.core.tree import Params, Weights
from kedge.engines import stacked
from kedge.engines.layout import EngineLayout, to_channels_last
from kedge.engines.torch_private import transforms_active

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
            elif isinstance(layer, stacked.Conv2d):
                layer.__class__ = Conv2d
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


class Conv2d(stacked.Conv2d):
    """A convolution with a model axis under ``vmap``, and else torch's own, whose gradients are one
    operation that reads what the forward pass read.

    In 16 bits, cuDNN converts its maps or falls back to slow kernels unless the number of channels
    is a multiple of eight. So filters of zeros are added to few, and their results left out.
    """

    def forward(self, x: Tensor) -> Tensor:
        if transforms_active():
            return super().forward(x)
        assert not isinstance(self.padding, str)
        rows, columns = (
            stacked.used_taps(x.shape[i - 2], self.kernel_size[i], self.stride[i], self.padding[i])
            for i in (0, 1)
        )
        weight, padding = self.weight, (rows.padding, columns.padding)
        weight = weight[..., rows.start : rows.stop, columns.start : columns.stop]
        missing = -self.out_channels % CHANNELS
        if not missing or not torch.is_autocast_enabled(x.device.type):
            return F.conv2d(x, weight, self.bias, self.stride, padding)
        weight = F.pad(weight, (0, 0, 0, 0, 0, 0, 0, missing))
        y = F.conv2d(x, to_channels_last(weight), None, self.stride, padding)
        y = y[:, : self.out_channels]
        return y if self.bias is None else y + self.bias.to(y.dtype).reshape(-1, 1, 1)


class UpsampledConv2d(stacked.Conv2d):
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
    return isinstance(conv, stacked.Conv2d) and shape == ((3, 3), (1, 1), (1, 1))


def as_read(model: Model, weights: Weights) -> Weights:
    """Weights in the dtype and the memory format in which passes of a prepared model read them.

    Leaves may have further axes first, for several models: their filters are then in the order of
    the kernels of :mod:`kedge.engines.stacked`. A pass gives the same result, but converts nothing.
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
