"""The federation on the device: all samples in one tensor, every client a list of rows.

A batch is a gather by index; :mod:`kedge.core.work` draws the indices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kedge.core import rng, tree
from kedge.core.task import Batch, Task
from kedge.core.view import Chunks
from kedge.data.augment import augmentation, rotate
from kedge.data.partition import Partition
from kedge.errors import DataError

SWEEP_ROWS = 256  # rows of one piece of a sweep


class Federation:
    """Samples, the rows of each client, and what the models are tested on.

    Inputs stay as they come: uint8 images are scaled to 0..1 and normalised by ``moments`` (mean
    and standard deviation per channel or column) when a batch is gathered, floats are normalised
    likewise. ``held_out`` are rows that a client does not train on; without a ``test`` set,
    the global model is tested on all of them. ``angles`` tests on the test set turned by each of
    them.
    """

    def __init__(
        self,
        x: Any,
        y: Any,
        clients: Sequence[Any],
        task: Task,
        test: tuple[Any, Any] | None = None,
        *,
        held_out: Sequence[Any] | None = None,
        moments: tuple[Any, Any] | None = None,
        augment: str = "none",
        angles: Sequence[float] = (0.0,),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.task, self.dtype, self.device = task, dtype, torch.device(device)
        self.partition: Partition | None = None  # where the clients come from, if they were drawn
        self.x, self.y = self._inputs(x), self._labels(y)
        if len(self.x) != len(self.y):
            raise DataError(f"{len(self.x)} inputs but {len(self.y)} labels")
        self._check_labels(self.y, "")
        if not len(clients):
            raise DataError("there are no clients; give at least one list of rows")
        rows = [self._rows(k, own) for k, own in enumerate(clients)]
        self.sizes = [len(own) for own in rows]
        self.offsets = [0, *accumulate(self.sizes)][:-1]
        self.rows = torch.cat(rows).to(self.device)  # client k: rows[offset : offset + size]
        self.held_out = [self._rows(k, own, "held-out ") for k, own in enumerate(held_out or ())]
        if self.held_out and len(self.held_out) != len(rows):
            raise DataError(f"{len(self.held_out)} lists of held-out rows for {len(rows)} clients")
        for k, own in enumerate(self.held_out):
            if bool(torch.isin(own, rows[k].to(self.device)).any()):
                raise DataError(f"client {k} holds out rows that it also trains on")
        self.angles = tuple(angles)
        self._augment = augmentation(augment)
        if self.x.ndim != 4 and (self._augment or self.angles != (0.0,)):
            raise DataError("augmentation and rotation are for images [C, H, W], not for tables")
        self._moments = None
        if moments is not None:
            shape = (-1, *(1,) * (self.x.ndim - 2))
            mean, std = (torch.as_tensor(m, dtype=dtype, device=self.device) for m in moments)
            self._moments = (mean.reshape(shape), std.reshape(shape))
        self._test = None
        if test is not None:
            inputs, labels = self._inputs(test[0]), self._labels(test[1])
            if len(inputs) != len(labels):
                raise DataError(f"{len(inputs)} test inputs but {len(labels)} test labels")
            if inputs.shape[1:] != self.x.shape[1:]:
                raise DataError(
                    f"test inputs have the shape {tuple(inputs.shape[1:])}, training inputs "
                    f"{tuple(self.x.shape[1:])}"
                )
            self._check_labels(labels, "test ")
            self._test = (inputs, labels)
        elif self.held_out:
            every = torch.cat(self.held_out)
            self._test = (self.x[every], self.y[every])

    @property
    def num_clients(self) -> int:
        return len(self.sizes)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])

    @property
    def num_test(self) -> int:
        """Samples of the test set."""
        return len(self._test[0]) if self._test is not None else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all samples and rows on the device."""
        return tree.nbytes((self.x, self.y, self.rows, *(self._test or ())))

    # -- batches ------------------------------------------------------------------------------

    @property
    def is_random(self) -> bool:
        return self._augment is not None

    def batch(self, index: Tensor, key: Tensor) -> Batch:
        """Samples for training, augmented."""
        x = self._scaled(_picked(self.x, index))
        if self._augment is not None:
            x = self._augment(x, key)
        return Batch(self._normalised(x), _picked(self.y, index))

    def clean(self, index: Tensor) -> Batch:
        """The same samples as they are."""
        return Batch(self._normalised(self._scaled(self.x[index])), self.y[index])

    @property
    def has_test(self) -> bool:
        return self._test is not None

    def test_batches(self, angle: float = 0.0, rows: int = 1024) -> Iterator[Batch]:
        """The test set piece by piece, turned by an angle."""
        if self._test is None:
            raise DataError(
                "there is nothing to test on; give a test set, or hold out a part of every client"
            )
        inputs, labels = self._test
        for i in range(0, len(inputs), rows):
            x = self._scaled(inputs[i : i + rows])
            if angle:
                x = rotate(x, torch.full((len(x),), angle, device=self.device))
            yield Batch(self._normalised(x), labels[i : i + rows])

    def held_out_batches(self, client: int, rows: int = 1024) -> Iterator[Batch]:
        """What a client keeps for testing, piece by piece."""
        for piece in torch.split(self.held_out[client], rows):
            yield self.clean(piece)

    def _scaled(self, x: Tensor) -> Tensor:
        return x.to(self.dtype) / 255 if x.dtype == torch.uint8 else x

    def _normalised(self, x: Tensor) -> Tensor:
        if self._moments is None:
            return x
        mean, std = self._moments
        return (x - mean) / std

    # -- what a round needs -------------------------------------------------------------------

    def label_counts(self) -> Tensor:
        """Samples of each class on each client, ``[clients, C]``."""
        soft = self.task.soft(self.y[self.rows], self.dtype)
        owner = torch.repeat_interleave(torch.tensor(self.sizes, device=self.device))
        counts = torch.zeros(self.num_clients, soft.shape[1], dtype=self.dtype, device=self.device)
        return counts.index_add(0, owner, soft)

    def chunks(self, clients: Sequence[int]) -> Chunks:
        """The whole data of some clients as pieces of one size, ``[K, pieces, rows]``."""
        size = SWEEP_ROWS  # whoever else takes part: it decides the order of sums
        pieces = math.ceil(max(self.sizes[k] for k in clients) / size)
        at = torch.arange(pieces * size, device=self.device)
        n = self._numbers([self.sizes[k] for k in clients])[:, None]
        start = self._numbers([self.offsets[k] for k in clients])[:, None]
        index = self.rows[start + torch.minimum(at, n - 1)]
        mask = (at < n).to(self.dtype)
        return Chunks(index.reshape(-1, pieces, size), mask.reshape(-1, pieces, size))

    def _numbers(self, values: Sequence[int]) -> Tensor:
        """Numbers on the device, without waiting for it."""
        return torch.tensor(values).to(self.device, non_blocking=True)

    def _inputs(self, x: Any) -> Tensor:
        x = _tensor(x)
        return x.to(self.device, x.dtype if x.dtype == torch.uint8 else self.dtype)

    def _labels(self, y: Any) -> Tensor:
        return self.task.labels(_tensor(y).to(self.device), self.dtype)

    def _check_labels(self, y: Tensor, kind: str) -> None:
        self.task.check_labels(y, kind)

    def _rows(self, client: int, rows: Any, kind: str = "") -> Tensor:
        own = _tensor(rows)
        if len(own) and (own.dtype == torch.bool or own.is_floating_point()):
            raise DataError(
                f"client {client}: rows are {own.dtype}; give the indices of its samples"
            )
        own = own.to(torch.int64)
        if len(own) == 0 and not kind:
            raise DataError(f"client {client} has no samples; give it some or leave it out")
        if len(own) and (int(own.min()) < 0 or int(own.max()) >= len(self.x)):
            raise DataError(f"client {client} names a {kind}row outside 0..{len(self.x) - 1}")
        return own.to(self.device)


def _tensor(values: Any) -> Tensor:
    """A tensor of an array or list; read-only arrays are copied, as torch cannot share them."""
    if isinstance(values, np.ndarray) and not values.flags.writeable:
        values = values.copy()
    return torch.as_tensor(values)


def _picked(x: Tensor, index: Tensor) -> Tensor:
    """Some rows; for one client on a CPU by an operator that takes a twentieth of the time."""
    return x.index_select(0, index) if rng.is_plain(index, 1) else x[index]
