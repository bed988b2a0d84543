"""Data augmentation: batched crop, flip and rotation on the device.

Each function takes images ``[B, C, H, W]`` scaled to 0..1. Random ones take a key and draw
independently for every image. All of them work under ``vmap``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.core import rng
from kedge.errors import FieldError
from kedge.registry import Registry
from kedge.schema import Doc, NotNegative, Size, bind_sum

Augmentation = Callable[[Tensor, Tensor], Tensor]  # (images, key) -> images

augmentations = Registry[Callable[..., Augmentation]](
    "augmentation", see="kedge list augmentations"
)
"""Functions of their options that return an :data:`Augmentation`, by name."""


def rotate(x: Tensor, degrees: Tensor) -> Tensor:
    """Rotate each image counter-clockwise, with bilinear interpolation and black corners.

    Args:
        x: images ``[B, C, H, W]``.
        degrees: one angle per image, ``[B]``.
    """
    height, width = x.shape[-2:]
    angle = degrees.to(x.dtype).reshape(-1, 1, 1) * (math.pi / 180)
    cos, sin = torch.cos(angle), torch.sin(angle)
    column = (2 * torch.arange(width, dtype=x.dtype, device=x.device) + 1) / width - 1
    row = ((2 * torch.arange(height, dtype=x.dtype, device=x.device) + 1) / height - 1)[:, None]
    source_x = cos * column - sin * row * (height / width)  # [B, H, W], in -1..1
    source_y = sin * column * (width / height) + cos * row
    grid = torch.stack([source_x, source_y], -1)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


@augmentations.register("crop")
def crop(*, padding: Annotated[Size, Doc("pixels on every side")] = 4) -> Augmentation:
    """Pad each image with black on every side and crop it at a random offset."""

    def apply(x: Tensor, key: Tensor) -> Tensor:
        count, _, height, width = x.shape
        if padding >= min(height, width):
            raise FieldError(
                f"crop.padding = {padding} would leave images of {height} x {width} black; "
                "write fewer pixels",
                "padding",
            )
        shift = rng.integers(key, (2, count), 2 * padding + 1) - padding
        x = _shift(x, shift[0], 2, height)
        return _shift(x, shift[1], 3, width)

    return apply


@augmentations.register("flip")
def flip() -> Augmentation:
    """Mirror each image left to right with probability 1/2."""

    def apply(x: Tensor, key: Tensor) -> Tensor:
        mirrored = rng.uniform(key, (len(x), 1, 1, 1)) < 0.5
        return torch.where(mirrored, x.flip(-1), x)

    return apply


@augmentations.register("turn")
def turn(*, degrees: Annotated[NotNegative, Doc("largest angle")] = 15.0) -> Augmentation:
    """Rotate each image by an angle drawn uniformly from -degrees to degrees."""

    def apply(x: Tensor, key: Tensor) -> Tensor:
        return rotate(x, (2 * rng.uniform(key, (len(x),), x.dtype) - 1) * degrees)

    return apply


def augmentation(text: str) -> Augmentation | None:
    """Parse an augmentation.

    Args:
        text: ``none``, or a sum such as ``crop(4)+flip``, applied from left to right.

    Returns:
        A function of images ``[B, C, H, W]`` and a key, or None for ``none``.

    Raises:
        UnknownName: there is no such augmentation or option.
        FieldError: the value of an option is wrong.

    >>> augmentation("crop(padding=2)+flip")(torch.rand(5, 3, 8, 8), rng.key(0)).shape
    torch.Size([5, 3, 8, 8])
    """
    if text.strip() == "none":
        return None
    steps: list[Augmentation] = [bound() for bound in bind_sum(augmentations, text)]

    def apply(x: Tensor, key: Tensor) -> Tensor:
        for i, step in enumerate(steps):
            x = step(x, rng.fold(key, i))
        return x

    return apply


def _shift(x: Tensor, offset: Tensor, axis: int, size: int) -> Tensor:
    """Shift each image along one axis by its own ``offset`` (pixels, ``[B]``); fill with black."""
    source = torch.arange(size, device=x.device) + offset[:, None]  # [B, size]
    inside = (source >= 0) & (source < size)
    shape = [len(x), 1, 1, 1]
    shape[axis] = size
    index = source.clamp(0, size - 1).reshape(shape).expand(x.shape)
    return torch.gather(x, axis, index) * inside.reshape(shape)
