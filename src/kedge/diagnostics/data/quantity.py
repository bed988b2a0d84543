"""Quantity skew: how unevenly samples are spread over clients."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


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
