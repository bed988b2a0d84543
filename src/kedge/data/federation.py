"""The federation on a device: all samples in one tensor, and the rows of every client.

A batch is gathered by row index; :mod:`kedge.core.work` draws the batch indices.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kedge.core import rng, tree
from kedge.core.task import Batch, Task
from kedge.core.view import SweepPieces
from kedge.data.augment import augmentation, rotate
from kedge.data.encoding import Encoding, moments_like, normalise, to_unit
from kedge.data.partition import Partition
from kedge.errors import DataError

SWEEP_ROWS = 256  # rows per piece of a sweep


class Federation:
    """Samples, the rows of each client, and the test data.

    Inputs are stored as given. When a batch is gathered, uint8 images are scaled to 0..1, and all
    inputs are normalised by ``moments``.

    Args:
        x: inputs, ``[N, C, H, W]`` for images (uint8 or float) or ``[N, ...]``.
        y: labels, ``[N]`` or ``[N, outputs]`` as the task takes them.
        clients: for each client, the rows of ``x`` that it trains on.
        task: the task, such as ``Classification(10)``.
        test: inputs and labels of a common test set.
        held_out: for each client, rows that it tests on and does not train on. Without ``test``,
            the global model is tested on all of them.
        validation: for each client, rows to choose by: neither trained nor tested on.
        unseen: rows of clients that never train; the global model is tested on them.
        moments: mean and standard deviation, per channel or column.
        augment: augmentation of training batches, such as ``crop(4)+flip``.
        angles: rotations of the test set in degrees; the model is tested on each of them.
        dtype: floating-point type of inputs and targets.
        device: where the samples are stored.
        tokens: whether inputs are whole numbers, such as token ids: they stay int64 and are
            neither scaled nor normalised.
        client_names: the name of each client; "client 0" and so on if None.

    Attributes:
        client_names: the name of each client.
        sizes: number of training samples of each client.
        rows: training rows of all clients; those of client ``k`` start at ``offsets[k]``.
        held_out: held-out rows of each client; empty if there are none.
        validation: validation rows of each client; empty if there are none.
        unseen: rows of the clients that never train; None if there are no such clients.
        partition: the partition that the clients come from, or None.
        encoding: how raw inputs become ``x``, or None.
        classes: names of the classes or labels, or None.
        test_data: inputs as they are stored, and labels, of the test set; None if there is none.
        fingerprint: identifies the data; empty if unknown.

    Raises:
        DataError: shapes, labels or rows are wrong, or images are required.

    >>> from kedge.core.task import Classification
    >>> x, y = torch.rand(6, 4), torch.tensor([0, 1, 0, 1, 0, 1])
    >>> federation = Federation(x, y, [[0, 1], [2, 3, 4]], Classification(2), held_out=[[5], []])
    >>> federation.sizes, federation.num_test
    ([2, 3], 1)
    >>> federation.clean(torch.tensor([0, 2])).x.shape
    torch.Size([2, 4])
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
        validation: Sequence[Any] | None = None,
        unseen: Any = None,
        moments: tuple[Any, Any] | None = None,
        augment: str = "none",
        angles: Sequence[float] = (0.0,),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        tokens: bool = False,
        client_names: Sequence[str] | None = None,
    ) -> None:
        self.tokens = tokens
        self.task, self.dtype, self.device = task, dtype, torch.device(device)
        self.partition: Partition | None = None
        self.encoding: Encoding | None = None
        self.classes: tuple[str, ...] | None = None
        self.fingerprint = ""
        self.x, self.y = self._to_inputs(x, "inputs"), self._to_labels(y)
        if len(self.x) != len(self.y):
            raise DataError(f"{len(self.x)} inputs but {len(self.y)} labels")
        self.task.check_labels(self.y, "")
        if not len(clients):
            raise DataError("there are no clients; give at least one list of rows")
        rows = [self._to_rows(k, own) for k, own in enumerate(clients)]
        self.sizes = [len(own) for own in rows]
        self.client_names = tuple(client_names or (f"client {k}" for k in range(len(rows))))
        if len(self.client_names) != len(rows):
            raise DataError(f"{len(self.client_names)} names for {len(rows)} clients")
        self.offsets = [0, *accumulate(self.sizes)][:-1]
        self.rows = torch.cat(rows).to(self.device)  # client k: rows[offset : offset + size]
        self.held_out = self._kept_rows(held_out, rows, "held-out ")
        self.validation = self._kept_rows(validation, rows, "validation ")
        self.unseen = None if unseen is None else self._to_rows(len(rows), unseen, "unseen ")
        self.angles = tuple(angles)
        self._augment = augmentation(augment)
        if self.x.ndim != 4 and (self._augment or self.angles != (0.0,)):
            raise DataError("augmentation and rotation are for images [C, H, W], not for tables")
        if self._augment:  # its options must suit the size of images
            self._augment(torch.zeros(1, *self.input_shape, dtype=dtype), rng.key(0))
        self._moments = None
        if moments is not None and not tokens:
            self._moments = moments_like(moments, self.input_shape, dtype, self.device)
        self.test_data: tuple[Tensor, Tensor] | None = None
        if test is not None:
            inputs, labels = self._to_inputs(test[0], "test inputs"), self._to_labels(test[1])
            if len(inputs) != len(labels):
                raise DataError(f"{len(inputs)} test inputs but {len(labels)} test labels")
            if inputs.shape[1:] != self.x.shape[1:]:
                raise DataError(
                    f"test inputs have the shape {tuple(inputs.shape[1:])}, training inputs "
                    f"{tuple(self.x.shape[1:])}"
                )
            self.task.check_labels(labels, "test ")
            self.test_data = (inputs, labels)
        elif held_out is not None and len(held_out) and not self.held_out:
            raise DataError(
                "no client has a sample to test on, since every client has too few to hold one "
                "out; give a test set, hold out a larger share, or use fewer clients"
            )
        elif self.held_out:
            tested = torch.cat(self.held_out)
            self.test_data = (self.x[tested], self.y[tested])

    @property
    def num_clients(self) -> int:
        return len(self.sizes)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input, without the batch dimension."""
        return tuple(self.x.shape[1:])

    @property
    def num_test(self) -> int:
        """Number of test samples."""
        return len(self.test_data[0]) if self.test_data is not None else 0

    @property
    def nbytes(self) -> int:
        """Size of all samples and row indices on the device, in bytes."""
        return tree.nbytes((self.x, self.y, self.rows, *(self.test_data or ())))

    # -- batches ------------------------------------------------------------------------------

    @property
    def is_random(self) -> bool:
        """Whether training batches are augmented."""
        return self._augment is not None

    def batch(self, index: Tensor, key: Tensor) -> Batch:
        """A training batch: the samples of some rows ``[B]``, augmented with ``key``."""
        x = to_unit(_gather(self.x, index), self.dtype)
        if self._augment is not None:
            x = self._augment(x, key)
        return Batch(normalise(x, self._moments), _gather(self.y, index))

    def clean(self, index: Tensor) -> Batch:
        """The samples of some rows, without augmentation. ``index`` may have any shape."""
        return Batch(normalise(to_unit(self.x[index], self.dtype), self._moments), self.y[index])

    @property
    def has_test(self) -> bool:
        """Whether there are test samples."""
        return self.test_data is not None

    def test_batches(self, angle: float = 0.0, rows: int = 1024) -> Iterator[Batch]:
        """The test set in batches of ``rows`` samples, rotated by ``angle`` degrees.

        Raises:
            DataError: there are neither test samples nor held-out rows.
        """
        if self.test_data is None:
            raise DataError(
                "there is nothing to test on; give a test set, or hold out a part of every client"
            )
        inputs, labels = self.test_data
        for i in range(0, len(inputs), rows):
            x = to_unit(inputs[i : i + rows], self.dtype)
            if angle:
                x = rotate(x, torch.full((len(x),), angle, device=self.device))
            yield Batch(normalise(x, self._moments), labels[i : i + rows])

    def held_out_batches(self, client: int, rows: int = 1024) -> Iterator[Batch]:
        """The held-out samples of a client in batches of ``rows`` samples."""
        return self.clean_batches(self.held_out[client], rows)

    def clean_batches(self, index: Tensor, rows: int = 1024) -> Iterator[Batch]:
        """The samples of some rows ``[n]`` in batches of ``rows`` samples."""
        for piece in torch.split(index, rows):
            yield self.clean(piece)

    def pooled(self) -> Federation:
        """One client with the training samples of all clients; the test data are the same.

        Held-out and validation rows are still those of each client, and so are the names.
        """
        other = copy.copy(self)
        other.sizes, other.offsets = [len(self.rows)], [0]
        return other

    @property
    def moments(self) -> tuple[Tensor, Tensor] | None:
        """Mean and standard deviation per channel or column, or None."""
        if self._moments is None:
            return None
        return self._moments[0].flatten(), self._moments[1].flatten()

    def prepare(self, x: Any) -> Tensor:
        """Encoded inputs ``[n, ...]``, as the first argument, in the form that the model sees."""
        return normalise(to_unit(self._to_inputs(x, "inputs"), self.dtype), self._moments)

    # -- data of whole clients ----------------------------------------------------------------

    def label_counts(self) -> Tensor:
        """Number of training samples of each class on each client, ``[clients, C]``."""
        soft = self.task.soft(self.y[self.rows], self.dtype)
        owner = torch.repeat_interleave(torch.tensor(self.sizes, device=self.device))
        counts = torch.zeros(self.num_clients, soft.shape[1], dtype=self.dtype, device=self.device)
        return counts.index_add(0, owner, soft)

    def sweep_pieces(self, clients: Sequence[int]) -> SweepPieces:
        """All training rows of K clients in pieces of equal size, ``[K, pieces, rows]``."""
        size = SWEEP_ROWS  # independent of the cohort, since it sets the order of summation
        pieces = math.ceil(max(self.sizes[k] for k in clients) / size)
        at = torch.arange(pieces * size, device=self.device)
        n = self._to_device([self.sizes[k] for k in clients])[:, None]
        start = self._to_device([self.offsets[k] for k in clients])[:, None]
        index = self.rows[start + at % n]  # padding leaves batch statistics those of the client
        mask = (at < n).to(self.dtype)
        return SweepPieces(index.reshape(-1, pieces, size), mask.reshape(-1, pieces, size))

    def _to_device(self, values: Sequence[int]) -> Tensor:
        """Integers on the device, copied without synchronisation."""
        return torch.tensor(values).to(self.device, non_blocking=True)

    def _to_inputs(self, x: Any, what: str) -> Tensor:
        x = _tensor(x)
        if x.is_floating_point() and not bool(torch.isfinite(x).all()):
            row = int((~torch.isfinite(x)).reshape(len(x), -1).any(1).nonzero()[0])
            raise DataError(f"{what} are NaN or infinite, first in row {row}; fill them in")
        if self.tokens:
            if x.is_floating_point() and bool((x != x.round()).any()):
                raise DataError(f"{what} are not whole numbers, as token ids must be")
            return x.to(self.device, torch.int64)
        return x.to(self.device, x.dtype if x.dtype == torch.uint8 else self.dtype)

    def _to_labels(self, y: Any) -> Tensor:
        return self.task.labels(_tensor(y).to(self.device), self.dtype)

    def _kept_rows(self, kept: Sequence[Any] | None, rows: list[Tensor], kind: str) -> list[Tensor]:
        """Rows of each client that it does not train on; empty if no client has any."""
        found = [self._to_rows(k, own, kind) for k, own in enumerate(kept or ())]
        if found and len(found) != len(rows):
            raise DataError(f"{len(found)} lists of {kind}rows for {len(rows)} clients")
        for k, own in enumerate(found):
            if bool(torch.isin(own, rows[k]).any()):
                verb = "holds out" if kind == "held-out " else "validates on"
                raise DataError(f"client {k} {verb} rows that it also trains on")
        return found if any(len(own) for own in found) else []

    def _to_rows(self, client: int, rows: Any, kind: str = "") -> Tensor:
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
    """An array or list as a tensor. Read-only arrays are copied: torch cannot share them."""
    if isinstance(values, np.ndarray) and not values.flags.writeable:
        values = values.copy()
    return torch.as_tensor(values)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]``; for one client on the CPU through ``index_select``, 20 times as fast."""
    return x.index_select(0, index) if rng.is_plain(index, 1) else x[index]
