"""MNIST-style IDX files, plain or gzipped: MNIST, Fashion-MNIST, KMNIST and the like."""

from __future__ import annotations

import gzip
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from kedge.data.datasets.arrays import (
    LabelledArray,
    assemble_labels,
    channels_first,
    check_lengths,
    inputs,
)
from kedge.data.datasets.dataset import Array, ReadResult
from kedge.data.datasets.formats import DataReader, Peek, Shape, check_memory, readers, reading
from kedge.errors import DataError

PREFIXES = {"train": "train", "test": "t10k"}


@readers.register("idx")
@dataclass(frozen=True)
class Idx(DataReader):
    """The IDX files of MNIST and its relatives, plain or compressed with gzip."""

    pieces = "ubyte"
    precedence = 4

    @classmethod
    def detect(cls, path: Path) -> bool:
        return _folder(path) is not None

    @classmethod
    def peek(cls, path: Path) -> Peek:
        shapes = {split: _header(images, 3) for split, (images, _) in _files(path).items()}
        return channels_first(shapes["train"][1:]), {s: shape[0] for s, shape in shapes.items()}

    def read(self, paths: Sequence[Path], limit: int | None = None) -> ReadResult:
        found = []
        for i, path in enumerate(paths):
            for split, (images, labels) in _files(path).items():
                x, y = _array(images, 3), _array(labels, 1)
                check_lengths(str(images), x, str(labels), y)
                found.append(LabelledArray(i, split, inputs(x, str(images)), str(labels), y))
        return assemble_labels(found, len(paths), limit=limit)


def _folder(path: Path) -> Path | None:
    """The folder with the files: ``path`` or ``path/raw`` (torchvision's layout)."""
    for folder in (path, path / "raw"):
        if folder.is_dir() and any(folder.glob("train-images[-.]idx3-ubyte*")):
            return folder
    return None


def _files(path: Path) -> dict[str, tuple[Path, Path]]:
    """The files of images and labels of each split."""
    folder = _folder(path)
    if folder is None:
        raise DataError(
            f"{path}: no train-images-idx3-ubyte or train-images-idx3-ubyte.gz in there"
        )
    found = {}
    for split, prefix in PREFIXES.items():
        images = _file(folder, f"{prefix}-images", "idx3-ubyte")
        labels = _file(folder, f"{prefix}-labels", "idx1-ubyte")
        if images and labels:
            found[split] = (images, labels)
        elif images or labels:
            lacking = f"{prefix}-labels-idx1-ubyte" if images else f"{prefix}-images-idx3-ubyte"
            raise DataError(
                f"{folder}: {(images or labels or folder).name} is there but {lacking} is not"
            )
    return found


def _array(path: Path, ndim: int) -> Array:
    """Read an IDX file of bytes with ``ndim`` axes; its length must match its header."""
    with reading(path, "an IDX file"), _open(path) as file:
        shape = _shape(path, file.read(4 + 4 * ndim), ndim)
        size = math.prod(shape)
        check_memory(path, size)
        data = file.read(size + 1)  # compressed ones may have any length
    found = len(data)
    if found != size:
        what = "cut short" if found < size else "too long"
        raise DataError(
            f"{path}: {what}: {'x'.join(map(str, shape))} values announced, {found} bytes found "
            f"(row {found // max(1, size // max(1, shape[0]))}); copy or download it again"
        )
    return np.frombuffer(data, np.uint8).reshape(shape).copy()


def _header(path: Path, ndim: int) -> Shape:
    """The shape of the array in an IDX file, from its header."""
    with reading(path, "an IDX file"), _open(path) as file:
        head = file.read(4 + 4 * ndim)
    return _shape(path, head, ndim)


def _shape(path: Path, head: bytes, ndim: int) -> Shape:
    if not head:
        raise DataError(f"{path}: the file is empty")
    if len(head) < 4 + 4 * ndim or head[:2] != b"\0\0" or head[3] != ndim:
        raise DataError(
            f"{path}: not an IDX file with {ndim} axes (it begins with {head[:4].hex(' ')})"
        )
    if head[2] != 8:
        raise DataError(f"{path}: values of IDX type 0x{head[2]:02x}; only bytes (0x08) are images")
    return tuple(int(n) for n in np.frombuffer(head, ">u4", count=ndim, offset=4))


def _open(path: Path) -> BinaryIO | gzip.GzipFile:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _file(folder: Path, stem: str, suffix: str) -> Path | None:
    names = [f"{stem}{joint}{suffix}{end}" for end in ("", ".gz") for joint in "-."]
    return next((folder / name for name in names if (folder / name).is_file()), None)
