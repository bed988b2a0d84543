"""Partitions and feature shifts, each drawn from a seed.

Label skew: the shares of the classes differ between clients. The first four are all
"Dirichlet(alpha)" in their papers; a smaller alpha is always more skewed, but equal alphas are not
equally skewed. Classes are the labels that occur, in ascending order. The other partitions do not
depend on the labels and work for classes, for several labels per sample and for real-valued
targets. A shift changes the inputs of each client and is added to any partition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt

from kedge.data.partition.grammar import partitions, shifts
from kedge.data.partition.partition import FloatArray, IntArray
from kedge.errors import DataError, IncompatibleError, PartitionError
from kedge.schema import Count, Doc, NotNegative, Positive

Rng = np.random.Generator
Labels = npt.NDArray[np.generic]
Parts = list[IntArray]  # the samples of each client
Alpha = Annotated[Positive, Doc("concentration of the Dirichlet draw; smaller is more skewed")]
Minimum = Annotated[
    Count | Literal["classes"], Doc("fewest samples of a client; classes: one per class")
]
Spread = Annotated[NotNegative, Doc("spread of the log-normal sizes; 0: equal sizes")]
Prior = Annotated[
    Literal["proportions", "ones"], Doc("what alpha multiplies: shares of the classes, or ones")
]
Shards = Annotated[Count, Doc("classes that a client holds")]
SizeSpread = Annotated[NotNegative, Doc("spread of the sizes; 0: equal sizes")]
Exponent = Annotated[NotNegative, Doc("of the power law; 0: equal sizes")]
Step = Annotated[float, Doc("degrees between one client and the next")]
AngleAlpha = Annotated[Positive, Doc("concentration of a client's angles; smaller: fewer")]
Deviation = Annotated[NotNegative, Doc("standard deviation of the last client's noise")]
ANGLES = np.arange(0.0, 136.0, 15.0)  # 0, 15, ..., 135 degrees

# -- label skew -----------------------------------------------------------------------------------


@partitions.register("class_dirichlet_capped")
def class_dirichlet_capped(
    labels: Labels, clients: int, rng: Rng, *, alpha: Alpha = 0.1, minimum: Minimum = 10
) -> Parts:
    """Each class is cut among the clients by shares from Dir(alpha); sizes are very unequal.

    A client that already holds N/M samples gets no more, and the whole is drawn again until the
    smallest client holds ``minimum`` samples (``classes``: as many as there are classes).

    Li et al., Federated Learning on Non-IID Data Silos, ICDE 2022, arXiv:2102.02079. Used with
    minimum 10 by MOON and FedCOG (NIID-1), with ``classes`` by FedImpro.
    """
    codes = class_codes(labels)
    class_sizes = np.bincount(codes)
    min_size = len(class_sizes) if minimum == "classes" else minimum
    if min_size * clients > len(codes):
        fewer = f"at most {len(codes) // min_size} clients or " if len(codes) >= min_size else ""
        raise PartitionError(
            f"minimum={min_size} for each client needs {min_size * clients} samples; "
            f"use {fewer}minimum={len(codes) // clients}"
        )
    counts, best, draws = _redraw(rng, class_sizes, clients, alpha, min_size)
    if counts is None:
        raise PartitionError(
            f"none of {draws} draws gave every client {min_size} samples; the best gave its "
            f"smallest client {best}. Use a larger alpha or fewer clients"
            + (f", or minimum={best}" if best else "")
        )
    return deal(rng, codes, counts)


@partitions.register("client_dirichlet_balanced")
def client_dirichlet_balanced(
    labels: Labels, clients: int, rng: Rng, *, alpha: Alpha = 0.3, sigma: Spread = 0.0
) -> Parts:
    """Each client has its own class prior from Dir(alpha); sizes are equal, or log-normal (sigma).

    One sample at a time goes to a client drawn from those not yet full, its class from the client's
    prior, drawn again if that class is used up. A client whose prior has no mass on the classes
    that are left draws from them uniformly.

    Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021, arXiv:2111.04263.
    Used by FedDyn, FedDC, FedSpeed and FLBoost. *Deviations*: samples that do not divide evenly are
    dealt out (sizes differ by at most one) instead of dropped.
    """
    codes = class_codes(labels)
    class_sizes = np.bincount(codes)
    if sigma > 0:
        sizes = lognormal_sizes(rng, len(codes), clients, sigma)
    else:
        sizes = equal_sizes(len(codes), clients)
    priors = rng.dirichlet(np.full(len(class_sizes), alpha), size=clients)  # [M, C]
    turns = arrivals(rng, sizes)
    drawn = draw_classes(rng, priors, turns, class_sizes)
    counts = np.bincount(turns * len(class_sizes) + drawn, minlength=clients * len(class_sizes))
    return deal(rng, codes, counts.reshape(clients, len(class_sizes)))


@partitions.register("client_dirichlet_sequential")
def client_dirichlet_sequential(
    labels: Labels, clients: int, rng: Rng, *, alpha: Alpha = 0.1, prior: Prior = "proportions"
) -> Parts:
    """Clients are filled one after the other, each from its own class prior q; sizes are equal.

    q ~ Dir(alpha p), where p are the proportions of the classes among the samples that are left, or
    ones. A class that runs out is zeroed in q and q renormalised. Proportions add up to one, so at
    the same alpha they skew more: C classes have alpha/C each instead of alpha.

    Guo et al., FedBR, ICML 2023, arXiv:2205.13462: proportions for MNIST and CIFAR-10, ones for
    CIFAR-100. *Deviations*: samples that do not divide evenly are dealt out, sizes differ by one.
    """
    codes = class_codes(labels)
    remaining = np.bincount(codes)  # samples of each class, [C]
    classes = len(remaining)
    counts = np.zeros((clients, classes), dtype=np.int64)
    for k, size in enumerate(equal_sizes(len(codes), clients)):
        left = remaining > 0
        shares = prior == "proportions"
        p = remaining[left] / remaining.sum() if shares else np.ones(left.sum())
        q = np.zeros((1, classes))
        q[0, left] = rng.dirichlet(np.maximum(alpha * p, 1e-300))
        drawn = draw_classes(rng, q, np.zeros(size, dtype=np.int64), remaining)
        counts[k] = np.bincount(drawn, minlength=classes)
        remaining = remaining - counts[k]
    return deal(rng, codes, counts)


@partitions.register("paired_class_dirichlet")
def paired_class_dirichlet(labels: Labels, clients: int, rng: Rng, *, alpha: Alpha = 0.1) -> Parts:
    """The shuffled samples are cut into blocks, and each block among two clients; sizes near equal.

    Inside a block as class_dirichlet_capped, drawn again until the smaller of the two clients holds
    half of its fair share or more.

    As in the PersonalizedFL code (github.com/microsoft/PersonalizedFL). Used by FedTR.
    """
    codes = class_codes(labels)
    if clients % 2:
        raise PartitionError(f"it pairs the clients; use an even number, such as {clients + 1}")
    pair_sizes = equal_sizes(len(codes), clients).reshape(-1, 2).sum(axis=1)
    order = rng.permutation(len(codes))
    parts: Parts = []
    for block in np.split(order, np.cumsum(pair_sizes)[:-1]):
        inside = class_codes(codes[block])
        min_size = max(1, math.ceil(len(block) / 4))
        counts, best, draws = _redraw(rng, np.bincount(inside), 2, alpha, min_size)
        if counts is None:
            raise PartitionError(
                f"none of {draws} draws gave both clients of a pair half of their fair share "
                f"({min_size} of {len(block) // 2}); the best gave {best}. "
                "Use a larger alpha or fewer clients"
            )
        parts += [np.sort(block[part]) for part in deal(rng, inside, counts)]
    return parts


@partitions.register("label_shards")
def label_shards(labels: Labels, clients: int, rng: Rng, *, shards: Shards = 2) -> Parts:
    """Each client holds ``shards`` classes, the same as every (C/shards)-th client; no randomness.

    Client i holds the classes shards * (i mod C/shards) and following. The clients that hold a
    class cut it evenly, in the order of the data. With fewer clients than C/shards, the classes of
    the missing clients are not used.

    Ye et al., FedCOG, ICLR 2024 (NIID-2): 2 of 10 classes, or 10 of 100.
    """
    codes = class_codes(labels)
    class_sizes = np.bincount(codes)
    classes = len(class_sizes)
    divisors = [s for s in range(1, classes + 1) if classes % s == 0]
    if classes % shards:
        what = "more than there are" if shards > classes else "which does not divide them evenly"
        raise PartitionError(
            f"it needs groups of {shards} classes, {what}: the labels have {classes} classes. "
            f"Use shards={' or '.join(map(str, divisors))}"
        )
    groups = classes // shards
    owner = np.full(len(codes), -1, dtype=np.int64)
    for c in range(min(groups, clients) * shards):
        members = np.arange(c // shards, clients, groups)
        owner[codes == c] = members[np.arange(class_sizes[c]) * len(members) // class_sizes[c]]
    parts = samples_by_client(owner, clients)
    for i, part in enumerate(parts):
        if not len(part):
            raise PartitionError(
                f"client {i} would hold no sample: its {shards} classes have fewer samples than "
                "clients. Use fewer clients"
            )
    return parts


# -- independent of the labels ---------------------------------------------------------------------


@partitions.register("central")
def central(labels: Labels, clients: int, rng: Rng) -> Parts:
    """All samples are on one client: centralised training, the upper baseline."""
    if clients != 1:
        raise PartitionError("it has one client; write clients = 1")
    return [np.arange(len(labels))]


@partitions.register("iid")
def iid(labels: Labels, clients: int, rng: Rng) -> Parts:
    """Samples are dealt at random; sizes differ by at most one."""
    return _shuffled(rng, equal_sizes(len(labels), clients))


@partitions.register("quantity_lognormal")
def quantity_lognormal(labels: Labels, clients: int, rng: Rng, *, sigma: SizeSpread = 1.0) -> Parts:
    """Samples are dealt at random; sizes are log-normal, in proportion to exp(N(0, sigma^2))."""
    return _shuffled(rng, lognormal_sizes(rng, len(labels), clients, sigma))


@partitions.register("quantity_powerlaw")
def quantity_powerlaw(labels: Labels, clients: int, rng: Rng, *, exponent: Exponent = 1.5) -> Parts:
    """Samples are dealt at random; the r-th largest client has a size of about r^-exponent."""
    weights = np.arange(1.0, clients + 1.0) ** -exponent
    return _shuffled(rng, proportional_sizes(rng.permutation(weights), len(labels)))


@partitions.register("silos")
def silos(
    labels: Labels, clients: int, rng: Rng, *, groups: npt.NDArray[np.generic] | None = None
) -> Parts:
    """Each group of the data (hospital, user, device) is a client, in the order of their ids."""
    if groups is None:
        raise PartitionError("the data have no groups; give the group id of each sample as groups=")
    ids = np.asarray(groups)
    if ids.shape != (len(labels),):
        raise DataError(f"groups has shape {ids.shape}, but there are {len(labels)} samples")
    missing = sum(g is None or g != g for g in ids.tolist())
    if missing:
        raise DataError(f"{missing} samples have no group (none or nan); drop them or name it")
    if ids.dtype.kind == "O":
        ids = ids.astype(str)
    unique, owner = np.unique(ids, return_inverse=True)
    if len(unique) != clients:
        raise PartitionError(f"the data have {len(unique)} groups; set clients to {len(unique)}")
    return samples_by_client(owner, clients)


# -- feature shift --------------------------------------------------------------------------------


@shifts.register("rotation")
def rotation(sizes: IntArray, rng: Rng, *, step: Step = 15.0) -> dict[str, Any]:
    """Client i's images are rotated by ``step`` * i degrees (FedBR's RotatedMNIST)."""
    return {"rotation": step * np.arange(len(sizes))}


@shifts.register("rotation_dirichlet")
def rotation_dirichlet(sizes: IntArray, rng: Rng, *, alpha: AngleAlpha = 0.1) -> dict[str, Any]:
    """Each image has an angle of 0, 15, ..., 135 degrees, drawn from the prior of its client.

    The priors are drawn from Dir(alpha). FedBR's CIFAR-10: the paper has alpha 1.0, its code 0.1.
    """
    # the sum of all concentrations must be finite
    priors = rng.dirichlet(np.full(len(ANGLES), min(alpha, 1e300)), size=len(sizes))
    return {
        "angles": tuple(rng.choice(ANGLES, size=n, p=q) for n, q in zip(sizes, priors, strict=True))
    }


@shifts.register("noise")
def noise(sizes: IntArray, rng: Rng, *, sigma: Deviation = 0.1) -> dict[str, Any]:
    """Client i of M gets Gaussian noise of standard deviation ``sigma`` * (i + 1) / M.

    Li et al., Federated Learning on Non-IID Data Silos, ICDE 2022, arXiv:2102.02079. *Deviations*:
    the paper calls this the variance; here, as in its code, it is the standard deviation, but the
    last client is not left clean.
    """
    return {"noise": sigma * np.arange(1, len(sizes) + 1) / len(sizes)}


# -- client sizes, classes, and samples by counts --------------------------------------------------


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


def lognormal_sizes(rng: Rng, samples: int, clients: int, sigma: float) -> IntArray:
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


def samples_by_client(owner: IntArray, clients: int) -> Parts:
    """The sorted samples of each client, from the client of each sample ``[N]`` (-1: none)."""
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.searchsorted(owner[order], np.arange(clients + 1)))[1:-1]


def deal(rng: Rng, codes: IntArray, counts: IntArray) -> Parts:
    """Shuffle the samples of each class and deal them by ``counts`` ``[clients, classes]``."""
    clients, classes = counts.shape
    order = rng.permutation(len(codes))
    order = order[np.argsort(codes[order], kind="stable")]
    owner = np.empty(len(codes), dtype=np.int64)
    owner[order] = np.repeat(np.tile(np.arange(clients), classes), counts.T.ravel())
    return samples_by_client(owner, clients)


def arrivals(rng: Rng, sizes: IntArray) -> IntArray:
    """The client of each turn ``[N]``, where every turn goes to a uniform client not yet full.

    This is the order of events of independent Poisson processes of equal rate, each stopped after
    ``sizes[k]`` events: the next event is equally likely to come from any client still running.
    """
    client = np.repeat(np.arange(len(sizes)), sizes)
    clock = np.cumsum(rng.standard_exponential(len(client)))
    start = np.concatenate([[0.0], clock])[np.cumsum(sizes) - sizes]
    return client[np.argsort(clock - start[client], kind="stable")]


def draw_classes(rng: Rng, priors: FloatArray, turns: IntArray, class_sizes: IntArray) -> IntArray:
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
    rng: Rng, priors: FloatArray, left: npt.NDArray[np.bool_], turns: IntArray
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


def _redraw(
    rng: Rng, class_sizes: IntArray, clients: int, alpha: float, min_size: int
) -> tuple[IntArray | None, int, int]:
    """Draw until every client has ``min_size`` samples.

    Returns the counts ``[clients, classes]`` (None if no draw succeeds), the largest minimum client
    size found, and the number of failed draws.
    """
    best = draws = 0
    for block in block_sizes(clients * len(class_sizes)):
        shares = rng.dirichlet(np.full(clients, alpha), size=(block, len(class_sizes)))
        counts = capped_counts(shares, class_sizes)
        smallest = counts.sum(axis=2).min(axis=1)
        if (smallest >= min_size).any():
            return counts[np.argmax(smallest >= min_size)], min_size, draws
        best, draws = max(best, int(smallest.max())), draws + block
    return None, best, draws


def _shuffled(rng: Rng, sizes: IntArray) -> Parts:
    owner = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    return samples_by_client(owner, len(sizes))
