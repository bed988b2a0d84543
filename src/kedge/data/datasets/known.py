"""Datasets known by name: classes, normalisation constants and published file layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kedge.data.datasets.dataset import Dataset, Pair, ReadResult, assemble
from kedge.data.datasets.find import locate, places
from kedge.data.datasets.readers import open_path
from kedge.errors import DataError
from kedge.registry import Registry

datasets = Registry[Callable[..., Dataset]]("dataset", see="kedge data")


@dataclass(frozen=True)
class Known:
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
    Known(
        "mnist", (1, 28, 28), 10, tuple("0123456789"), (0.1307,), (0.3081,),
        ("MNIST/raw", "MNIST"), _IDX.format("mnist"),
    ),
    Known(
        "fashion_mnist", (1, 28, 28), 10,
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag",
         "Ankle boot"),
        (0.2860,), (0.3530,),
        ("FashionMNIST/raw", "FashionMNIST", "fashion-mnist"), _IDX.format("fashion_mnist"),
    ),
    Known(
        "cifar10", (3, 32, 32), 10,
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616),
        ("cifar-10-batches-py",), "the folder cifar-10-batches-py",
    ),
    Known(
        "cifar100", (3, 32, 32), 100, None,
        (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762),
        ("cifar-100-python",), "the folder cifar-100-python",
    ),
    Known(
        "organamnist", (1, 28, 28), 11,
        ("bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right", "liver",
         "lung-left", "lung-right", "pancreas", "spleen"),
        published="MedMNIST's own organamnist.npz",
    ),
    Known("covid_darkcovidnet64", (1, 64, 64), 3),
):  # fmt: skip
    datasets.add(_known.name, _known)


@datasets.register("digits")
def digits() -> Dataset:
    """1797 handwritten digits of 8x8 pixels that come with scikit-learn.

    Every fifth image of each digit is for testing. The 17 grey levels are spread over 0 to 255.
    """
    from sklearn.datasets import load_digits  # importing it takes a second

    bunch = load_digits()
    x = np.round(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    y = bunch.target.astype(np.int64)
    test = np.zeros(len(y), bool)
    for c in range(10):
        test[np.flatnonzero(y == c)[2::5]] = True
    splits = {"train": (x[~test], y[~test]), "test": (x[test], y[test])}
    result = ReadResult([splits], "classification", 10, tuple("0123456789"))
    return assemble("digits", ["digits"], result)
