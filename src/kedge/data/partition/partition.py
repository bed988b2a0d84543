"""The Partition: the samples of each client, with a name, a seed and a content hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kedge.errors import DataError
from kedge.files import make_folder, read_json, write_file

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
FORMAT, VERSION = "kedge partition", 1
#: The values of a file and their types; JSON, readable in any language.
TYPES = {
    "name": str, "seed": int, "num_samples": int, "hash": str, "rotation": list | None,
    "noise": list | None, "clients": list, "angles": list | None,
}  # fmt: skip


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
        if not isinstance(other, Partition):
            return NotImplemented
        left, right = (
            (p.name, p.seed, p.num_samples, p.sizes.tolist(), p.hash) for p in (self, other)
        )
        return left == right

    def __hash__(self) -> int:
        return hash((self.name, self.seed, self.num_samples, self.hash))

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
