"""Build a federation from a dataset, a partition and a split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kedge.core import rng
from kedge.core.task import make_task
from kedge.data.augment import rotate
from kedge.data.datasets import Dataset
from kedge.data.encodings import encoding_of
from kedge.data.federation import Federation
from kedge.data.partition import Partition
from kedge.data.splits import SplitData, silo_names, split_data
from kedge.errors import DataError

_SHIFT_ROWS = 4096  # samples shifted at once, which bounds the memory


def federate(
    dataset: Dataset,
    partition: str | Partition,
    *,
    clients: int = 10,
    split: str = "auto",
    validation: float = 0.0,
    unseen: float = 0.0,
    augment: str = "none",
    angles: Sequence[float] = (0.0,),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Federation:
    """Partition a dataset among clients and put it on a device.

    Args:
        dataset: samples and labels, from :func:`kedge.data.datasets.load`.
        partition: a partition, or its text, such as ``dirichlet(0.1)+rotation(step=15)``.
        clients: number of clients, for a partition given as text.
        split: where test data come from: ``auto``, ``given``, ``holdout(0.2)`` or ``pooled(...)``.
        validation: share of every client's training samples held out to choose by.
        unseen: share of the clients that never train; the global model is tested on their samples.
        augment: augmentation of training batches, such as ``crop(4)+flip``.
        angles: rotations of the test set in degrees; the model is tested on each of them.
        seed: seed of the partition, the split and the feature noise.
        dtype: floating-point type of inputs and targets.
        device: where the samples are stored.

    Returns:
        The federation; its ``partition`` is the one that was drawn.

    Raises:
        DataError: the dataset does not suit the partition, the split or the augmentation.
        KedgeError: a text cannot be parsed, or the partition cannot be drawn.

    >>> from kedge.data.datasets import load
    >>> federation = federate(load("digits"), "dirichlet(0.5)", clients=5)
    >>> federation.num_clients, federation.input_shape, federation.num_test
    (5, (1, 8, 8), 359)
    """
    data = split_data(dataset, partition, clients, split, seed, validation, unseen)
    federation = Federation(
        _shift_features(data, dataset, seed),
        data.y,
        data.train.clients,
        make_task(dataset.task, dataset.outputs),
        data.test,
        held_out=data.held_out,
        validation=data.validation,
        unseen=data.unseen,
        moments=(dataset.mean, dataset.std),
        augment=augment,
        angles=angles,
        dtype=dtype,
        device=device,
        tokens=dataset.kind == "tokens",
        # of silos, or numbers: if some clients never train, the others keep theirs
        client_names=silo_names(dataset, data.train) or [f"client {k}" for k in data.seen],
    )
    federation.partition = data.partition
    federation.encoding, federation.classes = encoding_of(dataset), dataset.classes
    federation.fingerprint = dataset.fingerprint
    return federation


def _shift_features(data: SplitData, dataset: Dataset, seed: int) -> Any:
    """The inputs after each client's feature shift: rotation and noise."""
    partition = data.partition
    degrees = partition.degrees()
    if degrees is None and partition.noise is None:
        return data.x
    if degrees is not None and not dataset.is_image:
        raise DataError(
            f"rotation is for images; {dataset.name} is {_article(dataset.kind)}. Use noise(0.1)"
        )
    if partition.noise is not None and dataset.kind == "tokens":
        raise DataError(f"noise is for numbers; the inputs of {dataset.name} are token ids")
    x = torch.as_tensor(data.x).clone()
    for k, rows in enumerate(partition.clients):
        for chunk in np.array_split(np.arange(len(rows)), max(1, len(rows) // _SHIFT_ROWS)):
            own = torch.tensor(rows[chunk])
            values = x[own].to(torch.float32)
            if degrees is not None:
                values = rotate(values, torch.tensor(degrees[k][chunk]))
            if partition.noise is not None:
                key = rng.fold(rng.fold(rng.key(seed), "shift"), int(own[0]))
                unit = 255.0 if x.dtype == torch.uint8 else torch.as_tensor(dataset.std)
                sigma = float(partition.noise[k])
                values = values + sigma * unit * rng.normal(key, tuple(values.shape))
            x[own] = values.round().clamp(0, 255).to(x.dtype) if x.dtype == torch.uint8 else values
    return x


def _article(kind: str) -> str:
    several = {"tokens": "of token ids", "series": "of series", "volume": "of volumes"}
    return several.get(kind, f"a {kind}")
