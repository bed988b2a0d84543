"""Convert a member's data to the schema of its federation.

Each member numbers its own classes and columns: two folders of images with the classes (cat, dog)
and (dog, horse) both have labels 0 and 1. Here classes and columns are matched by name.
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
    """Convert a dataset to a schema: match classes and columns by name, set mean and std.

    A class or a one-hot column that this dataset lacks stays empty.

    Args:
        dataset: the member's dataset, with its own numbering.
        schema: the data schema of the terms.
        name: name of the member, for messages.

    Returns:
        A dataset with the inputs, outputs and scaling of the schema.

    Raises:
        TermsError: the dataset has another task or shape, or a class or column that is not in the
            schema.

    Example::

        dataset = conform(dataset, terms.data, name="hospital 3")
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
        encoding=dataset.encoding if columns == dataset.columns else None,
    )  # fmt: skip


def _columns(dataset: Dataset, schema: DataSchema, who: str) -> tuple[Any, Any]:
    """A function from this member's inputs to those of the schema, and the column names."""
    names, agreed = dataset.columns, schema.columns
    if names is None or agreed is None or names == agreed:
        return (lambda x: x), agreed
    unknown = [c for c in names if c not in agreed]
    known = {c.partition("=")[0] for c in names}
    missing = [
        c for c in agreed if c not in names and not ("=" in c and c.partition("=")[0] in known)
    ]
    if unknown or missing:
        what = (
            f"a column {unknown[0]!r} that the terms do not have"
            if unknown
            else (f"no column {missing[0]!r}, which the terms have")
        )
        raise TermsError(f"{who} has {what}; the terms have: {', '.join(agreed)}")
    position = {c: i for i, c in enumerate(names)}

    def reorder(x: Any) -> Any:
        empty = np.zeros(len(x), x.dtype)
        return np.stack([x[:, position[c]] if c in position else empty for c in agreed], 1)

    return reorder, agreed


def _classes(dataset: Dataset, schema: DataSchema, who: str) -> Any:
    """A function from this member's labels to those of the schema."""
    names, agreed = dataset.classes, schema.classes
    if names is None or agreed is None or names == agreed:
        if dataset.outputs > schema.outputs:
            raise TermsError(f"{who} has {dataset.outputs} outputs, the terms {schema.outputs}")
        return lambda y: y
    unknown = [c for c in names if c not in agreed]
    if unknown:
        raise TermsError(
            f"{who} has a class {unknown[0]!r} that the terms do not have; they have: "
            + ", ".join(agreed)
        )
    position = np.array([agreed.index(c) for c in names])

    def renumber(y: Any) -> Any:
        if y.ndim == 1:
            return position[y]
        wide = np.zeros((len(y), len(agreed)), y.dtype)
        wide[:, position] = y
        return wide

    return renumber


def schema_of(dataset: Dataset) -> DataSchema:
    """The data schema of a dataset, to be used in the terms of a federation."""
    return DataSchema(
        shape=dataset.shape,
        task=dataset.task,
        outputs=dataset.outputs,
        classes=dataset.classes,
        columns=dataset.columns,
        mean=tuple(float(v) for v in np.ravel(dataset.mean)),
        std=tuple(float(v) for v in np.ravel(dataset.std)),
        dtype=str(dataset.x_train.dtype),
    )
