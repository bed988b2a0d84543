"""The layout of an engine's model: memory format, and replaced layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from kedge.core import rng, tree
from kedge.core.layers.dropout import Dropout
from kedge.core.model import NORMS, Layout, Model
from kedge.core.tree import Params, Tree
from kedge.engines import norms, stacked
from kedge.engines.torch_private import transforms_active

MAX_CONV_WEIGHTS = 4_000_000  # with more, converting them costs more than channels-last gains


@dataclass(frozen=True)
class EngineLayout(Layout):
    """The layout of a model that an engine has prepared."""

    channels_last: bool = False  # memory format of one client at a time
    stacked: bool = False  # convolutions of all clients at once have a client axis

    def replace_layers(self, net: nn.Module) -> None:
        stacked.replace_layers(net)
        norms.replace_layers(net)
        for layer in net.modules():
            if isinstance(layer, stacked.Conv2d):
                layer.stacked = self.stacked
            elif isinstance(layer, NORMS) and not isinstance(layer, norms.BatchNorm):
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
        return to_channels_last(values) if self.channels_last else tree.map(_contiguous, values)


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


def _contiguous(x: Tensor) -> Tensor:
    return x.contiguous()


def _native_input(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook of normalisation layers that are torch's own."""
    return (norms.native_input(args[0]),)
