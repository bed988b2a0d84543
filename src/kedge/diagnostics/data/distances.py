"""Wasserstein distances of samples: exact, sliced, and conditional on the class.

Samples are arrays ``[n, d]``, every sample with the same weight; distances are Euclidean.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Distance = Callable[[Any, Any], float]


def wasserstein(a: npt.ArrayLike, b: npt.ArrayLike, power: int = 1) -> float:
    """The Wasserstein distance of two samples: ``(min_J E_J |x - x'|^p)^(1/p)``, exactly.

    Samples of equal size are an assignment problem. Otherwise the transport problem is solved by
    POT if it is installed (``pip install kedge[ot]``), else as a linear program, which is some
    hundred times slower; the values are equal.

    Args:
        a, b: samples ``[n, d]`` and ``[m, d]``.
        power: p, 1 or 2.

    >>> wasserstein([[0.0, 0.0], [1.0, 0.0]], [[1.0, 3.0], [0.0, 3.0]])
    3.0
    """
    from scipy.optimize import linear_sum_assignment  # slow to import
    from scipy.spatial.distance import cdist

    a, b = (np.asarray(v, np.float64).reshape(len(np.asarray(v)), -1) for v in (a, b))
    cost = cdist(a, b) ** power
    if len(a) == len(b):
        rows, columns = linear_sum_assignment(cost)
        mean = cost[rows, columns].mean()
    elif find_spec("ot") is not None:
        mean = transport_by_pot(cost)
    else:
        mean = transport(cost)
    return float(mean ** (1 / power))


def transport(cost: Array) -> float:
    """The optimal mean cost of a transport problem with uniform weights, as a linear program."""
    from scipy import sparse
    from scipy.optimize import linprog

    n, m = cost.shape
    from_each = sparse.kron(sparse.eye(n), np.ones((1, m)))
    to_each = sparse.kron(np.ones((1, n)), sparse.eye(m))
    limits = np.concatenate([np.full(n, 1 / n), np.full(m, 1 / m)])
    solved = linprog(cost.ravel(), A_eq=sparse.vstack([from_each, to_each]), b_eq=limits)
    return float(solved.fun)


def transport_by_pot(cost: Array) -> float:
    """The same by POT's network simplex."""
    n, m = cost.shape
    weights = np.full(n, 1 / n), np.full(m, 1 / m)
    return float(import_module("ot.lp").emd2(*weights, np.ascontiguousarray(cost)))


# -- sliced -----------------------------------------------------------------------------------


def unit_directions(count: int, dim: int, seed: int = 0) -> Array:
    """Random unit vectors ``[count, dim]``, uniform on the sphere; both signs if ``dim`` is 1."""
    drawn = np.random.default_rng(seed).standard_normal((count, dim))
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def sliced_wasserstein(a: npt.ArrayLike, b: npt.ArrayLike, directions: npt.ArrayLike) -> float:
    """The sliced 2-Wasserstein distance: the root mean square of W2 along each direction.

    In one dimension W2 compares quantile functions, so every slice is exact.

    Args:
        a, b: samples ``[n, d]`` and ``[m, d]``.
        directions: vectors ``[L, d]``, see :func:`unit_directions`.

    >>> sliced_wasserstein([[0.0], [2.0]], [[3.0], [1.0], [3.0], [1.0]], [[1.0], [-1.0]])
    1.0
    """
    turned = np.asarray(directions, np.float64).T
    left, right = (np.sort(np.asarray(v, np.float64) @ turned, axis=0).T for v in (a, b))
    return float(np.sqrt(squared_w2(left, right).mean()))


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


def conditional_wasserstein(
    x: npt.ArrayLike,
    y: npt.ArrayLike,
    x_other: npt.ArrayLike,
    y_other: npt.ArrayLike,
    distance: Distance = wasserstein,
) -> Conditional:
    """The conditional Wasserstein distance of two labelled samples (FedImpro, Definition 4.1).

    ``C_d(D, D') = 1/2 E_{y~D} W(D|y, D'|y) + 1/2 E_{y~D'} W(D|y, D'|y)``: the distance within
    each class, averaged by the label shares of either side. Tang et al., "FedImpro", ICLR 2024,
    arXiv:2402.07011.

    Deviations: the definition has no value for a class that one side lacks. Such classes are left
    out, the weights of the others are scaled up, and ``covered`` says how much is left.

    Args:
        x, y: inputs or features ``[n, d]`` and classes ``[n]``.
        x_other, y_other: the same of the other side.
        distance: distance of two samples; :func:`wasserstein` is the definition.

    >>> conditional_wasserstein([[0.0], [5.0]], [0, 1], [[1.0], [9.0]], [0, 2])
    Conditional(value=1.0, covered=0.5)
    """
    x, x_other = np.asarray(x), np.asarray(x_other)
    y, y_other = np.asarray(y), np.asarray(y_other)
    common = np.intersect1d(y, y_other)
    weights = [((y == c).mean() + (y_other == c).mean()) / 2 for c in common]
    values = [distance(x[y == c], x_other[y_other == c]) for c in common]
    return weighted(np.array(weights), np.array(values))


def weighted(weights: Array, values: Array) -> Conditional:
    """The mean of distances within classes by weights that sum to one over all classes."""
    covered = float(weights.sum())
    return Conditional(float(weights @ values) / covered if covered else float("nan"), covered)
