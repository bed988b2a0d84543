"""The Partition: the samples of each client, with a name, a seed and a content hash.

It is split into partitions of training and held-out samples, or training, test and validation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kedge.errors import DataError, FieldError
from kedge.files import make_folder, read_json, write_file
from kedge.grammar import write_value
from kedge.schema import Option

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
FORMAT, VERSION = "kedge partition", 1
#: The values of a file and their types; JSON, readable in any language.
TYPES = {
    "name": str, "seed": int, "num_samples": int, "hash": str, "rotation": list | None,
    "noise": list | None, "clients": list, "angles": list | None,
}  # fmt: skip


def generator(seed: int, *tag: str) -> np.random.Generator:
    """The random stream of a seed and a tag, the same on every platform."""
    digest = hashlib.sha256("/".join(["kedge partition", str(seed), *tag]).encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def as_int(name: str, value: Any) -> int:
    """Convert an integer of Python or numpy to an int; a FieldError names the option.

    >>> as_int("seed", np.int64(3))
    3
    """
    return int(Option(name, int).check(value))


@dataclass(frozen=True, eq=False)
class Partition:
    """The samples of each client, and its feature shift.

    Args:
        clients: for each client, an array of sample indices. Arrays are disjoint and are sorted.
        name: the text it was drawn from, with all options that matter.
        seed: the seed it was drawn with.
        num_samples: size of the dataset; a partition may leave samples out.
        rotation: rotation of each client's images in degrees, ``[clients]``.
        noise: standard deviation of each client's noise, ``[clients]``.
        angles: rotation of each sample in degrees, one array per client.

    Raises:
        DataError: indices overlap or are out of range, or shifts have the wrong shape.

    >>> partition = Partition(([0, 2], [1, 3, 4]), "by hand", seed=0, num_samples=6)
    >>> partition
    Partition('by hand', seed=0, clients=2, samples=5 of 6, hash='fc1cdec92e1c7002')
    >>> partition.label_counts([0, 1, 0, 1, 1, 0]).tolist()
    [[2, 0], [0, 3]]
    """

    clients: tuple[IntArray, ...]
    name: str
    seed: int
    num_samples: int
    rotation: FloatArray | None = None
    noise: FloatArray | None = None
    angles: tuple[FloatArray, ...] | None = None

    def __post_init__(self) -> None:
        clients = tuple(_indices(self.name, part) for part in self.clients)
        if not clients:
            raise DataError(f"{self.name}: a partition needs at least one client")
        every = np.sort(np.concatenate(clients))
        if (every[1:] == every[:-1]).any():
            twice = every[1:][every[1:] == every[:-1]][0]
            raise DataError(f"{self.name}: sample {twice} is assigned twice")
        if len(every) and not 0 <= every[0] <= every[-1] < self.num_samples:
            wrong = every[0] if every[0] < 0 else every[-1]
            raise DataError(f"{self.name}: no sample {wrong} among {self.num_samples} samples")
        if self.rotation is not None and self.angles is not None:
            raise DataError(f"{self.name}: rotation and angles both rotate; there can be one")
        angles = None
        if self.angles is not None:
            if len(self.angles) != len(clients):
                raise DataError(
                    f"{self.name}: angles for {len(self.angles)} clients, not {len(clients)}"
                )
            angles = tuple(
                _floats(f"{self.name}: angles of client {k}", value, len(clients[k]))
                for k, value in enumerate(self.angles)
            )
        for field in ("rotation", "noise"):
            value = getattr(self, field)
            if value is not None:
                value = _floats(f"{self.name}: {field}", value, len(clients))
                object.__setattr__(self, field, value)
        # Sort the samples of each client together with their angles.
        order = [np.argsort(part, kind="stable") for part in clients]
        object.__setattr__(self, "clients", _frozen(clients, order))
        object.__setattr__(self, "angles", angles and _frozen(angles, order))

    @cached_property
    def hash(self) -> str:
        """Content hash of samples and shifts, 16 hex digits."""
        digest = hashlib.sha256()
        for part in self.clients:
            digest.update(len(part).to_bytes(8, "little") + part.astype("<i8").tobytes())
        for field in ("rotation", "noise", "angles"):
            value = getattr(self, field)
            if value is not None:
                flat = np.concatenate(value) if field == "angles" else value
                digest.update(field.encode() + flat.astype("<f8").tobytes())
        return digest.hexdigest()[:16]

    @property
    def sizes(self) -> IntArray:
        """Number of samples of each client, ``[clients]``."""
        return np.array([len(part) for part in self.clients], dtype=np.int64)

    def label_counts(self, labels: npt.ArrayLike, num_classes: int | None = None) -> IntArray:
        """Number of samples per client and class, ``[clients, C]``.

        Args:
            labels: the class of each sample, ``[N]``, or ``[N, C]`` for several labels per sample,
                of which the non-zero ones are counted.
            num_classes: C for ``[N]``; the largest label plus one if None.

        Raises:
            DataError: the labels are not classes, or not those of this dataset.
        """
        labels = np.asarray(labels)
        self.check(len(labels))
        if labels.ndim == 2:
            return np.stack([np.count_nonzero(labels[part], axis=0) for part in self.clients])
        if labels.dtype.kind not in "iub":
            raise DataError(f"labels of type {labels.dtype} are not classes and cannot be counted")
        labels = labels.astype(np.int64)
        classes = int(labels.max()) + 1 if num_classes is None else num_classes
        if labels.min() < 0 or labels.max() >= classes:
            wrong = labels.min() if labels.min() < 0 else labels.max()
            raise DataError(f"label {wrong} is not one of the {classes} classes 0..{classes - 1}")
        return np.stack([np.bincount(labels[part], minlength=classes) for part in self.clients])

    def degrees(self) -> tuple[FloatArray, ...] | None:
        """The rotation of each sample in degrees, one array per client; None without rotation."""
        if self.rotation is None:
            return self.angles
        return tuple(np.full(n, d) for n, d in zip(self.sizes, self.rotation, strict=True))

    def check(self, num_samples: int) -> Partition:
        """Return this partition; raise a DataError if the dataset has another size."""
        if num_samples != self.num_samples:
            raise DataError(
                f"{self.name} (seed {self.seed}, hash {self.hash}) is a partition of "
                f"{self.num_samples} samples, but the data have {num_samples}; "
                "draw it on these data, or load the data it was drawn on"
            )
        return self

    def to_json(self) -> str:
        """The content of a file for :meth:`load`, with one client per line."""
        lines = [f'"format": {_json(FORMAT)}', f'"version": {VERSION}']
        for field in TYPES:
            value = getattr(self, field)
            if isinstance(value, tuple):
                rows = ",\n".join(_json(row) for row in value)
                lines.append(f"{_json(field)}: [\n{rows}\n]")
            elif value is not None:
                lines.append(f"{_json(field)}: {_json(value)}")
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def save(self, path: str | Path) -> Path:
        """Write a JSON file for :meth:`load`; return its path.

        Raises:
            DataError: it cannot be written, e.g. since the disk is full.
        """
        path = Path(path)
        try:
            make_folder(path.parent)
            write_file(path, self.to_json().encode())
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error.strerror or error}") from None
        return path

    @classmethod
    def load(cls, path: str | Path) -> Partition:
        """Read a file written by :meth:`save` and verify its hash.

        Raises:
            DataError: the file cannot be read, is damaged, or has another version.
        """
        values = _values(Path(path))
        expected = values.pop("hash")
        try:
            partition = cls(**values)
        except DataError as error:
            raise DataError(f"{path} is damaged: {error}") from None
        if partition.hash != expected:
            raise DataError(
                f"{path} is damaged: its content has hash {partition.hash}, not {expected} as it "
                "says"
            )
        return partition

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Partition) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[str, int, int, str]:
        return self.name, self.seed, self.num_samples, self.hash

    def __repr__(self) -> str:
        return (
            f"Partition({self.name!r}, seed={self.seed}, clients={len(self.clients)}, "
            f"samples={self.sizes.sum()} of {self.num_samples}, hash={self.hash!r})"
        )


def _indices(name: str, value: npt.ArrayLike) -> IntArray:
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.empty((0, 0))
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise DataError(f"{name}: a client's samples must be a list of whole numbers")
    return array.astype(np.int64)


def _floats(what: str, value: npt.ArrayLike, length: int) -> FloatArray:
    try:
        array = np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise DataError(f"{what} must be numbers") from None
    if array.shape != (length,) or not np.isfinite(array).all():
        raise DataError(f"{what} must be {length} finite numbers")
    array.flags.writeable = False
    return array


def _frozen(arrays: Sequence[npt.NDArray[Any]], order: list[IntArray]) -> tuple[Any, ...]:
    ordered = tuple(array[index] for array, index in zip(arrays, order, strict=True))
    for array in ordered:
        array.flags.writeable = False
    return ordered


def _values(path: Path) -> dict[str, Any]:
    """The checked values of a file."""
    try:
        found = read_json(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:
        raise DataError(
            f"{path} is not a partition file, or is cut short: not valid JSON"
        ) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise DataError(f"{path} is not a partition file; write one with Partition.save")
    if found.get("version") != VERSION:
        raise DataError(
            f"{path} has version {found.get('version')!r}, this kedge reads {VERSION}; update kedge"
        )
    for key, kind in TYPES.items():
        if not isinstance(found.get(key), kind) or isinstance(found.get(key), bool):
            raise DataError(f"{path} is damaged: {key} is missing or of the wrong type")
    return {key: found[key] for key in TYPES if key in found}


def _json(value: Any) -> str:
    plain = value.tolist() if isinstance(value, np.ndarray) else value
    return json.dumps(plain, separators=(",", ":"), allow_nan=False)


# -- parts of every client's samples --------------------------------------------------------------


def holdout(
    partition: Partition, labels: npt.ArrayLike, fraction: float, seed: int, purpose: str = "split"
) -> tuple[Partition, ...]:
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
    return _split(partition, labels, shares, seed, name, parts, purpose)


def resplit(
    partition: Partition,
    labels: npt.ArrayLike,
    fractions: Sequence[float] = (0.4, 0.3, 0.3),
    seed: int = 0,
) -> tuple[Partition, ...]:
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
    return _split(partition, labels, fractions, seed, name, parts)


def _split(
    partition: Partition,
    labels: npt.ArrayLike,
    fractions: Sequence[float],
    seed: int,
    name: str,
    parts: Sequence[str],
    purpose: str = "split",
) -> tuple[Partition, ...]:
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
    return tuple(split)


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
