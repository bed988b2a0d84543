"""``.npz`` files: x_train, y_train and optionally x_test, y_test, x_val, y_val and classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kedge.data.datasets.arrays import (
    KindOption,
    LabelledArray,
    assemble_labels,
    channels_first,
    check_lengths,
    guess_kind,
    inputs,
)
from kedge.data.datasets.dataset import SPLITS, Array, ReadResult, TaskOption, kind_of
from kedge.data.datasets.formats import DataReader, Peek, Shape, check_memory, readers, reading
from kedge.errors import DataError

# Array names of a split: kedge and Keras; MedMNIST.
ARRAY_NAMES = (("x_{}", "y_{}"), ("{}_images", "{}_labels"))


@readers.register("npz")
@dataclass(frozen=True)
class Npz(DataReader):
    """NumPy archives with x_train, y_train and perhaps x_test, y_test (or x and y).

    Inputs are tables [n, columns], images [n, height, width] with channels first or last, volumes,
    series [n, channels, time], or with kind=tokens whole numbers [n, tokens] for an embedding.
    Classes have the same numbers in all files. Python objects are rejected.
    """

    task: TaskOption = None
    kind: KindOption = "auto"

    suffixes = (".npz",)
    precedence = 2
    examples = (
        ("scans.npz(task=multilabel)", "rows of 0 and 1 are labels, not classes"),
        ("ecg.npz(kind=series)", "inputs [n, channels, time]"),
        ("texts.npz(kind=tokens)", "whole numbers for an embedding, never scaled"),
    )

    @classmethod
    def peek(cls, path: Path) -> Peek:
        shapes: dict[str, Shape] = {}
        dtypes: dict[str, np.dtype] = {}
        with open_npz(path) as archive:
            assert archive.zip is not None  # the archive is open
            for split, (x, _) in _split_keys(path, archive.files).items():
                with archive.zip.open(f"{x}.npy") as file:
                    version = "1_0" if np.lib.format.read_magic(file) == (1, 0) else "2_0"
                    header = getattr(np.lib.format, f"read_array_header_{version}")
                    shapes[split], _, dtypes[split] = header(file)
        if not all(shapes.values()):
            raise DataError(f"{path}: an array without rows")
        shape = shapes["train"][1:]
        kind = guess_kind(shape, dtypes["train"], f"{path}: x") if 1 <= len(shape) <= 4 else ""
        if kind in ("image", "volume"):
            shape = channels_first(shape, 2 if kind == "image" else 3) or shape
        return shape, {split: shape[0] for split, shape in shapes.items()}

    def read(self, paths: Sequence[Path], limit: int | None = None) -> ReadResult:
        files = [_arrays(path) for path in paths]
        found: list[LabelledArray] = []
        names = _class_names(paths, files)
        kind: str = self.kind
        for i, (path, arrays) in enumerate(zip(paths, files, strict=True)):
            for split, (key_x, key_y) in _split_keys(path, list(arrays)).items():
                where_x, where_y = f"{path}: {key_x}", f"{path}: {key_y}"
                check_lengths(where_x, arrays[key_x], where_y, arrays[key_y])
                x = inputs(arrays[key_x], where_x, kind)
                kind = kind_of(x.shape[1:], x.dtype)  # the first one's is that of all
                found.append(LabelledArray(i, split, x, where_y, arrays[key_y]))
        return assemble_labels(
            found, len(paths), self.task, limit or len(names or ()) or None, names
        )


def _split_keys(path: Path, keys: list[str]) -> dict[str, tuple[str, str]]:
    """The names of the arrays of inputs and labels of each split."""
    found = {}
    for split in SPLITS:
        for x, y in ARRAY_NAMES:
            pair = (x.format(split), y.format(split))
            if set(pair) <= set(keys):
                found[split] = pair
            elif set(pair) & set(keys):
                present, missing = pair if pair[0] in keys else pair[::-1]
                raise DataError(f"{path}: there is {present} but no {missing}; {_needs(keys)}")
    if not found and {"x", "y"} <= set(keys):
        return {"train": ("x", "y")}
    if "train" not in found:
        raise DataError(f"{path}: no training data; {_needs(keys)}")
    return found


def _needs(keys: list[str]) -> str:
    return (
        "needed are x_train and y_train (and x_test, y_test if there is a test set); "
        f"the file has: {', '.join(keys) or 'nothing'}"
    )


def _arrays(path: Path) -> dict[str, Array]:
    with open_npz(path) as archive:
        return {key: _array(path, archive, key) for key in archive.files}


@contextmanager
def open_npz(path: Path) -> Iterator[np.lib.npyio.NpzFile]:
    """Open an archive; all errors in the block become a DataError."""
    with reading(path, "an .npz file"), path.open("rb") as file:
        start = file.read(6)
        if not start:
            raise DataError(f"{path}: the file is empty (0 bytes)")
        if start[:2] != b"PK":
            npy_hint = " (one array, as numpy.save writes)" if start == b"\x93NUMPY" else ""
            raise DataError(f"{path}: not an .npz file{npy_hint}; write it with numpy.savez")
        file.seek(0)
        with np.load(file, allow_pickle=False) as archive:
            check_memory(path, sum(entry.file_size for entry in archive.zip.infolist()))
            yield archive


def _array(path: Path, archive: np.lib.npyio.NpzFile, key: str) -> Array:
    try:
        array = archive[key]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        raise DataError(
            f"{path}: {key} is an array of Python objects, which kedge does not load as it could "
            "run code; save one array of numbers, with all rows of the same shape"
        ) from error
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path}: {key} is not an array; write the file with numpy.savez")
    return array


def _class_names(paths: Sequence[Path], files: list[dict[str, Array]]) -> tuple[str, ...] | None:
    """The optional array ``classes``, the same in all files."""
    first = None
    for path, arrays in zip(paths, files, strict=True):
        array = arrays.get("classes")
        names = None if array is None else tuple(map(str, array.reshape(-1).tolist()))
        if path is not paths[0] and names != first:
            raise DataError(
                f"{path}: 'classes' differs from that of {paths[0]}: {names} and {first}"
            )
        first = names
    return first
