"""Encodings of arrays, and the encoding of a dataset."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from kedge.data.datasets import Dataset, load
from kedge.data.datasets.formats import check_memory, entries, reading
from kedge.data.datasets.images import ImageEncoding, is_image, is_images
from kedge.data.datasets.npz import open_npz
from kedge.data.encoding import Array, Encoding, Samples, conform, encodings, to_numpy
from kedge.errors import DataError

#: Arrays of inputs and labels in an .npz file; the first that is there is taken.
NPZ_PAIRS = (
    ("x_test", "y_test"), ("test_images", "test_labels"), ("x", "y"),
    ("x_val", "y_val"), ("val_images", "val_labels"),
    ("x_train", "y_train"), ("train_images", "train_labels"),
)  # fmt: skip


@encodings.register("array")
@dataclass(frozen=True)
class ArrayEncoding(Encoding):
    """Arrays, tensors or lists of numbers; ``.npy`` and ``.npz`` files; for 8-bit images, files.

    Attributes:
        shape: shape of one training sample, channels first.
        dtype: type of the training samples.
        columns: names of the columns of a table, for DataFrames; empty if they have none.
        from_files: whether the training data were read from files, rather than given as arrays.
    """

    shape: tuple[int, ...]
    dtype: str
    columns: tuple[str, ...] = ()
    from_files: bool = True

    kind: ClassVar[str] = "array"

    def encode(self, raw: Any) -> Samples:
        """Encode an array ``[n, ...]``, a file or folder, or a dataset by name.

        Of a file or dataset with several parts, the test set is taken.
        """
        if self._is_image and (isinstance(raw, Image.Image) or is_images(raw)):
            return ImageEncoding(self.shape, False, self.dtype).encode(raw)
        if isinstance(raw, (str, os.PathLike)):
            return self._encode_path(raw)
        if isinstance(raw, Mapping) or hasattr(raw, "columns"):
            raw = self._ordered(raw)
        return self._samples(to_numpy(raw, "the input"), "the input")

    def _encode_path(self, name: str | os.PathLike[str]) -> Samples:
        path = Path(name).expanduser()
        if self._is_image and any(map(is_image, entries(path) if path.is_dir() else [path])):
            return ImageEncoding(self.shape, False, self.dtype).encode(path)
        if path.is_file() and path.suffix.lower() == ".npz":
            return self._encode_npz(path)
        if path.is_file() and path.suffix.lower() == ".npy":
            with reading(path, "an .npy file"):
                check_memory(path, path.stat().st_size)
                array = np.load(path, allow_pickle=False)
            return self._samples(to_numpy(array, str(path)), str(path))
        dataset = load(name)
        x, y = dataset.test or (dataset.x_train, dataset.y_train)
        return self._samples(x, str(name), y)

    def _encode_npz(self, path: Path) -> Samples:
        with open_npz(path) as archive:
            names = list(archive.files)
            pair = next((p for p in NPZ_PAIRS if p[0] in names), None)
            if pair is None and len(names) == 1:
                pair = (names[0], "")
            if pair is None:
                raise DataError(
                    f"{path}: which array holds the inputs? Name it x (and the labels y); "
                    f"the file has: {', '.join(names) or 'nothing'}"
                )
            x = archive[pair[0]]
            y = archive[pair[1]] if pair[1] in names else None
        if y is not None and len(y) != len(x):
            raise DataError(f"{path}: {pair[0]} has {len(x)} rows but {pair[1]} has {len(y)}")
        return self._samples(to_numpy(x, f"{path}: {pair[0]}"), f"{path}: {pair[0]}", y)

    def _samples(self, array: Array, where: str, y: Array | None = None) -> Samples:
        x = conform(array, self.shape, self.dtype, where, self.from_files)
        if y is not None and y.ndim == 2 and y.shape[1] == 1:
            y = y[:, 0]
        return Samples(x, tuple(map(str, range(len(x)))), y)

    def _ordered(self, table: Any) -> Any:
        """The columns of a DataFrame or dictionary as an array ``[n, columns]``, by name."""
        missing = [c for c in self.columns if c not in table]
        if missing:
            raise DataError(
                f"the table lacks the column {missing[0]!r}; it has: {', '.join(map(str, table))}"
            )
        names = self.columns or tuple(table)
        columns = [to_numpy(table[c], f"column {c!r}") for c in names]
        return np.stack([np.atleast_1d(c) for c in columns], axis=1)

    @property
    def _is_image(self) -> bool:
        return len(self.shape) == 3 and self.shape[0] in (1, 3) and self.dtype == "uint8"


def encoding_of(dataset: Dataset) -> Encoding:
    """The encoding of a dataset; datasets without one of their own hold arrays."""
    if dataset.encoding is not None:
        return dataset.encoding
    return ArrayEncoding(
        dataset.shape,
        str(dataset.x_train.dtype),
        dataset.columns or (),
        from_files=dataset.name != "own",  # arrays that a user gave to kedge.fit
    )
