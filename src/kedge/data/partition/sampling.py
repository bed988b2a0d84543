"""Random draws of the partitions: client sizes, classes, and samples by counts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kedge.data.partition.registries import FloatArray, IntArray
from kedge.errors import IncompatibleError


def class_codes(labels: npt.NDArray[np.generic]) -> IntArray:
    """Labels ``[N]`` as consecutive codes 0..C-1 of the C classes that occur.

    Raises:
        IncompatibleError: the labels are not one whole number per sample.
    """
    if labels.ndim == 1 and labels.dtype.kind in "iub":
        codes: IntArray = np.unique(labels, return_inverse=True)[1]
        return codes
    if labels.ndim == 2 and labels.shape[1] == 1:
        found = f"these have shape {labels.shape}; flatten them with labels.ravel()"
    elif labels.ndim != 1:
        found = f"these have shape {labels.shape}"
    else:
        found = f"these are {'real numbers' if labels.dtype.kind == 'f' else labels.dtype}"
    raise IncompatibleError(
        f"it needs one whole-number class per sample, but {found}. "
        "For other labels use iid, quantity_lognormal, quantity_powerlaw or silos"
    )


def equal_sizes(samples: int, clients: int) -> IntArray:
    """Client sizes that differ by at most one, in descending order."""
    return samples // clients + (np.arange(clients) < samples % clients).astype(np.int64)


def lognormal_sizes(rng: np.random.Generator, samples: int, clients: int, sigma: float) -> IntArray:
    """Client sizes in proportion to exp(N(0, sigma^2)), each at least 1."""
    exponent = min(sigma, 1e300) * rng.standard_normal(clients)
    return proportional_sizes(np.exp(exponent - exponent.max()), samples)


def proportional_sizes(weights: FloatArray, samples: int) -> IntArray:
    """One sample per client, and the rest in proportion to ``weights`` by largest remainder."""
    rest = samples - len(weights)
    share = weights / weights.sum() * rest
    sizes: IntArray = np.floor(share).astype(np.int64)
    largest = np.argsort(sizes - share, kind="stable")[: rest - sizes.sum()]
    sizes[largest] += 1
    return sizes + 1


def samples_by_client(owner: IntArray, clients: int) -> list[IntArray]:
    """The sorted samples of each client, from the client of each sample ``[N]`` (-1: none)."""
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.searchsorted(owner[order], np.arange(clients + 1)))[1:-1]


def deal(rng: np.random.Generator, codes: IntArray, counts: IntArray) -> list[IntArray]:
    """Shuffle the samples of each class and deal them by ``counts`` ``[clients, classes]``."""
    clients, classes = counts.shape
    order = rng.permutation(len(codes))
    order = order[np.argsort(codes[order], kind="stable")]
    owner = np.empty(len(codes), dtype=np.int64)
    owner[order] = np.repeat(np.tile(np.arange(clients), classes), counts.T.ravel())
    return samples_by_client(owner, clients)


def arrivals(rng: np.random.Generator, sizes: IntArray) -> IntArray:
    """The client of each turn ``[N]``, where every turn goes to a uniform client not yet full.

    This is the order of events of independent Poisson processes of equal rate, each stopped after
    ``sizes[k]`` events: the next event is equally likely to come from any client still running.
    """
    client = np.repeat(np.arange(len(sizes)), sizes)
    clock = np.cumsum(rng.standard_exponential(len(client)))
    start = np.concatenate([[0.0], clock])[np.cumsum(sizes) - sizes]
    return client[np.argsort(clock - start[client], kind="stable")]


def draw_classes(
    rng: np.random.Generator, priors: FloatArray, turns: IntArray, class_sizes: IntArray
) -> IntArray:
    """The class of each turn: drawn from its client's prior, redrawn if the class is exhausted.

    All turns are drawn at once. Then, in the order in which the classes are exhausted, the turns
    that came too late are redrawn. A turn whose prior has no mass on the classes left is drawn
    uniformly from them.

    Args:
        rng: the random stream.
        priors: class probabilities of each client, ``[clients, classes]``.
        turns: the client of each turn, ``[T]``.
        class_sizes: available samples of each class, ``[classes]``.
    """
    left = class_sizes > 0
    drawn = _draw_once(rng, priors, left, turns)
    while left.any():
        order = np.argsort(drawn, kind="stable")
        count = np.bincount(drawn, minlength=len(class_sizes))
        exhausted = np.flatnonzero(left & (count >= class_sizes))
        if not len(exhausted):
            break
        # the turn that takes the last sample of each exhausted class
        last = order[(np.cumsum(count) - count + class_sizes - 1)[exhausted]]
        first = exhausted[last.argmin()]
        left[first] = False
        late = np.flatnonzero(drawn == first)[class_sizes[first] :]
        if len(late):
            drawn[late] = _draw_once(rng, priors, left, turns[late])
    return drawn


def _draw_once(
    rng: np.random.Generator, priors: FloatArray, left: npt.NDArray[np.bool_], turns: IntArray
) -> IntArray:
    classes = np.flatnonzero(left)
    prior = priors[:, classes]
    prior[prior.sum(axis=1) <= 0] = 1.0
    edges = np.cumsum(prior, axis=1)
    edges = edges / edges[:, -1:] + np.arange(len(prior))[:, None]  # client k: [k, k + 1)
    position = np.searchsorted(edges.ravel(), rng.random(len(turns)) + turns, side="right")
    drawn: IntArray = classes[np.minimum(position - turns * len(classes), len(classes) - 1)]
    return drawn


def capped_counts(shares: FloatArray, class_sizes: IntArray) -> IntArray:
    """Divide each class by its shares; a client with its fair share gets no more.

    Class by class, the share of a client that already has N/M samples or more is set to zero, and
    the others are renormalised. Cuts are rounded down. If all shares of the clients below the cap
    are zero, these clients divide the class equally.

    Args:
        shares: ``[draws, classes, clients]``.
        class_sizes: samples of each class, ``[classes]``.

    Returns:
        Counts ``[draws, clients, classes]``.
    """
    draws, classes, clients = shares.shape
    counts = np.empty((draws, clients, classes), dtype=np.int64)
    sizes = np.zeros((draws, clients), dtype=np.int64)
    for c in range(classes):
        below_cap = sizes < class_sizes.sum() / clients
        share = np.where(below_cap, shares[:, c], 0.0)
        share = np.where(share.sum(axis=1, keepdims=True) > 0, share, below_cap)
        edges = np.cumsum(share, axis=1)
        cuts = (edges / edges[:, -1:] * class_sizes[c]).astype(np.int64)
        counts[:, :, c] = np.diff(cuts, axis=1, prepend=0)
        sizes += counts[:, :, c]
    return counts


def block_sizes(cells: int, budget: int = 20_000_000, block: int = 200_000) -> Iterator[int]:
    """Block sizes for repeated draws of ``cells`` numbers; all block_sizes take about a second.

    Blocks double in size, since the first draws often succeed. ``budget`` bounds the numbers drawn
    in total, ``block`` those drawn at once.
    """
    rest, size = min(max(10, budget // cells), 100_000), 1
    while rest > 0:
        yield min(size, rest)
        rest -= size
        size = max(1, min(2 * size, block // cells))
