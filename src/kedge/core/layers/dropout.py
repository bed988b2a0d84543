"""Dropout that draws from a key."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor, nn

from kedge.core import rng
from kedge.errors import ModelError


class Dropout(nn.Module):
    """Dropout that draws from a key, so that it is the same in a loop and under ``vmap``."""

    def __init__(self, p: float, channels: bool = False) -> None:
        super().__init__()
        self.p, self.channels = p, channels  # channels: drop whole channels, as nn.Dropout2d
        # a value is retained if its 32-bit draw, as a fraction of 24 bits, is at least p
        self.least = math.ceil(torch.tensor(p, dtype=torch.float32).item() * 2**24) * 2**8

    @property
    def is_random(self) -> bool:
        """Whether a pass in training draws."""
        return self.p > 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        stream = _streams.top
        if stream is None:
            raise ModelError("a model with dropout needs a key in training: forward(..., key=key)")
        key = stream.next()
        if self.least >= 2**32:
            return x * 0
        draws = self.draws(key, x)
        keep = (draws ^ -(2**31)) >= self.least - 2**31  # unsigned comparison
        return x * keep.to(x.dtype) / (1 - self.p)

    def draws(self, key: Tensor, x: Tensor) -> Tensor:
        """Uniform 32-bit integers, one per value (or channel) of ``x``."""
        shape = (*x.shape[:2], *(1 for _ in x.shape[2:])) if self.channels else tuple(x.shape)
        return rng.bits(key, shape)


@lru_cache(maxsize=64)
def _layer(p: float, channels: bool) -> Dropout:
    return Dropout(p, channels)


def drop(x: Tensor, p: float, channels: bool = False) -> Tensor:
    """Dropout as a function, drawing from the keys of the pass."""
    return _layer(p, channels)(x)


class KeyStream:
    """A new key for each dropout layer of a pass, in the order of execution."""

    def __init__(self, key: Tensor) -> None:
        self.key, self.count = key, 0

    def next(self) -> Tensor:
        self.count += 1
        return rng.fold(self.key, self.count)


class _Streams(threading.local):
    top: KeyStream | None = None


_streams = _Streams()


@contextmanager
def drawing_from(stream: KeyStream | None) -> Iterator[None]:
    """Within the block, dropout layers draw from these keys."""
    before, _streams.top = _streams.top, stream
    try:
        yield
    finally:
        _streams.top = before


def has_keys() -> bool:
    """Whether dropout may draw now."""
    return _streams.top is not None
