"""A member's data as the terms of its federation see them.

Read by itself, each member would number its own classes and columns: two folders of images with
the classes (cat, dog) and (dog, horse) would both have labels 0 and 1. Names decide instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from kedge.data.datasets import Dataset
from kedge.errors import TermsError
from kedge.session.terms import DataSchema


def conform(dataset: Dataset, schema: DataSchema, name: str = "") -> Dataset:
    """A dataset as the terms see it: classes and columns by their names, scaled as agreed.

    A class or a one-hot column that this dataset does not have is left empty. What the terms do not
    know is refused.

    Args:
        dataset: what this member has read by itself.
        schema: what all members have agreed on.
        name: of the member, for messages.

    Raises:
        TermsError: the dataset has another task, shape, class or column.
    """
    who = name or dataset.name
    if dataset.task != schema.task:
        raise TermsError(f"{who}: labels are for {dataset.task}, the terms say {schema.task}")
    x, columns = _columns(dataset, schema, who)
    if x(dataset.x_train).shape[1:] != schema.shape:
        raise TermsError(
            f"{who}: inputs have the shape {list(dataset.shape)}, the terms say "
            f"{list(schema.shape)}"
        )
    y = _classes(dataset, schema, who)
    mean = np.array(schema.mean, np.float32) if schema.mean else dataset.mean
    std = np.array(schema.std, np.float32) if schema.std else dataset.std

    def each(function: Callable[[Any], Any], value: Any) -> Any:
        return None if value is None else function(value)

    return dataclasses.replace(
        dataset,
        x_train=x(dataset.x_train), x_test=each(x, dataset.x_test), x_val=each(x, dataset.x_val),
        y_train=y(dataset.y_train), y_test=each(y, dataset.y_test), y_val=each(y, dataset.y_val),
        outputs=schema.outputs, classes=schema.classes, columns=columns, mean=mean, std=std,
    )  # fmt: skip


def _columns(dataset: Dataset, schema: DataSchema, who: str) -> tuple[Any, Any]:
    """How inputs become those of the terms, and the names of their columns."""
    own, agreed = dataset.columns, schema.columns
    if own is None or agreed is None or own == agreed:
        return (lambda x: x), agreed
    unknown = [c for c in own if c not in agreed]
    known = {c.partition("=")[0] for c in own}
    lacking = [
        c for c in agreed if c not in own and not ("=" in c and c.partition("=")[0] in known)
    ]
    if unknown or lacking:
        what = (
            f"a column {unknown[0]!r} that the terms do not have"
            if unknown
            else (f"no column {lacking[0]!r}, which the terms have")
        )
        raise TermsError(f"{who} has {what}; the terms have: {', '.join(agreed)}")
    place = {c: i for i, c in enumerate(own)}

    def arranged(x: Any) -> Any:
        empty = np.zeros(len(x), x.dtype)
        return np.stack([x[:, place[c]] if c in place else empty for c in agreed], 1)

    return arranged, agreed


def _classes(dataset: Dataset, schema: DataSchema, who: str) -> Any:
    """How labels become those of the terms."""
    own, agreed = dataset.classes, schema.classes
    if own is None or agreed is None or own == agreed:
        if dataset.outputs > schema.outputs:
            raise TermsError(f"{who} has {dataset.outputs} outputs, the terms {schema.outputs}")
        return lambda y: y
    unknown = [c for c in own if c not in agreed]
    if unknown:
        raise TermsError(
            f"{who} has a class {unknown[0]!r} that the terms do not have; they have: "
            + ", ".join(agreed)
        )
    place = np.array([agreed.index(c) for c in own])

    def renumbered(y: Any) -> Any:
        if y.ndim == 1:
            return place[y]
        wide = np.zeros((len(y), len(agreed)), y.dtype)
        wide[:, place] = y
        return wide

    return renumbered


def schema_of(dataset: Dataset) -> DataSchema:
    """The data schema of a dataset, for the terms of a federation that looks like it."""
    return DataSchema(
        shape=dataset.shape,
        task=dataset.task,
        outputs=dataset.outputs,
        classes=dataset.classes,
        columns=dataset.columns,
        mean=tuple(float(v) for v in np.ravel(dataset.mean)),
        std=tuple(float(v) for v in np.ravel(dataset.std)),
    )
