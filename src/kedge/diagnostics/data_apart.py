"""Clients that stand apart, and columns of tables that do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import norm

from kedge.diagnostics.data_labels import LabelSkew
from kedge.diagnostics.data_shift import Group, Shift

LIMIT = 3.5  # robust score, as Iglewicz and Hoaglin (1993) recommend
MIN_CLIENTS = 3  # of two clients, neither stands apart from the other
MIN_LABELS, MIN_FEATURES = 0.15, 0.25  # beyond the median client; less is not worth a word
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

    Scores are of squared distances beyond chance, whose noise is known, too.
    """
    own = labels.distance**2 - labels.chance**2
    by_label = robust_scores(own, 2 * labels.chance * labels.chance_sd)
    squares = shift.raw**2 - shift.chance**2
    by_feature = np.zeros_like(by_label)
    if not np.isnan(squares).all():
        by_feature = np.nan_to_num(robust_scores(squares, shift.noise))
    far = {
        "labels": (by_label > LIMIT) & (_beyond(labels.excess) > MIN_LABELS),
        "features": (by_feature > LIMIT) & (_beyond(np.nan_to_num(shift.client)) > MIN_FEATURES),
    }
    if len(by_label) < MIN_CLIENTS:
        return Apart(by_label, by_feature, ())
    score = np.maximum(by_label, by_feature)
    chosen = np.flatnonzero(far["labels"] | far["features"])
    found = [
        (int(k), " and ".join(reason for reason in far if far[reason][k]))
        for k in chosen[np.argsort(-score[chosen], kind="stable")]
    ]
    return Apart(by_label, by_feature, tuple(found))


def _beyond(values: Array) -> Array:
    return values - np.median(values)


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
    with the weights ``n m / (n + m)``. What differs by less than 0.2 standard deviations is left
    out, and what may be chance: the level is 0.01 for all clients and columns together (Bonferroni).

    Args:
        x: the columns, ``[n, D]``.
        owner: client of each row, ``[n]``.
        groups: the classes.
    """
    x = x.astype(np.float64)
    clients = np.unique(owner)
    squares = sum(((x[g.members] - x[g.members].mean(0)) ** 2).sum(0) for g in groups)
    spread = np.sqrt(squares / max(sum(len(g.members) for g in groups), 1))
    limit = norm.isf(ALPHA / 2 / max(len(clients) * x.shape[1], 1))
    found = []
    for k in clients:
        gap, weight = np.zeros(x.shape[1]), 0.0
        for group in groups:
            own = owner[group.members] == k
            n, m = int(own.sum()), int((~own).sum())
            if n and m:
                rows = x[group.members]
                gap += n * m / (n + m) * (rows[own].mean(0) - rows[~own].mean(0))
                weight += n * m / (n + m)
        if not weight:
            continue
        shift = np.divide(gap / weight, spread, out=np.zeros_like(gap), where=spread > 1e-9)
        means = x[owner == k].mean(0), x[owner != k].mean(0)
        for j in np.flatnonzero((np.abs(shift) * np.sqrt(weight) > limit)):
            if abs(shift[j]) >= MIN_COLUMN:
                own_mean, other_mean = float(means[0][j]), float(means[1][j])
                found.append(ColumnShift(int(j), int(k), float(shift[j]), own_mean, other_mean))
    return sorted(found, key=lambda c: -abs(c.shift))
