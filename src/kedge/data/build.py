"""From a dataset and a partition to a federation: what is trained on, what is tested on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kedge.core import rng
from kedge.core.task import make_task
from kedge.data.augment import rotate
from kedge.data.datasets import Dataset
from kedge.data.federation import Federation
from kedge.data.partition import Partition
from kedge.data.splits import Pieces, deal
from kedge.errors import DataError

_ROWS = 4096  # images turned at a time


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
        held_out=pieces.held_out,
        moments=(dataset.mean, dataset.std),
        augment=augment,
        angles=angles,
        dtype=dtype,
        device=device,
    )
    federation.partition = pieces.whole
    return federation


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
