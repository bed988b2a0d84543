"""Whether a difference between two methods is more than chance: paired by seed, corrected by Holm.

Two methods that are compared have the same partitions, cohorts and initial weights for a seed, so
their differences are taken seed by seed. The test is Student's t on these differences. A table with
several comparisons finds a small p-value sooner or later, so p-values are corrected by Holm's step
down: the probability of one or more false claims in the table stays below the level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

LEVEL = 0.05


class Paired(NamedTuple):
    """The mean difference of pairs; interval and p-value are None for a single pair."""

    mean: float
    sd: float | None
    n: int
    low: float | None  # of the 95 % interval
    high: float | None
    p: float | None  # two-sided, that the true mean is 0

    @property
    def is_clear(self) -> bool:
        """Whether the 95 % interval leaves out 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def paired(differences: Sequence[float]) -> Paired:
    """Student's t on the differences of pairs, one per seed.

    Where all differences are equal there is no spread to judge by: the interval is a point, and p
    is 1 if they are 0, otherwise 0.

    Raises:
        ValueError: there is no difference.

    >>> found = paired([1.0, 2.0, 3.0])
    >>> found.mean, found.n, round(found.low, 3), round(found.high, 3), round(found.p, 4)
    (2.0, 3, -0.484, 4.484, 0.0742)
    """
    values, n = [float(v) for v in differences], len(differences)
    if not n:
        raise ValueError("no differences")
    mean = math.fsum(values) / n
    if n == 1 or not all(map(math.isfinite, values)):
        return Paired(mean, None, n, None, None, None)
    from scipy.special import stdtr, stdtrit  # importing kedge must not import scipy

    sd = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    if sd <= 1e-12 * max(1.0, abs(mean)):
        return Paired(mean, 0.0, n, mean, mean, 1.0 if abs(mean) <= 1e-12 else 0.0)
    error = sd / math.sqrt(n)
    half = float(stdtrit(n - 1, 0.975)) * error
    p = 2.0 * float(stdtr(n - 1, -abs(mean) / error))
    return Paired(mean, sd, n, mean - half, mean + half, p)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's correction: adjusted p-values in the order given; None stays None and does not count.

    The i-th smallest of m (from 0) is multiplied by m - i, and none is below a smaller one's.

    >>> holm([0.01, 0.04, 0.03, None])
    [0.03, 0.06, 0.06, None]
    """
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, i) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        adjusted[i] = largest
    return adjusted
