"""Shared by the models: named layers, normalisation, dropout, and checks of input shapes."""

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
    """A sequential module with named layers."""
    return nn.Sequential(OrderedDict(layers))


def stack(*stages: nn.Module, head: nn.Linear, stem: nn.Module | None = None) -> nn.Sequential:
    """Chain a model: ``stem`` if any, ``stage1``, ``stage2``, ..., ``head``."""
    children = {} if stem is None else {"stem": stem}
    children |= {f"stage{i}": stage for i, stage in enumerate(stages, 1)}
    return named(**children, head=head)


def head(features: int, outputs: int) -> nn.Linear:
    """The last layer: a linear map from features to outputs."""
    if not is_int(outputs) or outputs < 1:
        raise ModelError(f"a model has one output or more, not {outputs!r}: give the classes")
    return nn.Linear(features, outputs)


def norm_layer(norm: str, channels: int, *, dims: int = 2, groups: int = 32) -> nn.Module:
    """BatchNorm (``bn``), GroupNorm (``gn``) or nothing (``none``) for maps of ``dims`` dimensions.

    GroupNorm has the largest number of groups that divides the channels, is at most ``groups``
    (32 as in Wu & He, Group Normalization, ECCV 2018) and leaves at least two channels per group:
    one channel per group would be InstanceNorm. Flat features (``dims=0``) form one group, since
    a small group would keep little more than the signs of its values.
    """
    Option("norm", Norm).check(norm)
    if norm == "none":
        return nn.Identity()
    if norm == "bn":
        return nn.BatchNorm2d(channels) if dims == 2 else nn.BatchNorm1d(channels)
    max_groups = min(groups, channels // 2) if dims else 1
    return nn.GroupNorm(
        max((g for g in range(1, max_groups + 1) if channels % g == 0), default=1), channels
    )


def dropout(p: float) -> nn.Module:
    """Dropout of single values; the identity for p = 0."""
    return nn.Dropout(p) if p else nn.Identity()


class SliceDropout(nn.Module):
    """Dropout of whole slices: ``x[i]`` (stochastic depth) for ``dims=1``, maps ``x[i, j]`` for 2.

    The mask is a :class:`torch.nn.Dropout` of ones, so that code which replaces that class to
    control randomness also controls this one.
    """

    def __init__(self, p: float, dims: int) -> None:
        super().__init__()
        self.dims, self.drop = dims, nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        index = (slice(None),) * self.dims + (slice(1),) * (x.dim() - self.dims)
        mask: Tensor = self.drop(torch.ones_like(x[index]))
        return x * mask


def fan_out_init(model: nn.Module) -> None:
    """He initialisation of convolutions by fan-out, with zero biases, as in torchvision."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def image_shape(model: str, shape: Shape, min_size: int = 1) -> Shape:
    """Check an image shape ``(C, H, W)``; raise a ModelError if a side is below ``min_size``."""
    what = "images (channels, height, width)"
    what += f" of at least {min_size}x{min_size}" if min_size > 1 else ""
    return _check_shape(model, shape, what, (1, min_size, min_size))


def series_shape(model: str, shape: Shape, min_size: int = 1) -> Shape:
    """Check a series shape ``(C, L)``; raise a ModelError if it is shorter than ``min_size``."""
    what = f"series (channels, length) of length {min_size} or more"
    return _check_shape(model, shape, what, (1, min_size))


def flat_size(model: str, shape: Shape) -> int:
    """The number of values of an input of any shape; raise a ModelError if a size is below 1."""
    return math.prod(_check_shape(model, shape, "inputs of any shape with sizes above 0", None))


def _check_shape(model: str, shape: Shape, what: str, min_sizes: Shape | None) -> Shape:
    sizes = (1,) * len(shape) if min_sizes is None else min_sizes
    is_valid = len(shape) == len(sizes) > 0 and all(map(is_int, shape))
    if not is_valid or any(size < low for size, low in zip(shape, sizes, strict=True)):
        other = "" if min_sizes is None else " Choose another model: mlp and linear take any shape."
        raise ModelError(f"{model} takes {what}, not inputs of shape {tuple(shape)}.{other}")
    return tuple(shape)


def is_int(value: Any) -> bool:
    """Whether a value is an integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)
