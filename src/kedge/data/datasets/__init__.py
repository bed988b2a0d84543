"""Datasets: :func:`load` turns a name or a path into a :class:`Dataset`.

``digits`` is built in. Other datasets are read from disk: ``.npz``, MNIST-style IDX, CIFAR's Python
batches, image folders, CSV, and silos (a folder with one .npz, CSV or image folder per client,
which is then the partition). Only ``hf:NAME`` downloads, through the optional ``datasets`` package.
Names are searched in ``$KEDGE_DATA``, then in the user's cache. Invalid data raise a DataError that
names file and row.

>>> load("digits").describe()
'digits: 1x8x8 images, 10 classes, 1438 train, 359 test'
"""

from kedge.data.datasets.dataset import Dataset
from kedge.data.datasets.formats import readers
from kedge.data.datasets.known import DatasetListing, available, datasets
from kedge.data.datasets.load import load
from kedge.data.datasets.tables.read import dataset_of_frames

__all__ = [
    "Dataset", "DatasetListing", "available", "dataset_of_frames", "datasets", "load", "readers",
]  # fmt: skip
