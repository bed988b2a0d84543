"""The layout of models in the server's steps on a GPU: channels-last, several models as one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

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
        rows = _sum_taps(self.weight, -2)
        classes = torch.cat([w for row in rows for w in _sum_taps(row, -1)])
        y = F.conv2d(x, to_channels_last(classes), None, 1, 1)
        height, width = x.shape[-2:]
        lines = []
        for a, both in enumerate(y.chunk(2, 1)):
            pixels = both[..., a : a + height, :].chunk(2, 1)
            row = [p[..., b : b + width] for b, p in enumerate(pixels)]
            lines.append(torch.stack(row, -1).flatten(-2))
        y = to_channels_last(torch.stack(lines, -2).flatten(-3, -2))
        return y if self.bias is None else y + self.bias.to(y.dtype).reshape(-1, 1, 1)


def _sum_taps(w: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The taps of even and of odd pixels along one axis, ``[..., 3, ...]`` to ``[..., 2, ...]``."""
    first, middle, last = w.unbind(dim)
    return torch.stack([first, middle + last], dim), torch.stack([first + middle, last], dim)


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
