"""Wasserstein distances of samples: exact, along directions, and conditional on the class.

Samples are arrays ``[n, d]``, every sample with the same weight; distances are Euclidean.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


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


# -- along directions --------------------------------------------------------------------------


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


# -- conditional ------------------------------------------------------------------------------


class Conditional(NamedTuple):
    """A conditional distance, and the share of the samples whose class both sides have."""

    value: float  # NaN without a common class
    covered: float


def weighted(weights: Array, values: Array) -> Conditional:
    """The mean of distances within classes by weights that sum to one over all classes."""
    covered = float(weights.sum())
    return Conditional(float(weights @ values) / covered if covered else float("nan"), covered)
