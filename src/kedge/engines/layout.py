"""How an engine lays out the tensors of a model, and which layers it puts in place of others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from kedge.core import rng, tree
from kedge.core.dropout import Dropout
from kedge.core.model import NORMS, Layout, Model
from kedge.core.tree import Params, Tree
from kedge.engines import stacked
from kedge.engines.torch_private import transforms_active

MAX_CONV_WEIGHTS = 4_000_000  # above it, converting filters costs more than channels-last gains


@dataclass(frozen=True)
class EngineLayout(Layout):
    """The layout of an engine's own model."""

    channels_last: bool = False  # for convolutions of one client at a time
    stacked: bool = False  # convolutions of many clients at once have a client axis

    def replace_layers(self, net: nn.Module) -> None:
        stacked.replaced(net)
        for layer in net.modules():
            if isinstance(layer, stacked.Conv2d):
                layer.stacked = self.stacked
            elif isinstance(layer, NORMS):
                layer.register_forward_pre_hook(_in_full_precision)
            elif self.channels_last and isinstance(layer, nn.MaxPool2d):
                layer.register_forward_hook(pool_grad_to_channels_last)
            elif self.channels_last and type(layer) is Dropout:
                layer.__class__ = ChannelsLastDropout

    def arrange(self, x: Tensor, params: Params) -> tuple[Tensor, Params]:
        if self.channels_last and x.ndim == 4 and not transforms_active():
            return to_channels_last(x), to_channels_last(params)
        return x, params

    def place(self, values: Tree) -> Tree:
        """Tensors without gaps, convolution weights converted once rather than in every step."""
        return to_channels_last(values) if self.channels_last else tree.map(_contiguous, values)


def initial_weight(model: Model, w: Tensor) -> Tensor:
    """A first weight in the memory format that the kernels of stacked convolutions read."""
    wanted = isinstance(model.layout, EngineLayout) and model.layout.stacked and w.ndim == 4
    return w.contiguous(memory_format=torch.channels_last) if wanted else w


def layout_of(model: Model) -> EngineLayout:
    """The layout of a model that an engine has prepared."""
    assert isinstance(model.layout, EngineLayout)
    return model.layout


def prefers_channels_last(model: Model, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether channels-last makes passes of one client at a time faster.

    On a CPU it does for convolutions in float32 (by 1.1 to 1.6), unless maps are normalised: group
    norm then takes longer than the convolutions gain. With many filters, as VGG-11 has, converting
    them takes longer.
    """
    layers = list(model.template.modules())
    filters = [layer.weight.numel() for layer in layers if isinstance(layer, nn.Conv2d)]
    if not filters or device.type == "cuda":
        return bool(filters)
    normalised = any(isinstance(layer, (*NORMS, nn.GroupNorm)) for layer in layers)
    return dtype == torch.float32 and not normalised and sum(filters) < MAX_CONV_WEIGHTS


def to_channels_last(values: Tree) -> Tree:
    """Tensors of four dimensions in channels-last, all others contiguous."""

    def convert(x: Tensor) -> Tensor:
        wanted = torch.channels_last if x.ndim == 4 else torch.contiguous_format
        return x.contiguous(memory_format=wanted)

    return tree.map(convert, values)


def pool_grad_to_channels_last(pool: nn.Module, args: Any, out: Any) -> None:
    """Give a pool its gradient in channels-last: in the other format, in which it comes from a
    layer that flattens, the pool would convert its whole input there and back."""
    if isinstance(out, Tensor) and out.requires_grad and not transforms_active():
        out.register_hook(to_channels_last)


class ChannelsLastDropout(Dropout):
    """The same draws, in the memory format of the maps."""

    def draws(self, key: Tensor, x: Tensor) -> Tensor:
        if self.channels or x.ndim != 4 or x.device.type != "cpu" or transforms_active():
            return super().draws(key, x)
        return rng.bits_at(key, _counter(tuple(x.shape)))


@lru_cache(maxsize=64)
def _counter(shape: tuple[int, ...]) -> Tensor:
    """0, 1, 2, ... in channels-last, which is slow to make afresh."""
    return to_channels_last(torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape))


def _contiguous(x: Tensor) -> Tensor:
    return x.contiguous()


def _in_full_precision(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """BatchNorm of many clients at once has no backward pass in half precision, nor one for maps
    in channels-last."""
    if not transforms_active():
        return None
    x = args[0].float() if args[0].dtype == torch.bfloat16 else args[0]
    x = x.contiguous()
    if x.ndim == 4 and x.shape[-2:] == (1, 1):  # contiguous keeps the strides of either format
        x = x.flatten(1).reshape(x.shape)
    return (x,)
