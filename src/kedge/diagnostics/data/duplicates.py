"""Duplicates across clients: equal samples by hash, near-duplicates by nearest neighbours.

A sample is a near-duplicate if its nearest sample on another client is much closer than its
neighbourhood explains. In a neighbourhood of constant density in d dimensions, the volume of the
ball up to the first neighbour over that up to the tenth is Beta(1, 9), whatever the density. So
the ratio of both distances exceeds t with probability 1 - (1 - t^-d)^9. The threshold t is the one
that N samples without duplicates exceed 0.01 times in all, and d is estimated from the median of
the ratios, so that the duplicates themselves do not move it. In few dimensions, as in small tables,
near samples are common and columns are rounded, so that nothing can be told.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NEIGHBOURS = 10
EXPECTED_FALSE = 0.01  # near-duplicates that data without any would show
MAX_NEAR = 10_000  # samples that are compared with each other
MIN_NEAR = 50  # fewer have no neighbourhoods
MIN_DIMENSION = 4.0  # below it, rounded columns look like near-duplicates
CHUNK = 1000

Array = npt.NDArray[Any]


class Equal(NamedTuple):
    """Samples with equal inputs."""

    across: int  # samples whose input another client has, too
    within: int  # further copies on the same client
    conflicts: int  # samples whose input another client has with another label
    clients: tuple[tuple[int, int, int], ...]  # (client, client, inputs they share), most first


class Near(NamedTuple):
    """Samples that are nearly equal to one of another client."""

    number: int
    samples: int  # samples that were compared
    ratio: float  # the threshold t
    dimension: float  # the estimated d
    pairs: tuple[tuple[int, int], ...]  # positions of the closest, closest first


def hashes(x: Tensor, rows: Tensor | None = None) -> Array:
    """A hash of each row, or of some ``rows``; equal rows have equal hashes, ``[n]`` of uint64."""
    rows = torch.arange(len(x), device=x.device) if rows is None else rows
    found = []
    for piece in torch.split(rows, CHUNK):
        flat = x[piece].detach().cpu().reshape(len(piece), -1).numpy()
        if flat.dtype.kind == "f":
            flat = flat + 0.0  # -0.0 equals 0.0
        found += [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in flat]
    return np.frombuffer(b"".join(found), np.uint64)


def equal_samples(codes: Array, owner: Array, labels: Array) -> Equal:
    """Count equal inputs within and across clients.

    Args:
        codes: a hash of each input, ``[n]``.
        owner: the client of each sample, ``[n]``.
        labels: the label of each sample, ``[n]`` or ``[n, outputs]``.

    >>> codes, owner = np.array([7, 7, 8, 7, 9]), np.array([0, 0, 0, 1, 1])
    >>> equal_samples(codes, owner, np.array([0, 0, 0, 1, 0]))
    Equal(across=3, within=1, conflicts=3, clients=((0, 1, 1),))
    """
    _, inverse, counts = np.unique(codes, return_inverse=True, return_counts=True)
    repeated = np.flatnonzero(counts[inverse] > 1)
    order = repeated[np.argsort(inverse[repeated], kind="stable")]
    across = within = conflicts = 0
    shared: dict[tuple[int, int], int] = {}
    for same in np.split(order, np.flatnonzero(np.diff(inverse[order])) + 1) if len(order) else ():
        clients = np.unique(owner[same])
        within += len(same) - len(clients)
        if len(clients) == 1:
            continue
        across += len(same)
        if len(np.unique(labels[same], axis=0)) > 1:
            conflicts += len(same)
        for i, left in enumerate(clients.tolist()):
            for right in clients[i + 1 :].tolist():
                shared[left, right] = shared.get((left, right), 0) + 1
    most = sorted(shared.items(), key=lambda entry: (-entry[1], entry[0]))
    return Equal(across, within, conflicts, tuple((a, b, n) for (a, b), n in most))


def near_samples(values: Array, owner: Array, codes: Array) -> Near | None:
    """Find near-duplicates across clients; None for too few samples or dimensions.

    Args:
        values: features ``[n, d]``.
        owner: the client of each sample, ``[n]``.
        codes: a hash of each input, ``[n]``. One of equal inputs is compared, since they are
            counted already.
    """
    first = np.sort(np.unique(codes, return_index=True)[1])
    if len(first) < MIN_NEAR or len(np.unique(owner)) < 2:
        return None
    x, clients = torch.from_numpy(values[first]).float(), torch.from_numpy(owner[first])
    nearest, tenth, other, index = _neighbours(x, clients)
    known = (tenth > 0) & (nearest > 0)
    if int(known.sum()) < MIN_NEAR:
        return None
    dimension = intrinsic_dimension(nearest[known], tenth[known])
    if dimension < MIN_DIMENSION:
        return None
    ratio = threshold(len(first), dimension)
    found = np.flatnonzero((tenth > 0) & (other * ratio < tenth))
    found = found[np.argsort((other / np.where(tenth > 0, tenth, 1.0))[found], kind="stable")]
    pairs = tuple((int(first[i]), int(first[index[i]])) for i in found)
    return Near(len(found), len(first), ratio, dimension, pairs)


def intrinsic_dimension(nearest: Array, tenth: Array) -> float:
    """The dimension for which the ratios of first and tenth neighbour distances have their median.

    ``V_1 / V_10 = (r_1 / r_10)^d`` is Beta(1, 9), so its median is ``1 - 2^(-1/9)``.
    """
    median = float(np.median(np.log(tenth / nearest)))
    return float(-np.log(1 - 0.5 ** (1 / (NEIGHBOURS - 1))) / max(median, 1e-9))


def threshold(samples: int, dimension: float) -> float:
    """The ratio of tenth and first neighbour distance that few samples exceed by chance.

    >>> t = threshold(1000, 8.0)
    >>> round(1000 * (1 - (1 - t**-8.0) ** 9), 6)
    0.01
    """
    share = 1 - (1 - EXPECTED_FALSE / samples) ** (1 / (NEIGHBOURS - 1))
    return float(share ** (-1 / dimension))


def _neighbours(x: Tensor, clients: Tensor) -> tuple[Array, Array, Array, Array]:
    """Distances to the first and tenth neighbour and to the first on another client, and its
    position."""
    found: list[list[Tensor]] = [[], [], []]
    for start in range(0, len(x), CHUNK):
        piece = x[start : start + CHUNK]
        distance = torch.cdist(piece, x)
        at = torch.arange(len(piece))
        distance[at, start + at] = torch.inf
        few = distance.topk(NEIGHBOURS, largest=False, sorted=True).indices
        own = clients[start : start + CHUNK, None] == clients
        other = distance.masked_fill_(own, torch.inf).argmin(1)
        for into, part in zip(found, (few[:, 0], few[:, -1], other), strict=True):
            into.append(part)
    index = [torch.cat(parts) for parts in found]
    # again without the cancellation of a product of matrices, which matters for tiny distances
    exact = [(x - x[i]).norm(dim=1).numpy() for i in index]
    return exact[0], exact[1], exact[2], index[2].numpy()
