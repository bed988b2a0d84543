"""Mean and standard deviation of the inputs of all members, from their moments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from kedge.flower.own_data import Moments
from kedge.flower.statement import Statement

Scaling = tuple[tuple[float, ...], tuple[float, ...]]
_TINY = 2.0**-126  # the smallest normal float32


def pooled_scaling(members: Sequence[Statement], columns: tuple[str, ...] | None) -> Scaling:
    """Mean and standard deviation of the training inputs of all members together.

    A one-hot column that a member lacks is 0 there. The sums are exact (``math.fsum``), so they do
    not depend on the order of members. The standard deviation of a constant column is 1.
    """
    first = members[0].schema
    if first.dtype == "int64":
        return (0.0,), (1.0,)
    if first.dtype == "uint8":
        return _of_bytes([s.moments for s in members], first.shape[0])
    aligned = [_aligned(s, columns) for s in members]
    means, stds = [], []
    for c in range(len(aligned[0].mean)):
        total = sum(m.count for m in aligned)
        mean = math.fsum(m.count * m.mean[c] for m in aligned) / total
        around = (m.squares[c] + m.count * (m.mean[c] - mean) ** 2 for m in aligned)
        varies = any(m.squares[c] for m in aligned) or len({m.mean[c] for m in aligned}) > 1
        std = math.sqrt(math.fsum(around) / total)
        means.append(mean if varies else aligned[0].mean[c])
        stds.append(std if varies and std > _TINY else 1.0)
    return tuple(means), tuple(stds)


def _of_bytes(moments: Sequence[Moments], channels: int) -> Scaling:
    means, stds = [], []
    for c in range(channels):
        counts = [sum(m.bytes[c][value] for m in moments) for value in range(256)]
        total = max(1, sum(counts))
        mean = math.fsum(n * value / 255 for value, n in enumerate(counts)) / total
        around = math.fsum(n * (value / 255 - mean) ** 2 for value, n in enumerate(counts))
        means.append(mean)
        stds.append(math.sqrt(around / total) if sum(n > 0 for n in counts) > 1 else 1.0)
    return tuple(means), tuple(stds)


def _aligned(member: Statement, columns: tuple[str, ...] | None) -> Moments:
    """The moments of a member for the agreed columns."""
    moments, names = member.moments, member.schema.columns
    if columns is None or names is None:
        return moments
    at = {name: i for i, name in enumerate(names)}
    mean = tuple(moments.mean[at[c]] if c in at else 0.0 for c in columns)
    squares = tuple(moments.squares[at[c]] if c in at else 0.0 for c in columns)
    return replace(moments, mean=mean, squares=squares)
