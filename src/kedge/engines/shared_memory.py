"""Memory that processes share: trees of tensors are written into it and read where they lie."""

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
    """Where a tensor lies in a memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize


class Memory:
    """Shared memory that grows as needed.

    It has no name and belongs to no file system: processes that are forked after it was made have
    it, nobody else does, and it is gone when the last of them is.
    """

    def __init__(self) -> None:
        self.file = os.memfd_create("kedge")
        self._map: mmap.mmap | None = None

    def write(self, places: Tree, values: Tree) -> None:
        """Copy tensors to their places."""
        tree.map(lambda p, x: self._at(p).copy_(x) if isinstance(p, Place) else p, places, values)

    def read(self, places: Tree) -> Tree:
        """The tensors at some places, not copied."""
        return tree.map(lambda p: self._at(p) if isinstance(p, Place) else p, places)

    def _at(self, place: Place) -> Tensor:
        count = math.prod(place.shape)
        if not count:
            return torch.empty(place.shape, dtype=place.dtype)
        if self._map is None or len(self._map) < place.end:
            if os.fstat(self.file).st_size < place.end:
                os.ftruncate(self.file, place.end)
            self._map = mmap.mmap(self.file, 0)  # tensors in the old one keep it alive
        flat = torch.frombuffer(self._map, dtype=place.dtype, count=count, offset=place.start)
        return flat.reshape(place.shape)


def places(values: Tree, start: int = 0) -> tuple[Tree, int]:
    """A place for every tensor, one after the other, and where they end.

    What is not a tensor stays as it is.
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
