"""Clients that stand apart, and columns of tables that do."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kedge.diagnostics.data.chance import SIGNIFICANT
from kedge.diagnostics.data.feature_shift import Group, Shift
from kedge.diagnostics.data.label_skew import LabelSkew

LIMIT = 3.5  # robust score, as Iglewicz and Hoaglin (1993) recommend
MIN_CLIENTS = 3  # of two clients, neither stands apart from the other
MIN_LABELS, MIN_FEATURES = 0.2, 0.25  # beyond the median client; less is not worth a word
MIN_COLUMN = 0.2  # standard deviations
ALPHA = 0.01  # of all clients and columns together

Array = npt.NDArray[Any]


def robust_scores(values: npt.ArrayLike, noise: npt.ArrayLike = 0.0) -> Array:
    """How far each value is above the median, in robust standard deviations.

    The unit is ``sqrt((1.4826 MAD)^2 + noise^2)``: values that agree up to their noise have small
    scores even where their median absolute deviation is tiny.

    Args:
        values: one number per client, ``[K]``; NaN is left out.
        noise: standard deviation of each by chance.

    >>> robust_scores([1.0, 2.0, 3.0, 4.0, 100.0]).round(2).tolist()
    [-1.35, -0.67, 0.0, 0.67, 65.43]
    """
    values = np.asarray(values, np.float64)
    middle = np.nanmedian(values)
    unit = 1.4826 * np.nanmedian(np.abs(values - middle))
    return (values - middle) / np.maximum(np.hypot(unit, noise), 1e-12)


class Apart(NamedTuple):
    """Robust scores of all clients, and those that stand apart."""

    labels: Array  # [K]
    features: Array  # [K]
    found: tuple[tuple[int, str], ...]  # client and reason, the furthest first


def stand_apart(labels: LabelSkew, shift: Shift) -> Apart:
    """Clients whose labels or features are further from the rest than those of other clients.

    Scores are of squared distances beyond chance, whose noise is known, too. A client must have a
    high score, be far from the median client, and be further than the furthest one by chance.
    """
    own = labels.distance**2 - labels.chance**2
    by_label = robust_scores(own, 2 * labels.chance * labels.chance_sd)
    squares = shift.raw**2 - shift.chance**2
    by_feature = np.zeros_like(by_label)
    if not np.isnan(squares).all():
        by_feature = np.nan_to_num(robust_scores(squares, shift.noise))
    of_labels = "targets" if labels.kind == "targets" else "labels"
    far = {
        of_labels: (by_label > LIMIT) & (_beyond(labels.excess) > MIN_LABELS),
        "features": (by_feature > LIMIT) & (_beyond(shift.client) > MIN_FEATURES),
    }
    far[of_labels] &= labels.client_p <= SIGNIFICANT
    far["features"] &= shift.client_p <= SIGNIFICANT
    if len(by_label) < MIN_CLIENTS:
        return Apart(by_label, by_feature, ())
    score = np.maximum(by_label, by_feature)
    chosen = np.flatnonzero(far[of_labels] | far["features"])
    found = [
        (int(k), " and ".join(reason for reason in far if far[reason][k]))
        for k in chosen[np.argsort(-score[chosen], kind="stable")]
    ]
    return Apart(by_label, by_feature, tuple(found))


def _beyond(values: Array) -> Array:
    """How far each value is above the median; values that are not known are at it."""
    known = values[~np.isnan(values)]
    return np.nan_to_num(values - np.median(known)) if len(known) else np.zeros_like(values)


class ColumnShift(NamedTuple):
    """A column of a table whose mean on a client is unlike that on all others."""

    column: int
    client: int
    shift: float  # in standard deviations within classes
    own: float  # mean on the client
    others: float


def shifted_columns(x: Array, owner: Array, groups: Sequence[Group]) -> list[ColumnShift]:
    """Columns that differ between clients within classes, the furthest first.

    Means of a client and of all others are compared within each class, and averaged over classes
    with the weights ``n m / (n + m)``. The furthest client of a column is then left out of the
    others, so that it does not make them differ in turn. What differs by less than 0.2 standard
    deviations is left out, and what may be chance: the level is 0.01 for all clients and columns
    together (Bonferroni).

    Args:
        x: the columns, ``[n, D]``.
        owner: client of each row, ``[n]``.
        groups: the classes.
    """
    clients = np.unique(owner)
    counts, sums, squares = _cells(x.astype(np.float64), owner, groups, clients)
    means = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
    freedom = counts.sum() - (counts > 0).sum()  # every cell has a mean of its own
    if freedom < 1:
        return []
    within = (squares - counts * means**2).sum((0, 1)) / freedom
    spread = np.sqrt(np.maximum(within, 0.0))
    limit = NormalDist().inv_cdf(1 - ALPHA / 2 / (len(clients) * x.shape[1]))
    active = np.ones((len(clients), 1, x.shape[1]))
    found: list[ColumnShift] = []
    while True:
        n = counts * active
        m = n.sum(0) - n
        others = np.divide((sums * active).sum(0) - sums * active, m, out=means * 0, where=m > 0)
        weight = np.divide(n * m, n + m, out=np.zeros_like(m), where=m > 0)  # [K, G, D]
        total = weight.sum(1)
        gap = (weight * (means - others)).sum(1) / np.maximum(total, 1e-12)
        shift = np.divide(gap, spread, out=np.zeros_like(gap), where=spread > 1e-9)
        far = (np.abs(shift) * np.sqrt(total) > limit) & (np.abs(shift) >= MIN_COLUMN)
        furthest = np.where(far, np.abs(shift), 0.0).argmax(0)
        columns = np.flatnonzero(far.any(0))
        if not len(columns):
            return sorted(found, key=lambda c: -abs(c.shift))
        for j in columns:
            k = furthest[j]
            rest = np.isin(owner, clients[np.flatnonzero(active[:, 0, j])]) & (owner != clients[k])
            own, other = x[owner == clients[k], j].mean(), x[rest, j].mean()
            by = float(shift[k, j])
            found.append(ColumnShift(int(j), int(clients[k]), by, float(own), float(other)))
            active[k, 0, j] = 0.0


def _cells(
    x: Array, owner: Array, groups: Sequence[Group], clients: Array
) -> tuple[Array, Array, Array]:
    """Counts ``[K, G, 1]``, sums and sums of squares ``[K, G, D]`` of every client and class."""
    counts = np.zeros((len(clients), len(groups), 1))
    sums, squares = np.zeros((2, len(clients), len(groups), x.shape[1]))
    for g, group in enumerate(groups):
        for k, client in enumerate(clients):
            own = x[group.members[owner[group.members] == client]]
            counts[k, g] = len(own)
            sums[k, g], squares[k, g] = own.sum(0), (own**2).sum(0)
    return counts, sums, squares
