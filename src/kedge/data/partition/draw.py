"""Drawing a partition from its string."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import kedge.data.partition.label_skew
import kedge.data.partition.other_skew
import kedge.data.partition.shifts  # noqa: F401  (each of the three fills a registry)
from kedge.data.partition.data import Partition
from kedge.data.partition.registries import (
    aliases,
    generator,
    partitions,
    schema,
    shifts,
    whole,
)
from kedge.errors import (
    DataError,
    FieldError,
    GrammarError,
    IncompatibleError,
    PartitionError,
    UnknownName,
)
from kedge.grammar import parse_calls
from kedge.schema import BoundCall, ErrorCollector


def draw(
    text: str,
    labels: npt.ArrayLike,
    clients: int,
    seed: int,
    groups: npt.ArrayLike | None = None,
) -> Partition:
    """Draw the partition that the string describes; the same arguments always give the same one.

    >>> partition = draw("dirichlet(0.5)", [0, 1] * 100, clients=4, seed=0)
    >>> partition.name
    'class_dirichlet_capped(alpha=0.5)'

    Shifts are added with ``+`` and leave the samples of the clients as they are. ``groups``, the
    group id of each sample, is for ``silos``.
    """
    labels = np.asarray(labels)
    clients, seed = whole("clients", clients), whole("seed", seed)
    if labels.ndim == 0 or not len(labels):
        raise DataError("there are no samples to partition: labels is empty")
    if clients < 1:
        raise FieldError(f"clients = {clients} is below 1")
    steps = _read(text)
    canonical = "+".join(schema(step.name).write(step.options, first=True) for step in steps)
    (name, function, options), *extra = steps
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
    for name, function, options in extra:
        new = function(sizes, generator(seed, name), **options)
        if fields.keys() & new.keys() or {"rotation", "angles"} <= fields.keys() | new.keys():
            raise IncompatibleError(f"{canonical} has two shifts of one kind; leave out {name}")
        fields |= new
    return Partition(tuple(parts), canonical, seed, len(labels), **fields)


def check_partition(text: str) -> None:
    """Raise what is wrong with the string itself: names, options and their values."""
    _read(text)


def _read(text: str) -> list[BoundCall]:
    """The partition and its shifts, with all options checked."""
    base, *extra = parse_calls(text)
    base = base._replace(name=aliases.get(base.name, base.name))
    if base.name in shifts:
        raise GrammarError(
            f"{base.name} is a shift and needs a partition before it, such as iid+{base.name}"
        )
    if base.name not in partitions:
        raise UnknownName("partition", base.name, [*partitions, *aliases], partitions.see)
    for call in extra:
        if aliases.get(call.name, call.name) in partitions:
            raise GrammarError(
                f"{text!r} has two partitions, {base.name} and {call.name}; "
                f"only shifts can be added: {', '.join(shifts)}"
            )
    errors, found = ErrorCollector(), []
    for call in (base, *extra):
        with errors.collect():
            function: Callable[..., Any] = (partitions if call is base else shifts)[call.name]
            found.append(BoundCall(call.name, function, schema(call.name).bind(call)))
    errors.raise_all()
    return found
