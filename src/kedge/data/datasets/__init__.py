"""Datasets: one name or path in, one :class:`Dataset` out.

Built in is ``digits``. Everything else is read from disk and never fetched unasked: ``.npz``,
MNIST-style IDX, CIFAR's python batches, image folders, CSV, and silos (a folder with one .npz, CSV
or image folder per client, which is then the partition). ``hf:NAME`` goes through the optional
``datasets`` package. Names are looked for in ``$KEDGE_DATA``, then in the user's cache. What cannot
be used ends in a DataError that names file and row.

>>> load("digits").describe()
'digits: 1x8x8 images, 10 classes, 1438 train, 359 test'
"""

from kedge.data.datasets.dataset import Dataset
from kedge.data.datasets.known import datasets
from kedge.data.datasets.listing import Listing, available
from kedge.data.datasets.load import load
from kedge.data.datasets.readers import readers

__all__ = ["Dataset", "Listing", "available", "datasets", "load", "readers"]
