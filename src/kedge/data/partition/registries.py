"""Registries of partitions and feature shifts, their options, and their random streams."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kedge.registry import Registry
from kedge.schema import Option, Schema, schema_of

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

partitions: Registry[Callable[..., list[IntArray]]] = Registry(
    "partition",
    see="kedge list partitions",
    module="kedge.data.partition",
    group="kedge.partitions",
)
"""``(labels, clients, rng, *, option=default, ...) -> one array of sample indices per client``.

A function with a keyword ``groups`` also gets the group of each sample."""

shifts: Registry[Callable[..., dict[str, Any]]] = Registry(
    "shift", see="kedge list partitions", module="kedge.data.partition", group="kedge.partitions"
)
"""``(sizes, rng, *, option=default, ...) -> the fields of Partition it sets``."""

aliases = {"dirichlet": "class_dirichlet_capped"}


def generator(seed: int, *tag: str) -> np.random.Generator:
    """The random stream of a seed and a tag, the same on every platform."""
    digest = hashlib.sha256("/".join(["kedge partition", str(seed), *tag]).encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def schema(name: str) -> Schema:
    """The options of a partition or a shift, by its full name."""
    registry = shifts if name in shifts else partitions
    return schema_of(registry[name], name, hidden=("groups",))


def as_int(name: str, value: Any) -> int:
    """Convert an integer of Python or numpy to an int; a FieldError names the option.

    >>> as_int("seed", np.int64(3))
    3
    """
    return int(Option(name, int).check(value))
