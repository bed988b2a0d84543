"""Features of samples, and their shift: how far a client's features are from those of the other
clients, class by class, and how much of it is chance.

The feature extractor is fixed: the same features for the same inputs, without training or
downloads.

Images, volumes and series pass through a small convolutional network with random weights from a
fixed seed. Random convolutions respond to edges and textures and pool them by place, so they tell
apart what a trained first layer would (Saxe et al., ICML 2011), and distances in such features rank
distributions of images much like those in features of trained networks (Naeem et al., ICML 2020,
arXiv:2002.09797). Unlike a trained network they favour no dataset. Coarse means of the inputs
are added, since the filters have zero mean and do not see brightness. Tables are their standardised
columns. Tokens are counted in hashed buckets; roots of the shares, so that Euclidean distances are
Hellinger's.

All are then reduced by a principal component analysis of the pooled samples.

A cell is the samples of one class on one client. Its distance is the sliced 2-Wasserstein distance
to the samples of that class on all other clients, along directions that are scaled to unit
standard deviation within classes: 0.5 is a shift by half the spread of a class. A cell of n
samples is at some distance from the others by chance. That is measured by drawing n samples of the
class from all clients at random, and is taken off in squares, since W2^2 of samples exceeds that of
their distributions by a bias that depends on n alone. Cells are averaged with the weights
n m / (n + m), for m samples on the other clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.data.federation import Federation
from kedge.diagnostics.data.sample import FeatureGroup, p_of_largest, p_value

SEED = 0x6B65  # of the filters
DIMENSIONS = 32  # principal components, at most
EXPLAINED = 0.99  # share of the variance that they keep, if fewer are enough
ROWS = 512  # samples at once
SIDE = {1: 64, 2: 32, 3: 16}  # larger inputs are averaged down to it, by spatial dimensions
KERNEL = {1: 9, 2: 5, 3: 3}
FILTERS = (24, 48)
BUCKETS = 512  # of token ids

DIRECTIONS = 32
DRAWS = 199  # random cells of each size
MIN_CELL = 5  # samples of a cell that is shown by itself
MAX_CELL = 100  # samples of a cell that are compared, at most
TRANSPORT_CELL = 100  # the same for exact transport
TRANSPORT_DRAWS = 12
TRANSPORT_CLIENTS = 100

Array = npt.NDArray[Any]


class SampleFeatures(NamedTuple):
    """Features of some samples."""

    values: Array  # float32 [n, d]
    words: str  # how they were made


def features_of(federation: Federation, rows: Tensor) -> SampleFeatures:
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
    return SampleFeatures(reduced.astype(np.float32), f"{words}, {reduced.shape[1]} components")


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


# -- distances of samples [n, d], all with the same weight ----------------------------------------


def wasserstein(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """The Wasserstein distance of two samples of equal size: ``min_J E_J |x - x'|``, exactly.

    Args:
        a, b: samples ``[n, d]``.

    >>> wasserstein([[0.0, 0.0], [1.0, 0.0]], [[1.0, 3.0], [0.0, 3.0]])
    3.0
    """
    from scipy.optimize import linear_sum_assignment  # slow to import
    from scipy.spatial.distance import cdist

    cost = cdist(np.asarray(a, np.float64), np.asarray(b, np.float64))
    return float(cost[linear_sum_assignment(cost)].mean())


def unit_directions(count: int, dim: int, seed: int = 0) -> Array:
    """Random unit vectors ``[count, dim]``, uniform on the sphere; both signs if ``dim`` is 1."""
    drawn = np.random.default_rng(seed).standard_normal((count, dim))
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def squared_w2(a: Array, b: Array) -> Array:
    """``W2^2`` in one dimension of sorted samples ``[..., n]`` and ``[..., m]``."""
    n, m = a.shape[-1], b.shape[-1]
    if n == m:
        return ((a - b) ** 2).mean(-1)
    left, right, width = _steps(n, m)
    return ((a[..., left] - b[..., right]) ** 2) @ width.astype(a.dtype)


@lru_cache(maxsize=4096)
def _steps(n: int, m: int) -> tuple[Array, Array, Array]:
    """Where the quantile functions of n and m samples are constant: both indices, and the width.

    Ends of the steps are multiples of 1/(n m), kept as integers so that no step is lost.
    """
    ends = np.union1d(np.arange(1, n + 1) * m, np.arange(1, m + 1) * n)
    starts = np.concatenate([[0], ends[:-1]])
    return starts // m, starts // n, (ends - starts) / (n * m)


class Conditional(NamedTuple):
    """A conditional distance, and the share of the samples whose class both sides have."""

    value: float  # NaN without a common class
    covered: float


def weighted(weights: Array, values: Array) -> Conditional:
    """The mean of distances within classes by weights that sum to one over all classes."""
    covered = float(weights.sum())
    return Conditional(float(weights @ values) / covered if covered else float("nan"), covered)


# -- the shift of features ------------------------------------------------------------------------


@dataclass(frozen=True)
class Shift:
    """The feature shift of a federation; distances in standard deviations within classes.

    Attributes:
        client: shift of each client beyond chance, ``[K]``; NaN where nothing can be compared.
        raw, chance: the distance as it is and its mean by chance, root mean squares, ``[K]``.
        noise: standard deviation of ``raw^2`` by chance, ``[K]``.
        group: shift of each class beyond chance, ``[G]``.
        apart: the client that adds most to the shift of each class, ``[G]``; -1 for none.
        cells: shift of each class on each client beyond chance, ``[K, G]``; NaN for a cell with
            fewer than 5 samples, of which chance is most.
        overall: shift beyond chance over all clients.
        p: share of random draws with as large an overall shift.
        client_p: share of random draws with a client as far as this one, ``[K]``.
    """

    client: Array
    raw: Array
    chance: Array
    noise: Array
    group: Array
    apart: Array
    cells: Array
    overall: float
    p: float
    client_p: Array


@dataclass
class Cells:
    """Projections of the samples, the cells, and random cells of the same sizes.

    Args:
        values: features ``[n, d]``.
        owner: client of each sample, ``[n]``.
        groups: the classes.
        clients: number of clients.
        seed: of the random cells.
    """

    values: Array
    owner: Array
    groups: Sequence[FeatureGroup]
    clients: int
    seed: int = 0
    _orders: dict[int, Array] = field(default_factory=dict, repr=False)
    _others: dict[tuple[int, int], Array] = field(default_factory=dict, repr=False)
    _drawn: dict[tuple[int, int, int], Array] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.values = scaled_within(self.values, self.groups)
        directions = unit_directions(DIRECTIONS, self.values.shape[1]).astype(np.float32)
        projected = self.values.astype(np.float32) @ directions.T  # [n, L]
        self.projected = projected / spread_within(projected, self.groups)

    def pairs(self, group: int) -> list[tuple[int, Array, Array]]:
        """Client, own samples and those of all others, for every cell of a group."""
        members = self.groups[group].members
        owner = self.owner[members]
        found = []
        for client in np.unique(owner):
            own, others = members[owner == client], members[owner != client]
            if len(others):
                found.append((int(client), own, others))
        return found

    def thinned(self, own: Array, others: Array, most: int) -> tuple[Array, Array]:
        """At most ``most`` samples of either side; sizes are rounded so that few are distinct."""
        size, rest = (_rounded(min(len(rows), most)) for rows in (own, others))
        return (
            own if size == len(own) else self.rng.choice(own, size, replace=False),
            others if rest == len(others) else self.rng.choice(others, rest, replace=False),
        )

    def squared(self, own: Array, others: Array) -> float:
        """Mean of W2^2 over the directions."""
        left, right = (np.sort(self.projected[rows].T, axis=-1) for rows in (own, others))
        return float(squared_w2(left, right).mean())

    def by_chance(self, group: int, size: int, rest: int) -> Array:
        """The same of random cells of the group and ``rest`` others, ``[draws]``."""
        if (group, size, rest) not in self._drawn:
            if (group, rest) not in self._others:
                self._others = {k: v for k, v in self._others.items() if k[0] == group}
                self._others[group, rest] = self._sorted(group, 0, rest)
            own = self._sorted(group, rest, rest + size)
            self._drawn[group, size, rest] = squared_w2(own, self._others[group, rest]).mean(-1)
        return self._drawn[group, size, rest]

    def _sorted(self, group: int, start: int, stop: int) -> Array:
        """Sorted projections of some samples of a group in random orders, ``[R, L, n]``."""
        if group not in self._orders:
            members = self.groups[group].members
            orders = self.rng.random((DRAWS, len(members))).argsort(1)[:, : 2 * MAX_CELL]
            self._orders[group] = members[orders]
        rows = self._orders[group][:, start:stop]
        return np.sort(self.projected[rows].transpose(0, 2, 1), axis=-1)


def feature_shift(cells: Cells) -> Shift:
    """Measure the feature shift of all clients and classes."""
    clients, groups = cells.clients, len(cells.groups)
    weight, found, expected = np.zeros((3, clients, groups))
    noise, sizes = np.zeros((clients, DRAWS)), np.zeros((clients, groups))
    for g in range(groups):
        for client, own, others in cells.pairs(g):
            sizes[client, g] = len(own)
            weight[client, g] = len(own) * len(others) / (len(own) + len(others))
            own, others = cells.thinned(own, others, MAX_CELL)
            found[client, g] = cells.squared(own, others)
            chance = cells.by_chance(g, len(own), len(others))
            expected[client, g] = chance.mean()
            # cells share random draws, so that their order is mixed to keep them independent
            noise[client] += weight[client, g] * (cells.rng.permutation(chance) - chance.mean())
    each = np.maximum(weight.sum(1, keepdims=True), 1e-12)  # [K, 1]
    every = max(float(weight.sum()), 1e-12)
    excess, known = found - expected, weight.sum(1) > 0
    squares = (weight / each * excess).sum(1)
    overall = float((weight * excess).sum() / every)
    group = _root((weight * excess).sum(0) / np.maximum(weight.sum(0), 1e-12))
    roots = _root(excess)
    return Shift(
        client=np.where(known, _root(squares), np.nan),
        raw=np.where(known, _root((weight / each * found).sum(1)), np.nan),
        chance=np.where(known, _root((weight / each * expected).sum(1)), np.nan),
        noise=(noise / each).std(-1),
        group=group,
        apart=np.where(group > 0, (weight * roots).argmax(0), -1),
        cells=np.where((weight > 0) & (sizes >= MIN_CELL), roots, np.nan),
        overall=float(_root(overall)),
        p=p_value(overall, noise.sum(0) / every),
        client_p=p_of_largest(squares, (noise / each).T),
    )


class ConditionalDistances(NamedTuple):
    """FedImpro's conditional Wasserstein distance of each client to all others."""

    value: Array  # [K], in root mean square distances of a class to its mean; NaN if not measured
    chance: Array  # [K], of random cells of the same sizes
    covered: Array  # [K], share of the samples whose class both sides have


def conditional_distances(cells: Cells, shares: Array) -> ConditionalDistances:
    """``C_d(D_k, D without D_k)`` of each client, by exact transport between sub-samples.

    ``C_d(D, D') = 1/2 E_{y~D} W(D|y, D'|y) + 1/2 E_{y~D'} W(D|y, D'|y)``: the distance within
    each class, averaged by the label shares of either side. Tang et al., "FedImpro", ICLR 2024,
    arXiv:2402.07011, Definition 4.1.

    Deviations: the definition has no value for a class that one side lacks. Such classes are left
    out, the weights of the others are scaled up, and ``covered`` says how much is left.

    Args:
        cells: the features.
        shares: half the share of each class on the client and half that on all others, ``[K, G]``.
    """
    clients, groups = cells.clients, len(cells.groups)
    distance, chance = np.full((2, clients, groups), np.nan)
    asked = np.unique(cells.owner)
    if len(asked) > TRANSPORT_CLIENTS:
        asked = np.sort(cells.rng.choice(asked, TRANSPORT_CLIENTS, replace=False))
    for g in range(groups):
        memory: dict[int, float] = {}
        for client, own, others in cells.pairs(g):
            if client not in asked:
                continue
            own, others = cells.thinned(own, others, TRANSPORT_CELL)
            size = min(len(own), len(others))
            distance[client, g] = wasserstein(cells.values[own[:size]], cells.values[others[:size]])
            if size not in memory:
                memory[size] = _chance_of_transport(cells, g, size)
            chance[client, g] = memory[size]
    values, levels, covered = np.full((3, clients), np.nan)
    for k in asked:
        known = ~np.isnan(distance[k])
        values[k], covered[k] = weighted(shares[k][known], distance[k][known])
        levels[k] = weighted(shares[k][known], chance[k][known]).value
    return ConditionalDistances(values, levels, covered)


def _chance_of_transport(cells: Cells, group: int, size: int) -> float:
    members, found = cells.groups[group].members, []
    for _ in range(TRANSPORT_DRAWS):
        picks = cells.values[cells.rng.choice(members, 2 * size, replace=False)]
        found.append(wasserstein(picks[:size], picks[size:]))
    return float(np.mean(found))


def scaled_within(values: Array, groups: Sequence[FeatureGroup]) -> Array:
    """Features in units of the root mean square distance of a sample to the mean of its class."""
    squares = sum(((values[g.members] - values[g.members].mean(0)) ** 2).sum() for g in groups)
    count = sum(len(g.members) for g in groups)
    unit = np.sqrt(squares / max(count, 1))
    return values / unit if unit > 1e-12 else values


def spread_within(projected: Array, groups: Sequence[FeatureGroup]) -> Array:
    """Standard deviation within classes along each direction, ``[L]``."""
    squares = sum(
        ((projected[g.members] - projected[g.members].mean(0)) ** 2).sum(0) for g in groups
    )
    spread = np.sqrt(squares / max(sum(len(g.members) for g in groups), 1))
    return np.where(spread > 1e-12, spread, 1.0)


def _rounded(size: int) -> int:
    """A size on a grid of steps of a fifth, so that random cells serve several clients."""
    return size if size < 10 else int(10 * 1.2 ** int(np.log(size / 10) / np.log(1.2) + 1e-9))


def _root(squares: Any) -> Any:
    return np.sqrt(np.maximum(squares, 0.0))
