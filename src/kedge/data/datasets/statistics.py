"""Statistics of a column over silos, each from messages that a silo could send.

No function here sees the values of two silos together. Each is a sum (or a union, a minimum, a
maximum) of what the silos send, and says in its docstring what that is. Values come from training
rows only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Array = np.ndarray

BINS = 1000  # of the histogram of a median, and most distinct values that are counted one by one


class Range(NamedTuple):
    """A silo's first message about a median."""

    low: float
    high: float
    values: tuple[Array, Array] | None  # distinct values and how often each occurs, if at most BINS


def mean(silos: Sequence[Array]) -> float:
    """The mean of all values.

    Each silo sends the number of its values and their sum.

    >>> mean([np.array([1.0, 2.0]), np.array([6.0])])
    3.0
    """
    messages = [(len(values), float(values.sum(dtype=np.float64))) for values in silos]
    count = sum(n for n, _ in messages)
    return sum(total for _, total in messages) / count


def median(silos: Sequence[Array]) -> float:
    """The median of all values.

    Each silo sends the lowest and the highest of its values and, if there are at most
    1,000 distinct ones, how often each occurs. If all silos could do so, the median is exact.
    Otherwise each silo sends a second message: a histogram of 1,000 equal bins from the lowest to
    the highest value of all silos. The median is then the middle of its bin, so that it is off by
    at most (highest - lowest) / 2,000.

    >>> median([np.array([1.0, 2.0]), np.array([6.0, 7.0])])
    4.0
    """
    ranges = [_range(values) for values in silos if len(values)]
    counted = [r.values for r in ranges if r.values is not None]
    if len(counted) == len(ranges):
        values, place = np.unique(np.concatenate([v for v, _ in counted]), return_inverse=True)
        counts = np.bincount(place, np.concatenate([n for _, n in counted]))
        return _middle(values, counts)
    low, high = min(r.low for r in ranges), max(r.high for r in ranges)
    edges = np.linspace(low, high, BINS + 1)
    counts = np.sum([np.histogram(values, edges)[0] for values in silos], axis=0)
    return _middle((edges[:-1] + edges[1:]) / 2, counts)


def shares(silos: Sequence[Array], words: int) -> Array:
    """The share of each word, ``[words]``.

    Args:
        silos: for each silo the index of every word, ``[n_k]``.
        words: number of words.

    Each silo sends how often each word occurs.

    >>> shares([np.array([0, 0]), np.array([1, 0])], 2).tolist()
    [0.75, 0.25]
    """
    counts = sum(np.bincount(codes, minlength=words) for codes in silos)
    return np.asarray(counts / max(1, np.sum(counts)))


def _range(values: Array) -> Range:
    distinct, counts = np.unique(values, return_counts=True)
    few = (distinct, counts) if len(distinct) <= BINS else None
    return Range(float(distinct[0]), float(distinct[-1]), few)


def _middle(values: Array, counts: Array) -> float:
    """The mean of the two middle values of sorted ``values`` that occur ``counts`` times."""
    ends = np.cumsum(counts)
    n = int(ends[-1])
    below, above = np.searchsorted(ends, [(n - 1) // 2, n // 2], side="right")
    return float((values[below] + values[above]) / 2)
