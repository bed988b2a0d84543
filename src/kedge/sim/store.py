"""Clients' own state between rounds: one row per client, gathered and written back by client id.

Rows lie on the device, in the host's memory, or in a file that is mapped into memory and that has
no name, so that it is gone with the process, however that ends.
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
    """Rows of a tree. Gathering copies, so what a round works on is never changed underneath it.

    Off the device, a client that has not taken part yet has no row of its own: it has the first
    value, which is kept once.
    """

    def __init__(
        self, first: Tree, num_clients: int, where: str = "device", folder: str = ""
    ) -> None:
        if where not in PLACES:
            raise FieldError(f"state = {where!r} is not one of: {', '.join(PLACES)}")
        self.where, self._first, self._count = where, first, num_clients
        self._fresh = set() if where == "device" else set(range(num_clients))
        self._rows: Tree = None  # in the host's memory once there is something to keep
        if where == "device":
            self._rows = tree.map(lambda x: x.expand(num_clients, *x.shape).clone(), first)
        elif where == "file":
            self._rows = _mapped(first, num_clients, partial(_file, folder))

    def gather(self, clients: Sequence[int]) -> Tree:
        """The rows of some clients, on the device."""
        if self.where == "device":
            index = self._index(clients)
            return tree.map(lambda x: x.index_select(0, index), self._rows)
        found = tree.map(lambda x: x.expand(len(clients), *x.shape).clone(), self._first)
        places = [i for i, k in enumerate(clients) if k not in self._fresh]
        if places:
            known = torch.tensor([clients[i] for i in places])

            def read(rows: Tensor, target: Tensor) -> None:
                target[on_device(places, target.device)] = rows[known].to(target.device)

            tree.map(read, self._rows, found)
        return found

    def put(self, clients: Sequence[int], values: Tree) -> None:
        index, there = self._index(clients), self._there()
        tree.map(_check_row, there, values)  # all of them before any is written
        tree.map(lambda rows, new: rows.index_copy_(0, index, new.to(rows)), there, values)
        self._fresh.difference_update(clients)

    @property
    def rows(self) -> Tree:
        """All rows, ``[clients, ...]``, where they lie."""
        rows = self._there()
        if self._fresh:
            fresh = torch.tensor(sorted(self._fresh))

            def fill(rows: Tensor, first: Tensor) -> None:
                if bool(first.any()):  # rows are made of zeros
                    rows[fresh] = first.to(rows.device)

            tree.map(fill, rows, self._first)
            self._fresh.clear()
        return rows

    @rows.setter
    def rows(self, values: Tree) -> None:
        if self.where == "device":
            self._rows = tree.map(lambda new, first: new.to(first.device), values, self._first)
        else:
            tree.map(lambda rows, new: rows.copy_(new), self._there(), values)
            self._fresh.clear()

    def _index(self, clients: Sequence[int]) -> Tensor:
        """Their rows, where the rows lie."""
        device = next((x.device for x in tree.leaves(self._there())), torch.device("cpu"))
        return on_device(clients, device)

    def _there(self) -> Tree:
        if self._rows is None:
            self._rows = _mapped(self._first, self._count, _memory)
        return self._rows


class FirstState(Store):
    """Clients' state in a trial: always the first one, and nothing is kept."""

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


def _mapped(first: Tree, num_clients: int, make: Callable[[int], mmap.mmap]) -> Tree:
    """Rows of zeros in one piece of memory, of which a page is taken when it is written to."""
    sizes = [num_clients * tree.nbytes(x) for x in tree.leaves(first)]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // 64) * 64)  # where rows of any type may start
    memory, at = make(max(1, starts[-1])), iter(starts)

    def view(x: Tensor) -> Tensor:
        count, start = num_clients * x.numel(), next(at)
        if not count:
            return torch.zeros((num_clients, *x.shape), dtype=x.dtype)
        rows = torch.frombuffer(memory, dtype=x.dtype, count=count, offset=start)
        return rows.view(num_clients, *x.shape)

    return tree.map(view, first)


def _memory(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _file(folder: str, size: int) -> mmap.mmap:
    """A file without a name. A disk that has no room is noticed here, not in some later round."""
    place = folder or tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:  # macOS
                file.truncate(size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise KedgeError(
            f"the clients' state takes {size / 1e9:.1f} GB, for which {place} has no room "
            f"({error.strerror}). Put the run on a larger disk (--out, or $TMPDIR without one), or "
            "take fewer clients or a smaller model"
        ) from None
