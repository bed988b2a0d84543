"""Datasets known by name: classes, normalisation constants and published file layouts; and the list
of those on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np

from kedge.data.datasets.dataset import Array, Dataset, Pair, ReadResult, assemble
from kedge.data.datasets.formats import (
    detect,
    entries,
    file_suffixes,
    locate,
    open_path,
    places,
    readers,
    roots,
    stem_of,
    suffix_of,
)
from kedge.errors import DataError
from kedge.registry import Registry

datasets = Registry[Callable[..., Dataset]]("dataset", see="kedge data")


@dataclass(frozen=True)
class KnownDataset:
    """A known dataset, read from NAME.npz, a folder NAME, or one of its ``layouts``.

    Calling it loads the dataset; ``options`` are those of the reader of its format.
    """

    name: str
    shape: tuple[int, ...]
    count: int
    classes: tuple[str, ...] | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    layouts: tuple[str, ...] = ()
    published: str = ""

    def __call__(self, **options: Any) -> Dataset:
        path = locate(self.name, self.layouts)
        if path is None:
            raise DataError(f"dataset {self.name!r} is not on this machine. Put {self.advice()}")
        return open_path(path, self.name, options, known=self)

    def advice(self) -> str:
        """Which files to put into which folder."""
        other = f", or {self.published}," if self.published else ""
        return f"{self.name}.npz (x_train, y_train, x_test, y_test){other} into {places()}"

    def files(self) -> str:
        """The same without the folder, in few words."""
        return f"{self.name}.npz" + (f", or {self.published}" if self.published else "")

    def moments(self, shape: tuple[int, ...]) -> Pair | None:
        """The published mean and standard deviation, if the images have the published shape."""
        if not self.mean or shape != self.shape:
            return None
        return np.array(self.mean, np.float32), np.array(self.std, np.float32)


_IDX = "its four files such as train-images-idx3-ubyte.gz as a folder {}"
for _known in (
    KnownDataset(
        "mnist", (1, 28, 28), 10, tuple("0123456789"), (0.1307,), (0.3081,),
        ("MNIST/raw", "MNIST"), _IDX.format("mnist"),
    ),
    KnownDataset(
        "fashion_mnist", (1, 28, 28), 10,
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag",
         "Ankle boot"),
        (0.2860,), (0.3530,),
        ("FashionMNIST/raw", "FashionMNIST", "fashion-mnist"), _IDX.format("fashion_mnist"),
    ),
    KnownDataset(
        "cifar10", (3, 32, 32), 10,
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616),
        ("cifar-10-batches-py",), "the folder cifar-10-batches-py",
    ),
    KnownDataset(
        "cifar100", (3, 32, 32), 100, None,
        (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762),
        ("cifar-100-python",), "the folder cifar-100-python",
    ),
    KnownDataset(
        "organamnist", (1, 28, 28), 11,
        ("bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right", "liver",
         "lung-left", "lung-right", "pancreas", "spleen"),
        published="MedMNIST's own organamnist.npz",
    ),
    KnownDataset("covid_darkcovidnet64", (1, 64, 64), 3),
):  # fmt: skip
    datasets.add(_known.name, _known)


@datasets.register("digits")
def digits() -> Dataset:
    """1797 handwritten digits of 8x8 pixels that come with scikit-learn.

    Every fifth image of each digit is for testing. The 17 grey levels are spread over 0 to 255.
    """
    table = _digits_table()
    x = np.round(table[:, :-1].reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    y = table[:, -1].astype(np.int64)
    test = np.zeros(len(y), bool)
    for c in range(10):
        test[np.flatnonzero(y == c)[2::5]] = True
    splits = {"train": (x[~test], y[~test]), "test": (x[test], y[test])}
    result = ReadResult([splits], "classification", 10, tuple("0123456789"))
    return assemble("digits", ["digits"], result)


def _digits_table() -> Array:
    """Pixels and digit of each image, ``[1797, 65]``. scikit-learn is imported, which takes a
    second, only where its file is not in its usual place."""
    place = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    if Path(str(place)).is_file():
        return np.loadtxt(str(place), delimiter=",")
    from sklearn.datasets import load_digits

    return np.column_stack(load_digits(return_X_y=True))


# -- the list -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DatasetListing:
    """One line of ``kedge data``."""

    name: str
    kind: str = ""  # empty if the dataset is missing
    where: str = ""
    shape: tuple[int, ...] | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    note: str = ""  # an error, or where to put the dataset
    classes: int = 0  # 0: not known without reading the labels
    files: str = ""  # of a missing dataset


DIGITS = DatasetListing(
    "digits", "built in", "scikit-learn", (1, 8, 8), {"train": 1438, "test": 359}, classes=10
)


def available() -> list[DatasetListing]:
    """List built-in datasets and those in $KEDGE_DATA or the user's cache, then missing ones.

    No dataset is loaded: shapes and sizes come from file headers and counts.
    """
    present, missing = [], []
    listed: set[Path] = set()
    for name in datasets:
        entry = datasets[name]
        if not isinstance(entry, KnownDataset):
            present.append(DIGITS if name == "digits" else DatasetListing(name, "built in"))
            continue
        path = locate(name, entry.layouts)
        if path is None:
            note = f"could be put: {entry.advice()}"
            missing.append(
                DatasetListing(name, "", "", entry.shape, {}, note, entry.count, entry.files())
            )
        else:
            present.append(replace(_listing(name, path), classes=entry.count))
            listed.add(path)
    names = {listing.name for listing in present}
    for root in roots():
        for path in entries(root) if root.is_dir() else []:
            name = stem_of(path)
            usable = path.is_dir() or suffix_of(path) in file_suffixes()
            if usable and name not in names and not any(path in (t, *t.parents) for t in listed):
                present.append(_listing(name, path))
                names.add(name)
    return present + missing


def _listing(name: str, path: Path) -> DatasetListing:
    kind = ""
    try:
        kind = detect(path)
        shape, sizes = readers[kind].peek(path)
    except DataError as error:
        return DatasetListing(name, kind or "unreadable", str(path), note=str(error))
    return DatasetListing(name, kind, str(path), shape, sizes)
