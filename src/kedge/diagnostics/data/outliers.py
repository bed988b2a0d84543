"""What stands out: clients that stand apart, columns of tables that do, and duplicates across
clients.

Equal samples are found by hash, near-duplicates by nearest neighbours.
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
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kedge.diagnostics.data.features import Shift
from kedge.diagnostics.data.labels import LabelSkew
from kedge.diagnostics.data.sample import SIGNIFICANT, FeatureGroup

LIMIT = 3.5  # robust score, as Iglewicz and Hoaglin (1993) recommend
MIN_CLIENTS = 3  # of two clients, neither stands apart from the other
MIN_LABELS, MIN_FEATURES = 0.2, 0.25  # beyond the median client; less is not worth a word
MIN_COLUMN = 0.2  # standard deviations
ALPHA = 0.01  # of all clients and columns together

NEIGHBOURS = 10
EXPECTED_FALSE = 0.01  # near-duplicates that data without any would show
MAX_NEAR = 10_000  # samples that are compared with each other
MIN_NEAR = 50  # fewer have no neighbourhoods
MIN_DIMENSION = 4.0  # below it, rounded columns look like near-duplicates
CHUNK = 1000

Array = npt.NDArray[Any]


def robust_scores(values: npt.ArrayLike, noise: npt.ArrayLike = 0.0) -> Array:
    """How far each value is above the median, in robust standard deviations.

    The unit is ``sqrt((1.4826 MAD)^2 + noise^2)``: values that agree up to their noise have small
    scores even where their median absolute deviation is tiny.

    Args:
        values: one number per client, ``[K]``; NaN is left out.
        noise: standard deviation of each by chance.

    >>> robust_scores([1.0, 2.0, 3.0, 4.0, 100.0]).round(2).tolist()
    [-1.35, -0.67, 0.0, 0.67, 65.43]
    """
    values = np.asarray(values, np.float64)
    middle = np.nanmedian(values)
    unit = 1.4826 * np.nanmedian(np.abs(values - middle))
    return (values - middle) / np.maximum(np.hypot(unit, noise), 1e-12)


class Apart(NamedTuple):
    """Robust scores of all clients, and those that stand apart."""

    labels: Array  # [K]
    features: Array  # [K]
    found: tuple[tuple[int, str], ...]  # client and reason, the furthest first


def stand_apart(labels: LabelSkew, shift: Shift) -> Apart:
    """Clients whose labels or features are further from the rest than those of other clients.

    Scores are of squared distances beyond chance, whose noise is known, too. A client must have a
    high score, be far from the median client, and be further than the furthest one by chance. How
    far its labels are is measured to the *other* clients: of few clients, each one is a good part
    of the pooled labels itself.
    """
    own = labels.distance**2 - labels.chance**2
    by_label = robust_scores(own, 2 * labels.chance * labels.chance_sd)
    squares = shift.raw**2 - shift.chance**2
    by_feature = np.zeros_like(by_label)
    if not np.isnan(squares).all():
        by_feature = np.nan_to_num(robust_scores(squares, shift.noise))
    of_labels = "targets" if labels.kind == "targets" else "labels"
    far = {
        of_labels: (by_label > LIMIT) & (_beyond(labels.to_others) > MIN_LABELS),
        "features": (by_feature > LIMIT) & (_beyond(shift.client) > MIN_FEATURES),
    }
    far[of_labels] &= labels.client_p <= SIGNIFICANT
    far["features"] &= shift.client_p <= SIGNIFICANT
    if len(by_label) < MIN_CLIENTS:
        return Apart(by_label, by_feature, ())
    score = np.maximum(by_label, by_feature)
    chosen = np.flatnonzero(far[of_labels] | far["features"])
    found = [
        (int(k), " and ".join(reason for reason in far if far[reason][k]))
        for k in chosen[np.argsort(-score[chosen], kind="stable")]
    ]
    return Apart(by_label, by_feature, tuple(found))


def _beyond(values: Array) -> Array:
    """How far each value is above the median; values that are not known are at it."""
    known = values[~np.isnan(values)]
    return np.nan_to_num(values - np.median(known)) if len(known) else np.zeros_like(values)


class ColumnShift(NamedTuple):
    """A column of a table whose mean on a client is unlike that on all others."""

    column: int
    client: int
    shift: float  # in standard deviations within classes
    own: float  # mean on the client
    others: float


def shifted_columns(x: Array, owner: Array, groups: Sequence[FeatureGroup]) -> list[ColumnShift]:
    """Columns that differ between clients within classes, the furthest first.

    Means of a client and of all others are compared within each class, and averaged over classes
    with the weights ``n m / (n + m)``. The furthest client of a column is then left out of the
    others, so that it does not make them differ in turn. What differs by less than 0.2 standard
    deviations is left out, and what may be chance: the level is 0.01 for all clients and columns
    together (Bonferroni).

    Args:
        x: the columns, ``[n, D]``.
        owner: client of each row, ``[n]``.
        groups: the classes.
    """
    clients = np.unique(owner)
    counts, sums, squares = _cells(x.astype(np.float64), owner, groups, clients)
    means = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
    freedom = counts.sum() - (counts > 0).sum()  # every cell has a mean of its own
    if freedom < 1:
        return []
    within = (squares - counts * means**2).sum((0, 1)) / freedom
    spread = np.sqrt(np.maximum(within, 0.0))
    limit = NormalDist().inv_cdf(1 - ALPHA / 2 / (len(clients) * x.shape[1]))
    active = np.ones((len(clients), 1, x.shape[1]))
    found: list[ColumnShift] = []
    while True:
        n = counts * active
        m = n.sum(0) - n
        others = np.divide((sums * active).sum(0) - sums * active, m, out=means * 0, where=m > 0)
        weight = np.divide(n * m, n + m, out=np.zeros_like(m), where=m > 0)  # [K, G, D]
        total = weight.sum(1)
        gap = (weight * (means - others)).sum(1) / np.maximum(total, 1e-12)
        shift = np.divide(gap, spread, out=np.zeros_like(gap), where=spread > 1e-9)
        far = (np.abs(shift) * np.sqrt(total) > limit) & (np.abs(shift) >= MIN_COLUMN)
        furthest = np.where(far, np.abs(shift), 0.0).argmax(0)
        columns = np.flatnonzero(far.any(0))
        if not len(columns):
            return sorted(found, key=lambda c: -abs(c.shift))
        for j in columns:
            k = furthest[j]
            rest = np.isin(owner, clients[np.flatnonzero(active[:, 0, j])]) & (owner != clients[k])
            own, other = x[owner == clients[k], j].mean(), x[rest, j].mean()
            by = float(shift[k, j])
            found.append(ColumnShift(int(j), int(clients[k]), by, float(own), float(other)))
            active[k, 0, j] = 0.0


def _cells(
    x: Array, owner: Array, groups: Sequence[FeatureGroup], clients: Array
) -> tuple[Array, Array, Array]:
    """Counts ``[K, G, 1]``, sums and sums of squares ``[K, G, D]`` of every client and class."""
    counts = np.zeros((len(clients), len(groups), 1))
    sums, squares = np.zeros((2, len(clients), len(groups), x.shape[1]))
    for g, group in enumerate(groups):
        for k, client in enumerate(clients):
            own = x[group.members[owner[group.members] == client]]
            counts[k, g] = len(own)
            sums[k, g], squares[k, g] = own.sum(0), (own**2).sum(0)
    return counts, sums, squares


# -- duplicates -----------------------------------------------------------------------------------


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
