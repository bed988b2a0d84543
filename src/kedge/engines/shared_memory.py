"""Shared memory of processes, for trees of tensors that are read without a copy."""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.tree import Tree

ALIGNMENT = 64  # bytes, as torch aligns its own tensors


@dataclass(frozen=True)
class Place:
    """The place of a tensor in shared memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte offset

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize


class SharedMemory:
    """Anonymous shared memory that grows as needed.

    Processes forked after its creation inherit it. It is freed when the last of them exits.
    """

    def __init__(self) -> None:
        self.file = os.memfd_create("kedge")
        self._map: mmap.mmap | None = None

    def write(self, places: Tree, values: Tree) -> None:
        """Copy tensors to their places; other leaves are ignored."""
        tree.map(lambda p, x: self._at(p).copy_(x) if isinstance(p, Place) else p, places, values)

    def read(self, places: Tree) -> Tree:
        """The tensors at some places, without a copy; other leaves are returned as they are."""
        return tree.map(lambda p: self._at(p) if isinstance(p, Place) else p, places)

    def _at(self, place: Place) -> Tensor:
        count = math.prod(place.shape)
        if not count:
            return torch.empty(place.shape, dtype=place.dtype)
        if self._map is None or len(self._map) < place.end:
            if os.fstat(self.file).st_size < place.end:
                os.ftruncate(self.file, place.end)
            self._map = mmap.mmap(self.file, 0)  # tensors keep the old map alive
        flat = torch.frombuffer(self._map, dtype=place.dtype, count=count, offset=place.start)
        return flat.reshape(place.shape)


def allocate(values: Tree, start: int = 0) -> tuple[Tree, int]:
    """Assign places to the tensors of a tree, one after the other from byte ``start``.

    Returns the tree with a :class:`Place` for every tensor, other leaves unchanged, and the byte
    where the last tensor ends.
    """
    end = start

    def place(x: Any) -> Any:
        nonlocal end
        if not isinstance(x, Tensor):
            return x
        found = Place(x.dtype, tuple(x.shape), math.ceil(end / ALIGNMENT) * ALIGNMENT)
        end = found.end
        return found

    return tree.map(place, values), end
