"""Label skew of a federation, and how much of it is chance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kedge.data.federation import Federation
from kedge.diagnostics.chance import p_of_largest, p_value
from kedge.diagnostics.labels import (
    each_label,
    earth_movers,
    effective_classes,
    jensen_shannon,
    target_distance,
)

PERMUTATIONS = 199  # fewer for many samples
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
    counts, drawn = _permuted_counts(y, sizes, classes, seed)  # [K, C], [R, K, C]
    pooled = counts.sum(0)
    largest = 1 - ((pooled / pooled.sum()) ** 2).sum()  # mean distance if clients had one class
    return _corrected(
        "classes",
        sizes,
        earth_movers(counts, pooled),
        earth_movers(drawn, pooled),
        largest,
        divergence=jensen_shannon(counts, pooled),
        chance_divergence=jensen_shannon(drawn, pooled).mean(0),
        effective=effective_classes(counts),
        chance_effective=effective_classes(drawn).mean(0),
        counts=counts,
    )


def skew_of_labels(y: Array, sizes: Array, seed: int = 0) -> LabelSkew:
    """Label skew of several labels per sample, ``[N, L]`` of 0 and 1."""
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    y = np.asarray(y, np.float64)
    counts = np.add.reduceat(y, starts)
    drawn = np.stack([np.add.reduceat(y[order], starts) for order in _orders(len(y), seed)])
    pooled, rates = y.mean(0), counts / sizes[:, None]
    permuted = drawn / sizes[:, None]
    return _corrected(
        "labels",
        sizes,
        each_label(rates, pooled, earth_movers),
        each_label(permuted, pooled, earth_movers),
        float((2 * pooled * (1 - pooled)).mean()),
        divergence=each_label(rates, pooled, jensen_shannon),
        chance_divergence=each_label(permuted, pooled, jensen_shannon).mean(0),
        effective=effective_classes(counts),
        chance_effective=effective_classes(drawn).mean(0),
        counts=counts,
    )


def skew_of_targets(y: Array, sizes: Array, seed: int = 0) -> LabelSkew:
    """Label skew of real targets ``[N, outputs]``; distances are in their standard deviations."""
    spread = y.std(0)
    y = (y - y.mean(0)) / np.where(spread > 0, spread, 1.0)
    ends = np.cumsum(sizes)[:-1]
    distance = np.array([target_distance(own, y) for own in np.split(y, ends)])
    permuted, divergence, by_chance = [], [], []
    for column in y.T:
        edges = np.unique(np.quantile(column, np.linspace(0, 1, BINS + 1)[1:-1]))
        bins = np.searchsorted(edges, column, "right")
        totals = np.bincount(bins, weights=column, minlength=len(edges) + 1)
        held = np.bincount(bins, minlength=len(edges) + 1)
        centres = totals / np.maximum(held, 1)
        _, drawn = _permuted_counts(bins, sizes, len(held), seed)
        gaps = np.cumsum(drawn / sizes[:, None] - held / len(column), axis=-1)[..., :-1]
        permuted.append(np.abs(gaps) @ np.diff(centres))
        coarse = np.unique(np.quantile(column, np.linspace(0, 1, DECILES + 1)[1:-1]))
        tenth = np.searchsorted(coarse, column, "right")
        counts, drawn = _permuted_counts(tenth, sizes, len(coarse) + 1, seed)
        divergence.append(jensen_shannon(counts, counts.sum(0)))
        by_chance.append(jensen_shannon(drawn, counts.sum(0)).mean(0))
    nothing = np.full(len(sizes), np.nan)
    return _corrected(
        "targets",
        sizes,
        distance,
        np.mean(permuted, axis=0),
        None,
        divergence=np.mean(divergence, axis=0),
        chance_divergence=np.mean(by_chance, axis=0),
        effective=nothing,
        chance_effective=nothing,
    )


def _corrected(
    kind: str, sizes: Array, distance: Array, permuted: Array, largest: float | None, **rest: Any
) -> LabelSkew:
    weights = sizes / sizes.sum()
    mean, means = float(distance @ weights), permuted @ weights
    chance = float(means.mean())
    index = float(np.sqrt(max(mean**2 - chance**2, 0.0)))  # noise adds in quadrature
    if largest is not None:
        room = float(np.sqrt(max(largest**2 - chance**2, 0.0)))
        index = min(index / room, 1.0) if room > 1e-9 else 0.0
    levels = (permuted**2).mean(0)
    client_p = p_of_largest(distance**2 - levels, permuted**2 - levels)
    return LabelSkew(
        kind,
        distance,
        chance=permuted.mean(0),
        chance_sd=permuted.std(0),
        index=index,
        p=p_value(mean, means),
        client_p=client_p,
        **rest,
    )


def _permuted_counts(y: Array, sizes: Array, classes: int, seed: int) -> tuple[Array, Array]:
    """Counts ``[K, C]`` as they are, and under permutations ``[R, K, C]``."""
    clients = len(sizes)
    owner = np.repeat(np.arange(clients) * classes, sizes)
    length = clients * classes

    def count(labels: Array) -> Array:
        return np.bincount(owner + labels, minlength=length).reshape(clients, classes)

    drawn = [count(y[order]) for order in _orders(len(y), seed)]
    return count(y), np.array(drawn)


def _orders(count: int, seed: int) -> Iterator[Array]:
    rng = np.random.default_rng(seed)
    most = max(19, MAX_PERMUTED // max(count, 1))
    for _ in range(min(PERMUTATIONS, most)):
        yield rng.permutation(count)
