"""Clients' state between rounds: one row per client, gathered and written back by client id.

Rows are on the device, in host memory, or in a memory-mapped anonymous file, which the operating
system deletes when the process ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.tree import Tree
from kedge.engines.cohort import on_device
from kedge.errors import FieldError, KedgeError

PLACES = ("device", "host", "file")


class Store:
    """The state of all clients as rows of a tree.

    Gathering copies, so a round never sees a later write. Off the device, a client that has not
    participated yet has no row; all such clients share one initial state.

    Args:
        first: a client's initial state, without a client axis.
        num_clients: number of rows.
        where: ``"device"``, ``"host"`` or ``"file"``.
        folder: directory of the file; the system's temporary directory if empty.

    Raises:
        FieldError: ``where`` is none of these.
        KedgeError: the disk has no room for the file.
    """

    def __init__(
        self, first: Tree, num_clients: int, where: str = "device", folder: str = ""
    ) -> None:
        if where not in PLACES:
            raise FieldError(f"state = {where!r} is not one of: {', '.join(PLACES)}")
        self.where, self._first, self._count = where, first, num_clients
        self._fresh = set() if where == "device" else set(range(num_clients))
        self._rows: Tree = None  # host rows are allocated by the first write
        if where == "device":
            self._rows = tree.map(lambda x: x.expand(num_clients, *x.shape).clone(), first)
        elif where == "file":
            self._rows = _map_rows(first, num_clients, partial(_map_file, folder))

    def gather(self, clients: Sequence[int]) -> Tree:
        """States of some clients on the device, ``[len(clients), ...]``; a copy."""
        if self.where == "device":
            index = self._index(clients)
            return tree.map(lambda x: x.index_select(0, index), self._rows)
        states = tree.map(lambda x: x.expand(len(clients), *x.shape).clone(), self._first)
        places = [i for i, k in enumerate(clients) if k not in self._fresh]
        if places:
            known = torch.tensor([clients[i] for i in places])

            def read(rows: Tensor, target: Tensor) -> None:
                target[on_device(places, target.device)] = rows[known].to(target.device)

            tree.map(read, self._rows, states)
        return states

    def put(self, clients: Sequence[int], values: Tree) -> None:
        """Write states ``[len(clients), ...]`` of clients; a KedgeError if shapes differ."""
        index, stored = self._index(clients), self._allocated()
        tree.map(_check_row, stored, values)  # check all leaves before writing any
        tree.map(lambda rows, new: rows.index_copy_(0, index, new.to(rows)), stored, values)
        self._fresh.difference_update(clients)

    @property
    def rows(self) -> Tree:
        """All rows, ``[clients, ...]``, without a copy."""
        rows = self._allocated()
        if self._fresh:
            fresh = torch.tensor(sorted(self._fresh))

            def fill(rows: Tensor, first: Tensor) -> None:
                if bool(first.any()):  # rows are allocated as zeros
                    rows[fresh] = first.to(rows.device)

            tree.map(fill, rows, self._first)
            self._fresh.clear()
        return rows

    @rows.setter
    def rows(self, values: Tree) -> None:
        if self.where == "device":
            self._rows = tree.map(lambda new, first: new.to(first.device), values, self._first)
        else:
            tree.map(lambda rows, new: rows.copy_(new), self._allocated(), values)
            self._fresh.clear()

    def _index(self, clients: Sequence[int]) -> Tensor:
        """Row numbers of clients, on the device of the rows."""
        device = next((x.device for x in tree.leaves(self._allocated())), torch.device("cpu"))
        return on_device(clients, device)

    def _allocated(self) -> Tree:
        if self._rows is None:
            self._rows = _map_rows(self._first, self._count, _map_memory)
        return self._rows


class FirstState(Store):
    """The state of clients in a trial, or of a member: always the same; nothing is written."""

    def __init__(self, first: Tree) -> None:
        self.where, self._first, self._fresh = "device", first, set()

    def gather(self, clients: Sequence[int]) -> Tree:
        return tree.map(lambda x: x.expand(len(clients), *x.shape).clone(), self._first)


def _check_row(rows: Tensor, new: Tensor) -> None:
    if rows.shape[1:] != new.shape[1:]:
        raise KedgeError(
            f"a part keeps a tensor of shape {tuple(new.shape[1:])} on a client, which began as "
            f"{tuple(rows.shape[1:])}; `reply` must return what `client_init` made, with new values"
        )


def _map_rows(first: Tree, num_clients: int, make: Callable[[int], mmap.mmap]) -> Tree:
    """Rows of zeros in one memory map, whose pages are allocated on first write."""
    sizes = [num_clients * tree.nbytes(x) for x in tree.leaves(first)]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // 64) * 64)  # aligned for every dtype
    memory, at = make(max(1, starts[-1])), iter(starts)

    def view(x: Tensor) -> Tensor:
        count, start = num_clients * x.numel(), next(at)
        if not count:
            return torch.zeros((num_clients, *x.shape), dtype=x.dtype)
        rows = torch.frombuffer(memory, dtype=x.dtype, count=count, offset=start)
        return rows.view(num_clients, *x.shape)

    return tree.map(view, first)


def _map_memory(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _map_file(folder: str, size: int) -> mmap.mmap:
    """Map an anonymous file; a full disk fails here, not in a later round."""
    directory = folder or tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:  # macOS
                file.truncate(size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise KedgeError(
            f"the clients' state takes {size / 1e9:.1f} GB, for which {directory} has no room "
            f"({error.strerror}). Put the run on a larger disk (--out, or $TMPDIR without one), or "
            "take fewer clients or a smaller model"
        ) from None
