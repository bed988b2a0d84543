"""A member's own data: what it reads, what it says of them, and the federation of one client.

The data are read with the member's own numbering of classes and columns. Only sums leave: how many
samples, and moments from which the mean and standard deviation of all members follow. They are the
same as those of pooled data up to the rounding of float64, in one message instead of two: each
member sends sums of squares around *its own* mean, and the server adds n_k (mean_k - mean)² (Chan,
Golub and LeVeque 1983). Of constant columns it sends the constant, and no least or largest value
leaves, which would be the value of one sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kedge.data.datasets import Dataset, load
from kedge.data.datasets.dataset import OneClass
from kedge.data.federation import Federation
from kedge.data.partition import Partition, holdout
from kedge.data.splits import read_split
from kedge.errors import DataError, FieldError, TermsError
from kedge.session.terms import Terms
from kedge.silo.conform import conform

Array = np.ndarray[Any, Any]
HOLDOUT = 0.2  # share of a member without a test set, for the split auto


def read_data(source: str | Path | Dataset) -> Dataset:
    """Read a member's dataset. One class is enough: other members have the others.

    Raises:
        DataError: the data cannot be read.
    """
    if isinstance(source, Dataset):
        return source
    try:
        return load(source)
    except OneClass as error:
        return error.dataset


def check_split(split: str) -> float | None:
    """The share that every member holds out; 0 for test sets of their own (``given``), None for
    ``auto``: a member's test set, or a share of its samples where it has none.

    Raises:
        FieldError: members cannot split their data so.
    """
    call = read_split(split)
    if call.name == "auto":
        return None
    if call.name == "given":
        return 0.0
    if call.name == "holdout":
        return float(call.options["fraction"])
    raise FieldError(
        f"split = {split!r} is not for members, each of which has its own data; use auto, given or "
        "holdout(0.2)",
        "split",
    )


@dataclass(frozen=True)
class Rows:
    """Inputs and labels of a member in one array each, and the rows to train and to test on."""

    x: Array
    y: Array
    train: Array
    test: Array


def split_rows(dataset: Dataset, split: str, seed: int, name: str) -> Rows:
    """Split a member's data.

    Rows are drawn from the seed and the member's name, so they do not depend on who else takes
    part, nor on the order in which members join.

    Raises:
        DataError: the split asks for a test set that the member does not have.
    """
    share, x, y = check_split(split), dataset.x_train, dataset.y_train
    count = len(x)
    if share is None:
        share = HOLDOUT if dataset.x_test is None else 0.0
    elif share == 0.0 and dataset.x_test is None:
        raise DataError(f"{dataset.name} has no test set; use split = holdout(0.2)")
    if share:
        every = Partition((np.arange(count),), "all", seed, count)
        labels = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
        train, test = holdout(every, labels, share, seed, purpose=f"split of {name}")
        return Rows(x, y, train.clients[0], test.clients[0])
    assert dataset.x_test is not None
    assert dataset.y_test is not None
    test_rows = np.arange(count, count + len(dataset.x_test))
    joined = np.concatenate([x, dataset.x_test]), np.concatenate([y, dataset.y_test])
    return Rows(*joined, np.arange(count), test_rows)


def own_federation(
    dataset: Dataset, terms: Terms, name: str, device: torch.device | str = "cpu"
) -> Federation:
    """The federation whose only client is this member, under the terms.

    Raises:
        TermsError: the data do not fit the schema of the terms.
    """
    own = conform(dataset, terms.data, name)
    if str(own.x_train.dtype) != terms.data.dtype:
        raise TermsError(
            f"{name}: inputs are {own.x_train.dtype}, the terms say {terms.data.dtype}"
        )
    rows = split_rows(own, terms.split, terms.seed, name)
    return Federation(
        rows.x,
        rows.y,
        [rows.train],
        terms.task,
        held_out=[rows.test] if len(rows.test) else None,
        moments=(own.mean, own.std),
        augment=terms.augment,
        dtype=getattr(torch, terms.dtype),
        device=device,
        tokens=terms.data.dtype == "int64",
        client_names=[name],
    )


# -- moments --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moments:
    """Sums over a member's training samples, per channel or column.

    Attributes:
        bytes: how often each of 256 values occurs, for 8-bit inputs; exact.
        count: numbers per channel or column.
        mean: their mean; the constant itself if all are equal.
        squares: sum of squared differences from that mean; 0 if all are equal.
    """

    bytes: tuple[tuple[int, ...], ...] = ()
    count: int = 0
    mean: tuple[float, ...] = ()
    squares: tuple[float, ...] = ()


def moments_of(x: Array, least: int = 0) -> Moments:
    """The moments of training inputs ``[n, C, ...]``; empty for token ids.

    A column in which fewer than ``least`` rows differ from all others is stated as constant: its
    sums would tell these few.

    >>> moments_of(np.array([[1.0, 5.0], [3.0, 5.0]], np.float32))
    Moments(bytes=(), count=2, mean=(2.0, 5.0), squares=(2.0, 0.0))
    """
    if x.dtype == np.int64:
        return Moments()
    channels = [np.ascontiguousarray(x[:, c]).ravel() for c in range(x.shape[1])]
    if x.dtype == np.uint8:
        return Moments(tuple(tuple(np.bincount(c, minlength=256).tolist()) for c in channels))
    means, squares = [], []
    for values in channels:
        if least > 1 and x.ndim == 2:
            distinct, counts = np.unique(values, return_counts=True)
            if len(values) - counts.max() < least:
                values = np.full_like(values, distinct[counts.argmax()])
        constant = bool((values == values[0]).all())
        mean = float(values[0]) if constant else float(values.mean(dtype=np.float64))
        means.append(mean)
        deviations = values.astype(np.float64) - mean
        squares.append(0.0 if constant else float(deviations @ deviations))
    return Moments(count=len(channels[0]), mean=tuple(means), squares=tuple(squares))
