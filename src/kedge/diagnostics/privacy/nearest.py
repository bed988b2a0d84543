"""Nearest neighbours: how close samples are to the training samples, and those to each other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

COPY = 0.25  # a copy is nearer than this share of the usual distance between training samples


class Nearest(NamedTuple):
    """For each query: the root mean square difference to its nearest neighbour, and its number."""

    distance: Tensor  # [Q]
    places: Tensor  # [Q]


def nearest(queries: Tensor, base: Iterable[Tensor], own: Tensor | None = None) -> Nearest:
    """The nearest neighbours of queries ``[Q, D]`` among the rows of chunks ``[n, D]``.

    Args:
        queries: flat samples.
        base: chunks of flat samples; rows are numbered over all chunks.
        own: the number of each query in the base, which is left out ``[Q]``; None: it has none.

    >>> points = torch.tensor([[0.0, 0.0], [3.0, 3.0], [7.0, 7.0]])
    >>> found = nearest(points, [points], own=torch.arange(3))
    >>> found.distance.tolist(), found.places.tolist()
    ([3.0, 3.0, 4.0], [1, 0, 1])
    """
    square = queries.square().sum(1)[:, None]
    best = torch.full((len(queries),), torch.inf, dtype=queries.dtype, device=queries.device)
    index = torch.zeros(len(queries), dtype=torch.int64, device=queries.device)
    found, start = queries.clone(), 0
    for chunk in base:
        distance = square - 2 * queries @ chunk.T + chunk.square().sum(1)  # [Q, n]
        if own is not None:
            inside = ((own >= start) & (own < start + len(chunk))).nonzero()[:, 0]
            distance[inside, own[inside] - start] = torch.inf
        value, place = distance.min(1)
        closer = value < best
        best = torch.where(closer, value, best)
        index = torch.where(closer, place + start, index)
        found[closer] = chunk[place[closer]]
        start += len(chunk)
    # differences are taken again: the expanded square loses small distances to rounding
    exact = (queries - found).square().mean(1).sqrt()
    return Nearest(torch.where(torch.isfinite(best), exact, torch.inf), index)


class Closeness(NamedTuple):
    """Distances of samples to the nearest training sample, beside the usual ones."""

    distance: float  # median over the samples
    usual: float  # median distance of a training sample to its nearest other one
    ratio: float  # their quotient; infinite if training samples repeat each other
    copies: int  # samples nearer than COPY times the usual distance
    samples: int


def closeness(distances: Tensor, usual: Tensor) -> Closeness:
    """Compare distances ``[Q]`` with those between training samples ``[n]``.

    >>> closeness(torch.tensor([0.1, 4.0, 6.0]), torch.tensor([1.0, 2.0, 3.0]))
    Closeness(distance=4.0, usual=2.0, ratio=2.0, copies=1, samples=3)
    """
    median, typical = float(distances.median()), float(usual.median())
    ratio = median / typical if typical > 0 else torch.inf
    # equal samples are copies, also where the usual distance is 0
    copies = int((distances <= COPY * typical).sum())
    return Closeness(median, typical, ratio, copies, len(distances))
