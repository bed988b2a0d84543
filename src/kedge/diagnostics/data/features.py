"""A fixed feature extractor: the same features for the same inputs, without training or downloads.

Images, volumes and series pass through a small convolutional network with random weights from a
fixed seed. Random convolutions respond to edges and textures and pool them by place, so they tell
apart what a trained first layer would (Saxe et al., ICML 2011), and distances in such features rank
distributions of images much like those in features of trained networks (Naeem et al., ICML 2020,
arXiv:2002.09797). Unlike a trained network they favour no dataset. Coarse means of the inputs
are added, since the filters have zero mean and do not see brightness. Tables are their standardised
columns. Tokens are counted in hashed buckets; roots of the shares, so that Euclidean distances are
Hellinger's.

All are then reduced by a principal component analysis of the pooled samples.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.data.federation import Federation

SEED = 0x6B65  # of the filters
DIMENSIONS = 32  # principal components, at most
EXPLAINED = 0.99  # share of the variance that they keep, if fewer are enough
ROWS = 512  # samples at once
SIDE = {1: 64, 2: 32, 3: 16}  # larger inputs are averaged down to it, by spatial dimensions
KERNEL = {1: 9, 2: 5, 3: 3}
FILTERS = (24, 48)
BUCKETS = 512  # of token ids

Array = npt.NDArray[Any]


class Features(NamedTuple):
    """Features of some samples."""

    values: Array  # float32 [n, d]
    words: str  # how they were made


def features_of(federation: Federation, rows: Tensor) -> Features:
    """Features ``[n, d]`` of some rows of a federation, with d of at most 32.

    Args:
        federation: the data; inputs are normalised as in training.
        rows: rows of its samples, ``[n]``.
    """
    extract: Callable[[Tensor], tuple[Tensor, ...]]
    tokens, shape = federation.tokens, federation.input_shape
    is_table = not tokens and len(shape) - 1 not in SIDE
    if tokens:
        extract, words = _count_tokens, "hashed counts of tokens"
    elif is_table:
        extract, words = _columns, "standardised columns"
    else:
        filters = random_filters(shape[0], len(shape) - 1)
        extract, words = partial(_convolve, filters), "a fixed random convolutional network"
    with torch.inference_mode():
        pieces = [extract(batch.x.cpu()) for batch in federation.clean_batches(rows, ROWS)]
    blocks = [torch.cat(block).numpy() for block in zip(*pieces, strict=True)]
    joined = np.concatenate([_scaled(block, each=is_table) for block in blocks], axis=1)
    reduced = principal_components(joined)
    return Features(reduced.astype(np.float32), f"{words}, {reduced.shape[1]} components")


def random_filters(channels: int, spatial: int) -> tuple[Tensor, Tensor]:
    """The weights of two convolutions: Gaussian, of zero mean and unit norm."""
    rng, filters = np.random.default_rng(SEED), []
    for inputs, outputs, size in (
        (channels, FILTERS[0], KERNEL[spatial]),
        (FILTERS[0], FILTERS[1], 3),
    ):
        drawn = rng.standard_normal((outputs, inputs, *[size] * spatial)).astype(np.float32)
        axes = tuple(range(1, drawn.ndim))
        drawn -= drawn.mean(axes, keepdims=True)
        drawn /= np.sqrt((drawn**2).sum(axes, keepdims=True))
        filters.append(torch.from_numpy(drawn))
    return filters[0], filters[1]


def _convolve(filters: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Responses in 2 cells along every axis, and means of the inputs in 4 cells."""
    spatial, x = x.ndim - 2, x.float()
    convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[spatial - 1]
    pool: Any = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[spatial - 1]
    if max(x.shape[2:]) > SIDE[spatial]:
        x = pool(x, [min(SIDE[spatial], n) for n in x.shape[2:]])
    first, second = filters
    stride = 2 if min(x.shape[2:]) >= 16 else 1
    hidden = F.relu(convolve(x, first, stride=stride, padding=first.shape[-1] // 2))
    hidden = pool(hidden, [min(8, n) for n in hidden.shape[2:]])
    responses = F.relu(convolve(hidden, second, padding=1))
    responses = pool(responses, [min(2, n) for n in responses.shape[2:]])
    return responses.flatten(1), pool(x, [min(4, n) for n in x.shape[2:]]).flatten(1)


def _columns(x: Tensor) -> tuple[Tensor]:
    return (x.flatten(1),)


def _count_tokens(x: Tensor) -> tuple[Tensor]:
    buckets = ((x.flatten(1) * 0x9E3779B1) % (1 << 32)) >> 23  # [n, T], 512 buckets
    counts = torch.zeros(len(x), BUCKETS).scatter_add_(1, buckets, torch.ones(buckets.shape))
    return ((counts / buckets.shape[1]).sqrt(),)


def _scaled(block: Array, each: bool) -> Array:
    """A centred block of features, with unit variance of each column or of the whole block."""
    block = block.astype(np.float64)
    block -= block.mean(0)
    variance = (block**2).mean(0)
    spread = np.sqrt(variance if each else variance.sum())
    return block / np.where(spread > 1e-12, spread, np.inf)


def principal_components(x: Array) -> Array:
    """The leading principal components of samples ``[n, d]``."""
    x = x.astype(np.float64) - x.mean(0)
    values, vectors = np.linalg.eigh(x.T @ x / len(x))
    values, vectors = values[::-1].clip(0), vectors[:, ::-1]
    total = values.sum()
    if total <= 0:
        return np.zeros((len(x), 1))
    enough = int(np.searchsorted(np.cumsum(values) / total, EXPLAINED)) + 1
    return x @ vectors[:, : min(enough, DIMENSIONS)]
