"""From a dataset and a partition to a federation: what is trained on, what is tested on.

``split`` says where test data come from:

===================== ===========================================================================
``given``             the dataset's own test set (per silo where the silos have their own)
``holdout(0.2)``      besides, every client keeps a stratified part of its data for testing
``pooled(0.4, 0.3)``  all data are pooled, partitioned, and split per client into parts to train
                      on, to test on and, the rest, to validate on
``auto``              ``given`` where the dataset has a test set, else ``holdout(0.2)``
===================== ===========================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kedge.core import rng
from kedge.core.task import make_task
from kedge.data.augment import rotate
from kedge.data.datasets import Dataset
from kedge.data.federation import Federation
from kedge.data.partition import Partition, draw, holdout, resplit
from kedge.errors import DataError, FieldError, UnknownName
from kedge.grammar import Call, parse_call

SPLITS = ("auto", "given", "holdout", "pooled")
_ROWS = 4096  # images turned at a time


class Pieces(NamedTuple):
    """All samples in one array, and who trains and tests on which."""

    x: Any
    y: Any
    train: Partition
    held: Sequence[Any]
    test: tuple[Any, Any] | None
    whole: Partition  # as it was drawn, before anything was held out


def federate(
    dataset: Dataset,
    partition: str | Partition,
    *,
    clients: int = 10,
    split: str = "auto",
    augment: str = "none",
    angles: Sequence[float] = (0.0,),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Federation:
    """Deal a dataset out to clients. A partition given as text is drawn with ``seed``."""
    pieces = deal(dataset, partition, clients, split, seed)
    shifted = _shift(pieces, dataset, seed)
    federation = Federation(
        shifted,
        pieces.y,
        pieces.train.clients,
        make_task(dataset.task, dataset.outputs),
        pieces.test,
        held=pieces.held,
        moments=(dataset.mean, dataset.std),
        augment=augment,
        angles=angles,
        dtype=dtype,
        device=device,
    )
    federation.partition = pieces.whole
    return federation


def deal(
    dataset: Dataset, partition: str | Partition, clients: int, split: str, seed: int
) -> Pieces:
    """Who gets what, as rows of one array."""
    call = _read_split(split, dataset)
    x, y, groups = dataset.x_train, dataset.y_train, dataset.groups
    test = None
    if dataset.x_test is not None and dataset.y_test is not None:
        test = (dataset.x_test, dataset.y_test)
    if call.name == "pooled":
        if groups is not None:
            raise DataError("silos are not pooled; use split = holdout(0.2)")
        x, y = _pooled(dataset)
    labels = y.squeeze(1) if y.ndim == 2 and y.shape[1] == 1 else y
    if isinstance(partition, str):
        whole = draw(partition, labels, clients, seed, groups)
    else:
        whole = partition.check(len(x))
    if call.name == "pooled":
        first, second = _shares(call, 2)
        shares = (first, second, max(0.0, 1 - first - second))
        kept, held, *_ = resplit(whole, labels, shares, seed)
        return Pieces(x, y, kept, held.clients, None, whole)
    if call.name == "holdout":
        kept, held = holdout(whole, labels, _shares(call, 1)[0], seed)
        return Pieces(x, y, kept, held.clients, test, whole)
    if test is not None and dataset.groups_test is not None and groups is not None:
        rows = [np.flatnonzero(dataset.groups_test == g) + len(x) for g in _silos(whole, groups)]
        joined = np.concatenate([x, test[0]]), np.concatenate([y, test[1]])
        return Pieces(*joined, whole, rows, test, whole)
    return Pieces(x, y, whole, (), test, whole)


def _read_split(split: str, dataset: Dataset) -> Call:
    if split == "auto":
        split = "given" if dataset.x_test is not None else "holdout(0.2)"
    call = parse_call(split)
    if call.name not in SPLITS:
        raise UnknownName("split", call.name, SPLITS)
    if call.name == "given" and dataset.x_test is None:
        raise DataError(f"{dataset.name} has no test set; use split = holdout(0.2)")
    return call


def _shares(call: Call, count: int) -> list[float]:
    """The fractions of a split: one for ``holdout``, two for ``pooled``."""
    default = {"holdout": [0.2], "pooled": [0.4, 0.3]}[call.name]
    given = list(call.args) or default
    fine = len(given) == count and all(isinstance(v, (int, float)) and 0 < v < 1 for v in given)
    if call.kwargs or call.preset or not fine or sum(given) > 1 + 1e-9:
        example = {"holdout": "holdout(0.2)", "pooled": "pooled(0.4, 0.3)"}[call.name]
        raise FieldError(f"split {call.name} takes {count} fractions, such as {example}")
    return [float(v) for v in given]


def _pooled(dataset: Dataset) -> tuple[Any, Any]:
    xs = [dataset.x_train, dataset.x_val, dataset.x_test]
    ys = [dataset.y_train, dataset.y_val, dataset.y_test]
    keep = [i for i in range(3) if xs[i] is not None]
    return np.concatenate([xs[i] for i in keep]), np.concatenate([ys[i] for i in keep])


def _silos(whole: Partition, groups: Any) -> list[int]:
    """The silo of each client of a partition by silos."""
    found = [np.unique(groups[rows]) for rows in whole.clients]
    if any(len(f) != 1 for f in found):
        raise DataError(
            "the silos have test sets of their own, so the partition must be silos; "
            "or hold out a part of every client: split = holdout(0.2)"
        )
    return [int(f[0]) for f in found]


def _shift(pieces: Pieces, dataset: Dataset, seed: int) -> Any:
    """The samples as their clients see them: turned, or with noise."""
    whole = pieces.whole
    degrees = whole.degrees()
    if degrees is None and whole.noise is None:
        return pieces.x
    if degrees is not None and not dataset.is_image:
        raise DataError(f"rotation is for images; {dataset.name} is a table. Use noise(0.1)")
    x = torch.as_tensor(pieces.x).clone()
    for k, rows in enumerate(whole.clients):
        for at in np.array_split(np.arange(len(rows)), max(1, len(rows) // _ROWS)):
            own = torch.tensor(rows[at])
            values = x[own].to(torch.float32)
            if degrees is not None:
                values = rotate(values, torch.tensor(degrees[k][at]))
            if whole.noise is not None:
                key = rng.fold(rng.fold(rng.key(seed), "shift"), int(own[0]))
                unit = 255.0 if x.dtype == torch.uint8 else torch.as_tensor(dataset.std)
                sigma = float(whole.noise[k])
                values = values + sigma * unit * rng.normal(key, tuple(values.shape))
            x[own] = values.round().clamp(0, 255).to(x.dtype) if x.dtype == torch.uint8 else values
    return x
