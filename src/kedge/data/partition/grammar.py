"""Partitions and feature shifts by name, and how one is drawn from its text."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kedge.data.partition.partition import IntArray, Partition, as_int, generator
from kedge.errors import (
    DataError,
    FieldError,
    GrammarError,
    IncompatibleError,
    PartitionError,
    UnknownName,
)
from kedge.grammar import parse_calls
from kedge.registry import Registry
from kedge.schema import BoundCall, ErrorCollector, Schema, schema_of

_PLACE = {"module": "kedge.data.partition", "group": "kedge.partitions"}
partitions: Registry[Callable[..., list[IntArray]]] = Registry(
    "partition", see="kedge list partitions", **_PLACE
)
"""``(labels, clients, rng, *, option=default, ...) -> one array of sample indices per client``.

A function with a keyword ``groups`` also gets the group of each sample."""

shifts: Registry[Callable[..., dict[str, Any]]] = Registry(
    "shift", see="kedge list partitions", **_PLACE
)
"""``(sizes, rng, *, option=default, ...) -> the fields of Partition it sets``."""

aliases = {"dirichlet": "class_dirichlet_capped"}


def schema(name: str) -> Schema:
    """The options of a partition or a shift, by its full name."""
    registry = shifts if name in shifts else partitions
    return schema_of(registry[name], name, hidden=("groups",))


def draw(
    text: str, labels: npt.ArrayLike, clients: int, seed: int, groups: npt.ArrayLike | None = None
) -> Partition:
    """Draw a partition; the same arguments always give the same one.

    Args:
        text: a partition with options, and feature shifts added with ``+``, such as
            ``dirichlet(0.1)+rotation(step=15)``. Shifts do not change the samples of the clients.
        labels: the label of each sample, ``[N]``, or ``[N, C]`` for several labels per sample.
        clients: number of clients.
        seed: seed of the draw.
        groups: the group of each sample, ``[N]``, for the partition ``silos``.

    Raises:
        UnknownName: there is no such partition, shift or option.
        GrammarError: the text cannot be parsed.
        FieldError: the value of an option, ``clients`` or ``seed`` is wrong.
        DataError: there are no samples.
        IncompatibleError: the partition does not take such labels, or two shifts conflict.
        PartitionError: these samples cannot be partitioned in this way.

    >>> partition = draw("dirichlet(0.5)", [0, 1] * 100, clients=4, seed=0)
    >>> partition.name
    'class_dirichlet_capped(alpha=0.5)'
    >>> len(partition.clients), int(partition.sizes.sum())
    (4, 200)
    """
    try:
        labels = np.asarray(labels)
    except ValueError:
        raise DataError("labels must be numbers, equally many for every sample") from None
    clients, seed = as_int("clients", clients), as_int("seed", seed)
    if labels.ndim == 0 or not len(labels):
        raise DataError("there are no samples to partition: labels is empty")
    if clients < 1:
        raise FieldError(f"clients = {clients} is below 1")
    steps = _parse(text)
    canonical = "+".join(schema(step.name).write(step.options, first=True) for step in steps)
    (name, function, options), *shift_steps = steps
    if "groups" in inspect.signature(function).parameters:
        options = {**options, "groups": groups}
    where = f"{canonical} with {clients} clients and {len(labels)} samples"
    try:
        if clients > len(labels):
            raise PartitionError(f"more clients than samples; use at most {len(labels)} clients")
        parts = function(labels, clients, generator(seed, name), **options)
        if len(parts) != clients:
            raise PartitionError(f"it gave {len(parts)} clients")
    except (IncompatibleError, PartitionError) as error:
        raise type(error)(f"{where}: {error}.") from None
    sizes = np.array([len(part) for part in parts])
    fields: dict[str, Any] = {}
    for name, function, options in shift_steps:
        with np.errstate(over="ignore"):  # Partition refuses what is not finite
            new = function(sizes, generator(seed, name), **options)
        if fields.keys() & new.keys() or {"rotation", "angles"} <= fields.keys() | new.keys():
            raise IncompatibleError(f"{canonical} has two shifts of one kind; leave out {name}")
        fields |= new
    return Partition(tuple(parts), canonical, seed, len(labels), **fields)


def check_partition(text: str) -> None:
    """Raise a KedgeError if a name, an option or a value in the text is wrong."""
    _parse(text)


def _parse(text: str) -> list[BoundCall]:
    """The partition and its shifts, with their options bound."""
    base, *shift_calls = parse_calls(text)
    base = base._replace(name=aliases.get(base.name, base.name))
    if base.name in shifts:
        raise GrammarError(
            f"{base.name} is a shift and needs a partition before it, such as iid+{base.name}"
        )
    if base.name not in partitions:
        raise UnknownName("partition", base.name, [*partitions, *aliases], partitions.see)
    for call in shift_calls:
        if aliases.get(call.name, call.name) in partitions:
            raise GrammarError(
                f"{text!r} has two partitions, {base.name} and {call.name}; "
                f"only shifts can be added: {', '.join(shifts)}"
            )
    errors, steps = ErrorCollector(), []
    for call in (base, *shift_calls):
        with errors.collect():
            function: Callable[..., Any] = (partitions if call is base else shifts)[call.name]
            steps.append(BoundCall(call.name, function, schema(call.name).bind(call)))
    errors.raise_all()
    return steps
