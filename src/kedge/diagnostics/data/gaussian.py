"""Distances of Gaussians in closed form."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def fit_gaussian(x: npt.ArrayLike) -> tuple[Array, Array]:
    """Mean ``[d]`` and covariance ``[d, d]`` (divided by n) of samples ``[n, d]``."""
    x = np.asarray(x, np.float64)
    centred = x - x.mean(0)
    return x.mean(0), centred.T @ centred / len(x)


def bures_wasserstein(
    mean_a: npt.ArrayLike, cov_a: npt.ArrayLike, mean_b: npt.ArrayLike, cov_b: npt.ArrayLike
) -> float:
    """The 2-Wasserstein distance of two Gaussians.

    ``W2^2 = |m_a - m_b|^2 + tr(A + B - 2 (A^1/2 B A^1/2)^1/2)`` (Dowson and Landau 1982).

    Args:
        mean_a, mean_b: means ``[d]``.
        cov_a, cov_b: covariances ``[d, d]``, or variances ``[d]`` of independent features, as
            FedImpro shares them; then it is ``|m_a - m_b|^2 + |s_a - s_b|^2``.

    >>> bures_wasserstein([0.0, 0.0], [1.0, 4.0], [3.0, 0.0], [1.0, 36.0])
    5.0
    """
    gap = np.asarray(mean_a, np.float64) - np.asarray(mean_b, np.float64)
    a, b = np.asarray(cov_a, np.float64), np.asarray(cov_b, np.float64)
    if a.ndim == 1 and b.ndim == 1:
        spread = ((np.sqrt(a) - np.sqrt(b)) ** 2).sum()
    else:
        a, b = (np.diag(v) if v.ndim == 1 else v for v in (a, b))
        root = _root(a)
        spread = np.trace(a) + np.trace(b) - 2 * np.sqrt(_spectrum(root @ b @ root)).sum()
    return float(np.sqrt(gap @ gap + max(spread, 0.0)))


def _spectrum(matrix: Array) -> Array:
    return np.linalg.eigvalsh((matrix + matrix.T) / 2).clip(0)


def _root(matrix: Array) -> Array:
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return (vectors * np.sqrt(values.clip(0))) @ vectors.T
