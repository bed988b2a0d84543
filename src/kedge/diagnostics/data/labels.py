"""Label skew of a federation, how much of it is chance, and how unevenly samples are spread.

Distributions are rows of counts or shares, ``[clients, C]`` or ``[C]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kedge.data.federation import Federation
from kedge.diagnostics.data.sample import p_of_largest, p_value

PERMUTATIONS = 199
FEWEST = 99  # for many samples
MAX_PERMUTED = 2 * 10**7  # labels that are permuted, in all
BINS = 100  # of real targets, for the permutations
DECILES = 10  # bins of real targets for their Jensen-Shannon divergence

Array = npt.NDArray[Any]


def shares(counts: npt.ArrayLike) -> Array:
    """Counts ``[..., C]`` as shares that sum to one; rows of zeros stay zero.

    >>> shares([[3, 1], [0, 0]]).tolist()
    [[0.75, 0.25], [0.0, 0.0]]
    """
    values = np.asarray(counts, dtype=np.float64)
    total = values.sum(-1, keepdims=True)
    return np.divide(values, total, out=np.zeros_like(values), where=total > 0)


def effective_classes(counts: npt.ArrayLike) -> Array:
    """Effective number of classes, ``exp(H(p))`` with the entropy H of the label distribution.

    It is C for C classes of equal size, and 1 for a single class (Hill number of order 1).

    Args:
        counts: samples of each class, ``[..., C]``.

    >>> effective_classes([[5, 5, 0], [10, 0, 0]]).round(6).tolist()
    [2.0, 1.0]
    """
    return np.exp(-_xlogx(shares(counts)).sum(-1))


def earth_movers(counts: npt.ArrayLike, reference: npt.ArrayLike) -> Array:
    """Earth mover's distance of label distributions: ``1/2 sum_c |p_c - q_c|``.

    Classes are nominal, so every two are at distance 1, and the earth mover's distance is the total
    variation, between 0 and 1. Zhao et al. (arXiv:1806.00582) leave out the factor 1/2, so their
    "EMD" is twice this value.

    Args:
        counts: samples of each class, ``[..., C]``.
        reference: the same of the distribution to compare with, ``[C]``.

    >>> earth_movers([[4, 0], [2, 2]], [2, 2]).tolist()
    [0.5, 0.0]
    """
    return 0.5 * np.abs(shares(counts) - shares(reference)).sum(-1)


def jensen_shannon(counts: npt.ArrayLike, reference: npt.ArrayLike) -> Array:
    """Jensen-Shannon divergence of label distributions in bits, between 0 and 1.

    ``JS(p, q) = H((p + q)/2) - H(p)/2 - H(q)/2`` with entropies to base 2. Its root is a metric.

    >>> jensen_shannon([[4, 0], [2, 2]], [0, 4]).round(6).tolist()
    [1.0, 0.311278]
    """
    p, q = shares(counts), shares(reference)
    nats = 0.5 * (_xlogx(p) + _xlogx(q)).sum(-1) - _xlogx((p + q) / 2).sum(-1)
    return np.maximum(nats / np.log(2), 0.0)


def each_label(rates: npt.ArrayLike, reference: npt.ArrayLike, measure: Any) -> Array:
    """A measure of two distributions for several labels per sample: its mean over the labels.

    Every label is a variable of its own that is present with some rate.

    Args:
        rates: share of a client's samples that have each label, ``[..., L]``.
        reference: the same of all samples, ``[L]``.
        measure: :func:`earth_movers` or :func:`jensen_shannon`.

    >>> each_label([[1.0, 0.5]], [0.5, 0.5], earth_movers).tolist()
    [0.25]
    """
    rates, reference = np.asarray(rates, np.float64), np.asarray(reference, np.float64)
    pairs = (np.stack([r, 1 - r], axis=-1) for r in (rates, reference))
    return measure(*pairs).mean(-1)


def target_distance(targets: npt.ArrayLike, reference: npt.ArrayLike) -> float:
    """Earth mover's distance of real targets: ``integral |F - G|``, the mean over outputs.

    Args:
        targets: targets of a client, ``[n]`` or ``[n, outputs]``.
        reference: targets of all clients, ``[m]`` or ``[m, outputs]``.

    >>> target_distance([1.0, 2.0], [2.0, 3.0, 2.0, 3.0])
    1.0
    """
    a, b = (np.asarray(v, np.float64).reshape(len(np.asarray(v)), -1) for v in (targets, reference))
    distances = []
    for left, right in zip(a.T, b.T, strict=True):
        left, right = np.sort(left), np.sort(right)
        every = np.sort(np.concatenate([left, right]))
        steps = every[:-1]
        gap = np.searchsorted(left, steps, "right") / len(left) - np.searchsorted(
            right, steps, "right"
        ) / len(right)
        distances.append(float((np.abs(gap) * np.diff(every)).sum()))
    return float(np.mean(distances))


def _xlogx(p: Array) -> Array:
    return np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), 0.0)


# -- sizes ----------------------------------------------------------------------------------------


def gini(sizes: npt.ArrayLike) -> float:
    """Gini coefficient of the sizes: ``sum_ij |n_i - n_j| / (2 K sum_i n_i)``.

    It is 0 for equal sizes, and 1 - 1/K if one of K clients holds everything.

    >>> gini([10, 10, 10]), gini([0, 0, 0, 12])
    (0.0, 0.75)
    """
    ordered = np.sort(np.asarray(sizes, np.float64))
    count, total = len(ordered), ordered.sum()
    if total == 0:
        return 0.0
    ranks = 2 * np.arange(1, count + 1) - count - 1  # the double sum, in sorted order
    return float((ranks * ordered).sum() / (count * total))


def largest_to_smallest(sizes: npt.ArrayLike) -> float:
    """Size of the largest client over that of the smallest; infinite if one is empty.

    >>> largest_to_smallest([5, 20, 10])
    4.0
    """
    sizes = np.asarray(sizes, np.float64)
    return float(sizes.max() / sizes.min()) if sizes.min() > 0 else float("inf")


def effective_clients(sizes: npt.ArrayLike) -> float:
    """Number of clients of equal size with the same variance of the weighted mean.

    ``(sum n)^2 / sum n^2``, Kish's effective sample size of weights n.

    >>> effective_clients([10, 10, 10]), effective_clients([0, 7])
    (3.0, 1.0)
    """
    sizes = np.asarray(sizes, np.float64)
    return float(sizes.sum() ** 2 / (sizes**2).sum())


# -- a federation ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelSkew:
    """How far the labels of each client are from the pooled labels.

    Sampling noise is measured by permutations: labels are dealt out again at random, with every
    client's number of samples as it is.

    Attributes:
        kind: ``classes``, ``labels`` (several per sample) or ``targets`` (real numbers).
        distance: earth mover's distance of each client, ``[K]``; of targets in their pooled
            standard deviations.
        divergence: Jensen-Shannon divergence of each client in bits, ``[K]``.
        effective: effective number of classes of each client, ``[K]``; NaN for targets.
        chance, chance_sd: mean and standard deviation of ``distance`` under permutation, ``[K]``.
        chance_divergence: mean of ``divergence`` under permutation, ``[K]``.
        chance_effective: mean effective number of classes under permutation, ``[K]``.
        index: mean distance by size, corrected: 0 at chance, 1 if every client had one class. Of
            targets it is the distance beyond chance, in standard deviations. Noise is taken off in
            quadrature: sqrt(d^2 - chance^2), which is zero at chance and d for large d.
        p: share of the permutations with as large a mean distance.
        client_p: share of the permutations with a client as far as this one, ``[K]``.
        sizes: samples of each client, ``[K]``.
        counts: samples of each class on each client, ``[K, C]``; None for targets.
    """

    kind: str
    distance: Array
    divergence: Array
    effective: Array
    chance: Array
    chance_sd: Array
    chance_divergence: Array
    chance_effective: Array
    index: float
    p: float
    client_p: Array
    sizes: Array
    counts: Array | None = None

    @property
    def excess(self) -> Array:
        """The distance of each client beyond its chance level, ``[K]``."""
        return np.sqrt(np.maximum(self.distance**2 - self.chance**2, 0.0))

    @property
    def to_others(self) -> Array:
        """The same to the labels of the other clients, ``[K]``.

        With the share w of a client in all samples, pooled q = w p + (1 - w) r, so that its
        distance to the rest r is that to q divided by 1 - w: all distances here are linear in the
        difference of two distributions.
        """
        share = self.sizes / self.sizes.sum()
        return self.excess / np.maximum(1 - share, 1e-9)


def label_skew(federation: Federation, seed: int = 0) -> LabelSkew:
    """Measure the label skew of a federation; ``seed`` is that of the permutations."""
    y = federation.y[federation.rows].cpu().numpy()
    sizes = np.asarray(federation.sizes)
    task = federation.task
    if task.one_class:
        return skew_of_classes(y, sizes, task.outputs, seed)
    if task.has_classes:
        return skew_of_labels(y, sizes, seed)
    return skew_of_targets(y.reshape(len(y), -1), sizes, seed)


def skew_of_classes(y: Array, sizes: Array, classes: int, seed: int = 0) -> LabelSkew:
    """Label skew of classes ``[N]``, of which the first ``sizes[0]`` are client 0's, and so on."""
    counts = _counts(y, sizes, classes)
    pooled = counts.sum(0)

    def measures(counts: Array) -> tuple[Array, Array, Array]:
        return (
            earth_movers(counts, pooled),
            jensen_shannon(counts, pooled),
            effective_classes(counts),
        )

    drawn = [measures(_counts(y[order], sizes, classes)) for order in _orders(len(y), seed)]
    largest = 1 - ((pooled / pooled.sum()) ** 2).sum()  # mean distance if clients had one class
    return _corrected("classes", sizes, measures(counts), drawn, largest, counts)


def skew_of_labels(y: Array, sizes: Array, seed: int = 0) -> LabelSkew:
    """Label skew of several labels per sample, ``[N, L]`` of 0 and 1."""
    y, starts = np.asarray(y, np.float64), _starts(sizes)
    pooled = y.mean(0)

    def measures(counts: Array) -> tuple[Array, Array, Array]:
        rates = counts / sizes[:, None]
        distance, divergence = (
            each_label(rates, pooled, measure) for measure in (earth_movers, jensen_shannon)
        )
        return distance, divergence, effective_classes(counts)

    counts = np.add.reduceat(y, starts)
    drawn = [measures(np.add.reduceat(y[order], starts)) for order in _orders(len(y), seed)]
    largest = float((2 * pooled * (1 - pooled)).mean())
    return _corrected("labels", sizes, measures(counts), drawn, largest, counts)


def skew_of_targets(y: Array, sizes: Array, seed: int = 0) -> LabelSkew:
    """Label skew of real targets ``[N, outputs]``; distances are in their standard deviations."""
    spread = y.std(0)
    y = (y - y.mean(0)) / np.where(spread > 0, spread, 1.0)
    exact = np.array([target_distance(own, y) for own in np.split(y, _starts(sizes)[1:])])
    fine, coarse = ([_binned(column, n) for column in y.T] for n in (BINS, DECILES))

    def measures(order: Array | slice) -> tuple[Array, Array, Array]:
        distance, divergence = [], []
        for one in fine:
            counts = _counts(one.bins[order], sizes, len(one.centres))
            gaps = np.cumsum(counts / sizes[:, None] - one.shares, axis=1)[:, :-1]
            distance.append(np.abs(gaps) @ np.diff(one.centres))
        for one in coarse:
            counts = _counts(one.bins[order], sizes, len(one.centres))
            divergence.append(jensen_shannon(counts, one.shares))
        nothing = np.full(len(sizes), np.nan)
        return np.mean(distance, axis=0), np.mean(divergence, axis=0), nothing

    drawn = [measures(order) for order in _orders(len(y), seed)]
    return _corrected("targets", sizes, (exact, *measures(slice(None))[1:]), drawn, None, None)


class _Binned(NamedTuple):
    """A column of targets in bins with about as many samples each."""

    bins: Array  # [N]
    centres: Array  # mean of each bin
    shares: Array  # share of each bin


def _binned(column: Array, count: int) -> _Binned:
    edges = np.unique(np.quantile(column, np.linspace(0, 1, count + 1)[1:-1]))
    _, bins, held = np.unique(
        np.searchsorted(edges, column, "right"), return_inverse=True, return_counts=True
    )
    return _Binned(bins, np.bincount(bins, weights=column) / held, held / len(column))


Measures = tuple[Array, Array, Array]  # distance, divergence, effective classes, each [K]


def _corrected(
    kind: str,
    sizes: Array,
    found: Measures,
    drawn: list[Measures],
    largest: float | None,
    counts: Array | None,
) -> LabelSkew:
    distance, divergence, effective = found
    permuted, divergences, effectives = (np.array(one) for one in zip(*drawn, strict=True))
    weights = sizes / sizes.sum()
    mean, means = float(distance @ weights), permuted @ weights
    chance = float(means.mean())
    index = float(np.sqrt(max(mean**2 - chance**2, 0.0)))  # noise adds in quadrature
    if largest is not None:
        room = float(np.sqrt(max(largest**2 - chance**2, 0.0)))
        index = min(index / room, 1.0) if room > 1e-9 else 0.0
    levels = (permuted**2).mean(0)
    return LabelSkew(
        kind,
        distance,
        divergence,
        effective,
        chance=permuted.mean(0),
        chance_sd=permuted.std(0),
        chance_divergence=divergences.mean(0),
        chance_effective=effectives.mean(0),
        index=index,
        p=p_value(mean, means),
        client_p=p_of_largest(distance**2 - levels, permuted**2 - levels),
        sizes=sizes,
        counts=counts,
    )


def _starts(sizes: Array) -> Array:
    return np.concatenate([[0], np.cumsum(sizes)[:-1]])


def _counts(labels: Array, sizes: Array, classes: int) -> Array:
    """Samples of each class on each client, ``[K, C]``."""
    owner = np.repeat(np.arange(len(sizes)) * classes, sizes)
    return np.bincount(owner + labels, minlength=len(sizes) * classes).reshape(-1, classes)


def _orders(count: int, seed: int) -> Iterator[Array]:
    rng = np.random.default_rng(seed)
    for _ in range(min(PERMUTATIONS, max(FEWEST, MAX_PERMUTED // max(count, 1)))):
        yield rng.permutation(count)
