"""What chance explains: p-values by random draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

SIGNIFICANT = 0.01  # of some 200 draws, at most one may be as large

Array = npt.NDArray[Any]


def p_value(found: float, drawn: Array) -> float:
    """Share of random draws ``[R]`` that are as large, the value itself counted in.

    >>> p_value(3.0, np.array([1.0, 2.0, 3.0]))
    0.5
    """
    return float(1 + (drawn >= found - 1e-12).sum()) / (1 + len(drawn))


def p_of_largest(found: Array, drawn: Array) -> Array:
    """p-values of K values, each against the largest of K random ones.

    They hold for all values together: one of them is below 0.05 in one case of twenty. Values
    are first divided by the standard deviations of their draws.

    Args:
        found: values less their means by chance, ``[K]``.
        drawn: the same of random draws, ``[R, K]``.

    >>> drawn = np.array([[1.0, -4.0], [-1.0, 4.0]])
    >>> p_of_largest(np.array([1.5, 2.0]), drawn).round(3).tolist()
    [0.333, 1.0]
    """
    unit = np.maximum(drawn.std(0), 1e-12)
    largest = (drawn / unit).max(1)  # [R]
    return np.array([p_value(value, largest) for value in found / unit])
