"""Batched image operations on the device: crop, flip, rotation, normalisation.

Each takes images ``[B, C, H, W]`` in the scale of 0 to 1; random ones take a key and draw anew for
every image. They work under ``vmap``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.core import rng
from kedge.registry import Registry
from kedge.schema import Doc, NotNegative, Size, bind_sum

Augmentation = Callable[[Tensor, Tensor], Tensor]  # (images, key) -> images

augmentations = Registry[Callable[..., Augmentation]](
    "augmentation", see="kedge list augmentations"
)
"""A function of its options that returns an augmentation; a new one is registered by name."""


def rotate(x: Tensor, degrees: Tensor) -> Tensor:
    """Turn each image counter-clockwise by its angle, bilinearly, black where nothing is."""
    height, width = x.shape[-2:]
    angle = degrees.to(x.dtype).reshape(-1, 1, 1) * (math.pi / 180)
    cos, sin = torch.cos(angle), torch.sin(angle)
    across = (2 * torch.arange(width, dtype=x.dtype, device=x.device) + 1) / width - 1
    down = ((2 * torch.arange(height, dtype=x.dtype, device=x.device) + 1) / height - 1)[:, None]
    source_x = cos * across - sin * down * (height / width)  # [B, H, W], in the scale of -1 to 1
    source_y = sin * across * (width / height) + cos * down
    grid = torch.stack([source_x, source_y], -1)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


@augmentations.register("crop")
def crop(*, padding: Annotated[Size, Doc("pixels on every side")] = 4) -> Augmentation:
    """A random window of the image padded with black on every side."""

    def apply(x: Tensor, key: Tensor) -> Tensor:
        count, _, height, width = x.shape
        shift = rng.integers(key, (2, count), 2 * padding + 1) - padding
        x = _shifted(x, shift[0], 2, height)
        return _shifted(x, shift[1], 3, width)

    return apply


@augmentations.register("flip")
def flip() -> Augmentation:
    """Mirror each image left to right with probability 1/2."""

    def apply(x: Tensor, key: Tensor) -> Tensor:
        turned = rng.uniform(key, (len(x), 1, 1, 1)) < 0.5
        return torch.where(turned, x.flip(-1), x)

    return apply


@augmentations.register("turn")
def turn(*, degrees: Annotated[NotNegative, Doc("largest angle")] = 15.0) -> Augmentation:
    """Turn each image by an angle drawn from -degrees to degrees."""

    def apply(x: Tensor, key: Tensor) -> Tensor:
        return rotate(x, (2 * rng.uniform(key, (len(x),), x.dtype) - 1) * degrees)

    return apply


def augmentation(text: str) -> Augmentation | None:
    """Read ``none`` or a sum such as ``crop(4)+flip``, applied left to right.

    Raises:
        UnknownName: there is no such augmentation or option.
        FieldError: the value of an option is wrong.
    """
    if text.strip() == "none":
        return None
    steps: list[Augmentation] = [bound() for bound in bind_sum(augmentations, text)]

    def apply(x: Tensor, key: Tensor) -> Tensor:
        for i, step in enumerate(steps):
            x = step(x, rng.fold(key, i))
        return x

    return apply


def _shifted(x: Tensor, by: Tensor, axis: int, size: int) -> Tensor:
    """Each image moved along one axis by its own number of pixels, black coming in."""
    at = torch.arange(size, device=x.device) + by[:, None]  # [B, size]
    inside = (at >= 0) & (at < size)
    shape = [len(x), 1, 1, 1]
    shape[axis] = size
    index = at.clamp(0, size - 1).reshape(shape).expand(x.shape)
    return torch.gather(x, axis, index) * inside.reshape(shape)
