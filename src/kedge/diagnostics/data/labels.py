"""Label skew: how far the labels of each client are from the pooled labels.

Distributions are rows of counts or shares, ``[clients, C]`` or ``[C]``. All functions are pure.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


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
