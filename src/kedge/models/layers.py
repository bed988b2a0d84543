"""What the models share: named layers, normalisation, dropout, and checks of shapes and options."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from kedge.errors import ModelError
from kedge.schema import Doc, Option, Range

Shape = tuple[int, ...]

Norm = Annotated[Literal["bn", "gn", "none"], Doc("BatchNorm, GroupNorm or none")]
Dropout = Annotated[bool, Doc("the dropout of the paper")]
Rate = Annotated[float, Range(0, 1, open_high=True)]


def named(**layers: nn.Module) -> nn.Sequential:
    """A sequence whose layers have names."""
    return nn.Sequential(OrderedDict(layers))


def stack(*stages: nn.Module, head: nn.Linear, stem: nn.Module | None = None) -> nn.Sequential:
    """The shape of every model here: ``stem`` if any, ``stage1``, ``stage2``, ..., ``head``."""
    children = {} if stem is None else {"stem": stem}
    children |= {f"stage{i}": stage for i, stage in enumerate(stages, 1)}
    return named(**children, head=head)


def head(features: int, outputs: int) -> nn.Linear:
    """The last layer: one output per class."""
    if not whole(outputs) or outputs < 1:
        raise ModelError(f"a model has one output or more, not {outputs!r}: give the classes")
    return nn.Linear(features, outputs)


def norm_layer(norm: str, channels: int, *, dims: int = 2, groups: int = 32) -> nn.Module:
    """BatchNorm (``bn``), GroupNorm (``gn``) or nothing (``none``) for maps of ``dims`` dimensions.

    GroupNorm has the largest number of groups that divides the channels, is not above ``groups``
    (32 as in Wu & He, Group Normalization, ECCV 2018) and leaves at least two channels in a group:
    one channel alone would be InstanceNorm. Flat features (``dims=0``) are one group, for a
    group of few numbers would keep little but their signs.
    """
    Option("norm", Norm).check(norm)
    if norm == "none":
        return nn.Identity()
    if norm == "bn":
        return nn.BatchNorm2d(channels) if dims == 2 else nn.BatchNorm1d(channels)
    most = min(groups, channels // 2) if dims else 1
    return nn.GroupNorm(
        max((g for g in range(1, most + 1) if channels % g == 0), default=1), channels
    )


def dropout(p: float) -> nn.Module:
    """Dropout of single values; nothing at all for p = 0."""
    return nn.Dropout(p) if p else nn.Identity()


class SliceDropout(nn.Module):
    """Dropout of whole slices: ``x[i]`` (stochastic depth) for ``dims=1``, maps ``x[i, j]`` for 2.

    The draw is one plain :class:`torch.nn.Dropout` of ones, so whatever replaces that class to
    control randomness controls this one too.
    """

    def __init__(self, p: float, dims: int) -> None:
        super().__init__()
        self.dims, self.drop = dims, nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        index = (slice(None),) * self.dims + (slice(1),) * (x.dim() - self.dims)
        mask: Tensor = self.drop(torch.ones_like(x[index]))
        return x * mask


def fan_out_init(model: nn.Module) -> None:
    """He initialisation of convolutions over their outputs with zero biases, as torchvision has."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def image_shape(model: str, shape: Shape, least: int = 1) -> Shape:
    """(channels, height, width), or an error that says what the model takes."""
    what = "images (channels, height, width)"
    what += f" of at least {least}x{least}" if least > 1 else ""
    return _shape(model, shape, what, (1, least, least))


def series_shape(model: str, shape: Shape, least: int = 1) -> Shape:
    """(channels, length), or an error that says what the model takes."""
    return _shape(model, shape, f"series (channels, length) of length {least} or more", (1, least))


def flat_size(model: str, shape: Shape) -> int:
    """How many numbers an input of any shape has."""
    return math.prod(_shape(model, shape, "inputs of any shape with sizes above 0", None))


def _shape(model: str, shape: Shape, what: str, least: Shape | None) -> Shape:
    sizes = (1,) * len(shape) if least is None else least
    good = len(shape) == len(sizes) > 0 and all(map(whole, shape))
    if not good or any(size < low for size, low in zip(shape, sizes, strict=True)):
        other = "" if least is None else " Choose another model: mlp and linear take any shape."
        raise ModelError(f"{model} takes {what}, not inputs of shape {tuple(shape)}.{other}")
    return tuple(shape)


def whole(value: Any) -> bool:
    """Whether a value is an integer (True and False are none)."""
    return isinstance(value, int) and not isinstance(value, bool)
