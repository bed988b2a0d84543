"""What the partitions are drawn with: sizes, classes, and dealing out samples by counts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kedge.data.partition.registries import FloatArray, IntArray
from kedge.errors import IncompatibleError


def class_codes(labels: npt.NDArray[np.generic]) -> IntArray:
    """The labels as 0..C-1, where C counts the classes that occur; gaps in the numbering close."""
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
    """Sizes that differ by at most one, the larger ones first."""
    return samples // clients + (np.arange(clients) < samples % clients).astype(np.int64)


def lognormal_sizes(rng: np.random.Generator, samples: int, clients: int, sigma: float) -> IntArray:
    """Sizes in proportion to exp(N(0, sigma^2)), at least one each."""
    exponent = sigma * rng.standard_normal(clients)
    return proportional_sizes(np.exp(exponent - exponent.max()), samples)


def proportional_sizes(weights: FloatArray, samples: int) -> IntArray:
    """One sample each, and the rest in proportion to the weights by largest remainder."""
    rest = samples - len(weights)
    share = weights / weights.sum() * rest
    sizes: IntArray = np.floor(share).astype(np.int64)
    most = np.argsort(sizes - share, kind="stable")[: rest - sizes.sum()]
    sizes[most] += 1
    return sizes + 1


def owned(owner: IntArray, clients: int) -> list[IntArray]:
    """The samples of each client, ascending, from the owner of each sample (-1: nobody)."""
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.searchsorted(owner[order], np.arange(clients + 1)))[1:-1]


def deal(rng: np.random.Generator, codes: IntArray, counts: IntArray) -> list[IntArray]:
    """Deal the shuffled samples of each class out by ``counts`` [clients, classes]."""
    clients, classes = counts.shape
    order = rng.permutation(len(codes))
    order = order[np.argsort(codes[order], kind="stable")]
    owner = np.empty(len(codes), dtype=np.int64)
    owner[order] = np.repeat(np.tile(np.arange(clients), classes), counts.T.ravel())
    return owned(owner, clients)


def arrivals(rng: np.random.Generator, sizes: IntArray) -> IntArray:
    """Whose turn it is, when each turn goes to a client drawn uniformly from those not yet full.

    That is the order of events of independent Poisson processes of equal rates, each stopped after
    its size: whichever clients are still running, the next event is equally likely to be any one's.
    """
    client = np.repeat(np.arange(len(sizes)), sizes)
    clock = np.cumsum(rng.standard_exponential(len(client)))
    start = np.concatenate([[0.0], clock])[np.cumsum(sizes) - sizes]
    return client[np.argsort(clock - start[client], kind="stable")]


def fill(rng: np.random.Generator, priors: FloatArray, turns: IntArray, room: IntArray) -> IntArray:
    """The class each turn takes: from its client's prior, drawn again if that class is used up.

    ``priors`` is [clients, classes], ``room`` the samples left of each class. All turns are drawn
    at once; then, in the order in which the classes run out, the turns that came too late draw
    again. A turn whose prior has no mass on what is left draws uniformly from what is left.
    """
    left = room > 0
    taken = _pick(rng, priors, left, turns)
    while left.any():
        order = np.argsort(taken, kind="stable")
        count = np.bincount(taken, minlength=len(room))
        full = np.flatnonzero(left & (count >= room))
        if not len(full):
            break
        last = order[(np.cumsum(count) - count + room - 1)[full]]  # the turn that empties a class
        first = full[last.argmin()]
        left[first] = False
        late = np.flatnonzero(taken == first)[room[first] :]
        if len(late):
            taken[late] = _pick(rng, priors, left, turns[late])
    return taken


def _pick(
    rng: np.random.Generator, priors: FloatArray, left: npt.NDArray[np.bool_], turns: IntArray
) -> IntArray:
    classes = np.flatnonzero(left)
    prior = priors[:, classes]
    prior[prior.sum(axis=1) <= 0] = 1.0
    edges = np.cumsum(prior, axis=1)
    edges = edges / edges[:, -1:] + np.arange(len(prior))[:, None]  # client k owns [k, k + 1)
    at = np.searchsorted(edges.ravel(), rng.random(len(turns)) + turns, side="right")
    picked: IntArray = classes[np.minimum(at - turns * len(classes), len(classes) - 1)]
    return picked


def capped_counts(shares: FloatArray, room: IntArray) -> IntArray:
    """Cut each class by its shares, where a client that holds its fair share takes no more.

    ``shares`` is [draws, classes, clients], the counts [draws, clients, classes]. Class by class,
    the share of a client that already holds N/M samples or more is set to zero and the others are
    scaled up; cuts are rounded down. Where all shares of the clients with room are zero, these
    clients share the class equally.
    """
    draws, classes, clients = shares.shape
    counts = np.empty((draws, clients, classes), dtype=np.int64)
    held = np.zeros((draws, clients), dtype=np.int64)
    for c in range(classes):
        open_ = held < room.sum() / clients
        share = np.where(open_, shares[:, c], 0.0)
        share = np.where(share.sum(axis=1, keepdims=True) > 0, share, open_)
        edges = np.cumsum(share, axis=1)
        cuts = (edges / edges[:, -1:] * room[c]).astype(np.int64)
        counts[:, :, c] = np.diff(cuts, axis=1, prepend=0)
        held += counts[:, :, c]
    return counts


def blocks(cells: int, budget: int = 20_000_000, block: int = 200_000) -> Iterator[int]:
    """How many draws of ``cells`` numbers to make at a time; all together take about a second."""
    rest, now = min(max(10, budget // cells), 100_000), 1
    while rest > 0:
        yield min(now, rest)
        rest -= now
        now = max(1, min(2 * now, block // cells))
