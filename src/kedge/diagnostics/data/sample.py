"""The samples of a federation that a diagnosis of features looks at, their classes, and what of a
difference chance explains: p-values by random draws."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kedge.data.federation import Federation

MAX_CLIENTS = 200  # whose features are compared
FIFTHS = 5  # groups of real targets
SIGNIFICANT = 0.01  # of some 200 draws, at most one may be as large

Array = npt.NDArray[Any]


class FeatureGroup(NamedTuple):
    """A class, or what stands for one: its name and the positions of its samples."""

    name: str
    members: Array


class Sample(NamedTuple):
    """Some training samples of a federation."""

    positions: Array  # [n], in federation.rows
    rows: Tensor  # [n], in federation.x
    owner: Array  # [n], the client of each
    clients: int  # clients that are in it


def draw_sample(federation: Federation, most: int, seed: int = 0) -> Sample:
    """At most ``most`` samples; large clients give samples away before small ones do.

    Of more than 200 clients, 200 are drawn.
    """
    rng = np.random.default_rng(seed)
    sizes, offsets = np.asarray(federation.sizes), np.asarray(federation.offsets)
    chosen = np.arange(len(sizes))
    if len(sizes) > MAX_CLIENTS:
        chosen = np.sort(rng.choice(len(sizes), MAX_CLIENTS, replace=False))
    cap = even_cap(sizes[chosen], most)
    pieces = []
    for k in chosen:
        picks = np.arange(sizes[k])
        if len(picks) > cap:
            picks = np.sort(rng.choice(picks, cap, replace=False))
        pieces.append(picks + offsets[k])
    positions = np.concatenate(pieces)
    owner = np.repeat(chosen, [len(piece) for piece in pieces])
    rows = federation.rows[torch.from_numpy(positions).to(federation.rows.device)]
    return Sample(positions, rows, owner, len(chosen))


def even_cap(sizes: Array, most: int) -> int:
    """The largest number of samples per client with which all of them have at most ``most``.

    >>> even_cap(np.array([5, 100, 200]), 105)
    50
    """
    low, high = 1, max(int(sizes.max()), 1)
    while low < high:
        middle = (low + high + 1) // 2
        if np.minimum(sizes, middle).sum() <= most:
            low = middle
        else:
            high = middle - 1
    return low


def groups_of(federation: Federation, sample: Sample) -> tuple[list[FeatureGroup], str]:
    """What features are compared within, and the words for it.

    Every sample is in one group: its class; of several labels, the rarest one that it has; of real
    targets, the fifth of the samples in order of their targets.
    """
    y = federation.y[sample.rows].cpu().numpy()
    task, names = federation.task, federation.classes
    if task.one_class:
        found = [FeatureGroup(name_of(names, int(c)), np.flatnonzero(y == c)) for c in np.unique(y)]
        return found, "class"
    if task.has_classes:
        order = np.argsort(y.sum(0), kind="stable")  # rarest first
        rarest = np.where(y.any(1), order[(y[:, order] > 0).argmax(1)], -1)
        found = [
            FeatureGroup(
                "no label" if c < 0 else name_of(names, int(c)), np.flatnonzero(rarest == c)
            )
            for c in np.unique(rarest)
        ]
        return found, "rarest label"
    flat = y.reshape(len(y), -1).astype(np.float64)
    spread = flat.std(0)
    score = ((flat - flat.mean(0)) / np.where(spread > 0, spread, 1.0)).mean(1)
    edges = np.unique(np.quantile(score, np.linspace(0, 1, FIFTHS + 1)[1:-1]))
    bins = np.searchsorted(edges, score, "right")
    found = [FeatureGroup(f"fifth {b + 1}", np.flatnonzero(bins == b)) for b in np.unique(bins)]
    return found, "fifth of the targets"


def given_labels(federation: Federation, sample: Sample, values: Array) -> Array:
    """Features ``[n, d]`` without what a linear model of several labels, or of targets, explains.

    Within a group those still vary, and would make clients with other labels look shifted. Classes
    do not vary within a group, and change nothing.
    """
    if federation.task.one_class:
        return values
    y = federation.y[sample.rows].cpu().numpy().astype(np.float64).reshape(len(values), -1)
    known = np.column_stack([np.ones(len(y)), y])
    return values - (known @ np.linalg.lstsq(known, values, rcond=None)[0]).astype(values.dtype)


def class_shares(federation: Federation, sample: Sample, groups: list[FeatureGroup]) -> Array:
    """Half the share of each group on a client, and half that on all others, ``[K, G]``."""
    clients = federation.num_clients
    own = np.zeros((clients, len(groups)))
    for g, group in enumerate(groups):
        own[:, g] = np.bincount(sample.owner[group.members], minlength=clients)
    total = own.sum(1, keepdims=True)
    own = np.divide(own, total, out=np.zeros_like(own), where=total > 0)
    weight = np.asarray(federation.sizes, np.float64)[:, None] * (total > 0)
    others = (weight * own).sum(0) - weight * own
    others /= np.maximum(weight.sum() - weight, 1e-12)
    return (own + others) / 2


def name_of(names: tuple[str, ...] | None, number: int) -> str:
    """The name of a class, or its number where classes have none."""
    return names[number] if names else str(number)


# -- chance ---------------------------------------------------------------------------------------


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
