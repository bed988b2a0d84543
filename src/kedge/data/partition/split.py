"""Split every client's samples: training and held out, or training, test and validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from numbers import Real

import numpy as np
import numpy.typing as npt

from kedge.data.partition.grammar import as_int, generator
from kedge.data.partition.partition import FloatArray, IntArray, Partition
from kedge.errors import FieldError
from kedge.grammar import write_value


def holdout(
    partition: Partition, labels: npt.ArrayLike, fraction: float, seed: int, purpose: str = "split"
) -> tuple[Partition, Partition]:
    """Hold out a fraction of each client's samples.

    The split is stratified by class within each client. Every client that has samples keeps at
    least one to train on.

    Args:
        partition: the partition to split.
        labels: the label of each sample of the dataset, ``[N]``.
        fraction: share to hold out, between 0 and 1.
        seed: seed of the split.
        purpose: draws for different purposes do not depend on each other.

    Returns:
        The partitions of training and of held-out samples.

    Raises:
        FieldError: ``fraction`` is not between 0 and 1.
        DataError: the partition is of another number of samples.
    """
    if not isinstance(fraction, Real) or not 0 < fraction < 1:
        raise FieldError(f"holdout.fraction = {fraction!r} is not a number between 0 and 1")
    fraction, seed = float(fraction), as_int("seed", seed)
    name = f"holdout(fraction={write_value(fraction)}, seed={seed}, part="
    parts = ("train", "held")
    shares = (1 - fraction, fraction)
    train, held_out = _split(partition, labels, shares, seed, name, parts, purpose)
    return train, held_out


def resplit(
    partition: Partition,
    labels: npt.ArrayLike,
    fractions: Sequence[float] = (0.4, 0.3, 0.3),
    seed: int = 0,
) -> tuple[Partition, Partition, Partition]:
    """Split each client's samples into training, test and validation, stratified by class.

    For data that are pooled from their official splits, as in FedTR (40, 30 and 30 %).

    Args:
        partition: the partition to split.
        labels: the label of each sample of the dataset, ``[N]``.
        fractions: shares of training, test and validation; they sum to 1.
        seed: seed of the split.

    Returns:
        The partitions of training, test and validation samples.

    Raises:
        FieldError: ``fractions`` are not three positive numbers that sum to 1.
        DataError: the partition is of another number of samples.
    """
    fractions, seed = tuple(map(float, fractions)), as_int("seed", seed)
    if len(fractions) != 3 or not all(f > 0 for f in fractions) or abs(sum(fractions) - 1) > 1e-9:
        raise FieldError(
            f"resplit.fractions = {write_value(fractions)} are not three positive numbers that add "
            "up to 1, such as (0.4, 0.3, 0.3)"
        )
    name = f"resplit(fractions={write_value(fractions)}, seed={seed}, part="
    parts = ("train", "test", "validation")
    train, test, validation = _split(partition, labels, fractions, seed, name, parts)
    return train, test, validation


def _split(
    partition: Partition,
    labels: npt.ArrayLike,
    fractions: Sequence[float],
    seed: int,
    name: str,
    parts: Sequence[str],
    purpose: str = "split",
) -> list[Partition]:
    labels = np.asarray(labels)
    partition.check(len(labels))
    if labels.ndim != 1 or labels.dtype.kind not in "iub":
        labels = np.zeros(len(labels), dtype=np.int64)  # no classes: one stratum
    rng = generator(seed, purpose)
    chosen: list[list[IntArray]] = [[] for _ in parts]  # positions within each client
    for samples in partition.clients:
        rest = rng.permutation(len(samples))
        rest = rest[np.argsort(labels[samples[rest]], kind="stable")]
        sizes = _part_sizes(len(samples), np.array(fractions))
        for j in range(len(parts) - 1, 0, -1):
            taken = _spaced(rng, len(rest), sizes[j])
            chosen[j].append(np.sort(rest[taken]))
            rest = rest[~taken]
        chosen[0].append(np.sort(rest))
    split = []
    for part, positions in zip(parts, chosen, strict=True):
        clients = tuple(c[at] for c, at in zip(partition.clients, positions, strict=True))
        angles = partition.angles and tuple(
            a[at] for a, at in zip(partition.angles, positions, strict=True)
        )
        full = f"{partition.name}+{name}{part})"
        split.append(replace(partition, clients=clients, angles=angles, name=full))
    return split


def _part_sizes(samples: int, fractions: FloatArray) -> IntArray:
    """Sizes by largest remainder; the first part wins ties and is never empty."""
    share = samples * fractions
    sizes = np.floor(share + 1e-9).astype(np.int64)
    sizes[np.argsort(np.round(sizes - share, 9), kind="stable")[: samples - sizes.sum()]] += 1
    if samples and not sizes[0]:
        sizes[sizes.argmax()] -= 1
        sizes[0] = 1
    return sizes


def _spaced(rng: np.random.Generator, samples: int, take: int) -> npt.NDArray[np.bool_]:
    """``take`` evenly spaced positions at a random offset; on sorted classes, a stratified draw.

    Of a class with n samples it takes n * take / samples, rounded up or down.
    """
    if not samples:
        return np.zeros(0, dtype=bool)
    edges = (np.arange(samples + 1) * take + rng.integers(samples)) // samples
    return np.diff(edges) > 0
