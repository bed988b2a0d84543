"""Memory for the results of convolutions with a client axis."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor

Pair: TypeAlias = tuple[int, int]


def is_one_pixel(height: int, width: int) -> bool:
    return height == width == 1


def to_front(x: Tensor, dim: int) -> Tensor:
    """Move a dimension to the front. A permutation that changes nothing is left out: in a graph,
    the compiler would give its operand contiguous strides, and convert it afterwards."""
    return x.movedim(dim, 0) if dim else x


def is_dense(x: Tensor) -> bool:
    """Whether every client's maps ``[B, C, H, W]`` are in channels-last without gaps."""
    _, _, channels, height, width = x.shape
    return x.stride()[1:] == (height * width * channels, 1, width * channels, channels)


def empty(clients: int, batch: int, channels: int, height: int, width: int, like: Tensor) -> Tensor:
    """An empty result ``[K, B, C, H, W]``, in channels-last if channels fill a block, so that reads
    are coalesced.

    A map of one pixel is contiguous and channels-last at once. It gets contiguous strides: on
    channels-last ones, the backward pass of BatchNorm has no vmap rule on a GPU."""
    if channels % 16 or is_one_pixel(height, width):
        return like.new_empty(clients, batch, channels, height, width)
    return like.new_empty(clients, batch, height, width, channels).permute(0, 1, 4, 2, 3)


def empty_target(x: Tensor, w: Tensor, stride: int, padding: Any) -> Tensor:
    """An empty result for the convolution of ``[K, B, C, H, W]`` with ``[K, R, S, O, C]``."""
    height = (x.shape[3] + 2 * padding[0] - w.shape[1]) // stride + 1
    width = (x.shape[4] + 2 * padding[1] - w.shape[2]) // stride + 1
    return empty(x.shape[0], x.shape[1], w.shape[3], height, width, like=x)
