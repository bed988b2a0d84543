"""Label skew of a federation, and how much of it is chance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kedge.data.federation import Federation
from kedge.diagnostics.data.chance import p_of_largest, p_value
from kedge.diagnostics.data.labels import (
    each_label,
    earth_movers,
    effective_classes,
    jensen_shannon,
    target_distance,
)

PERMUTATIONS = 199
FEWEST = 99  # for many samples
MAX_PERMUTED = 2 * 10**7  # labels that are permuted, in all
BINS = 100  # of real targets, for the permutations
DECILES = 10  # bins of real targets for their Jensen-Shannon divergence

Array = npt.NDArray[Any]


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
    counts: Array | None = None

    @property
    def excess(self) -> Array:
        """The distance of each client beyond its chance level, ``[K]``."""
        return np.sqrt(np.maximum(self.distance**2 - self.chance**2, 0.0))


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
