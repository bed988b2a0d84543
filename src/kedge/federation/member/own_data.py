"""A member's own data: what it reads, what it says of them, and the federation of one client.

The data are read with the member's own numbering of classes and columns. Only sums leave: how many
samples, and moments from which the mean and standard deviation of all members follow. They are the
same as those of pooled data up to the rounding of float64, in one message instead of two: each
member sends sums of squares around *its own* mean, and the server adds n_k (mean_k - mean)² (Chan,
Golub and LeVeque 1983). Of constant columns it sends the constant, and no least or largest value
leaves, which would be the value of one sample.

Each member numbers its own classes and columns: two folders of images with the classes (cat, dog)
and (dog, horse) both have labels 0 and 1. Here classes and columns are matched by name.

Joining must not tell, under a policy, of words and values that few samples have. With
``min_per_word`` a word of a column that fewer rows have is not among its words, so it is encoded as
zeros, like a word that no row has. The words that are left out have so many rows together, too, or
one more is left out: their number follows from the others'.

A number that fills missing values is sent, so it must not be the value of one sample: medians are
refused, and means of few values. Of a column in which fewer rows differ from all others, the
moments are those of a constant (:func:`moments_of`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from kedge.core.task import tasks
from kedge.data.datasets import Dataset, load
from kedge.data.datasets.dataset import OneClass
from kedge.data.datasets.tables.encoding import ColumnEncoding, TableEncoding, typed
from kedge.data.federation import Federation
from kedge.data.partition import Partition, holdout
from kedge.data.splits import read_split
from kedge.errors import DataError, FieldError, TermsError
from kedge.schema import NotNegative, Range
from kedge.session.terms import DataSchema, Terms

Array = np.ndarray[Any, Any]
SPLITS = ("train", "test", "val")


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
        shapes = f"{list(dataset.shape)}, the terms say {list(schema.shape)}"
        raise TermsError(f"{who}: inputs have the shape {shapes}")
    y = _classes(dataset, schema, who)
    mean = np.array(schema.mean, np.float32) if schema.mean else dataset.mean
    std = np.array(schema.std, np.float32) if schema.std else dataset.std
    return dataclasses.replace(
        dataset, **_each(dataset, "x", x), **_each(dataset, "y", y), outputs=schema.outputs,
        classes=schema.classes, columns=columns, mean=mean, std=std,
        encoding=dataset.encoding if columns == dataset.columns else None,
    )  # fmt: skip


def _each(dataset: Dataset, name: str, function: Callable[[Any], Any]) -> dict[str, Any]:
    """The inputs ``x`` or labels ``y`` of each split after a function."""
    every = {f"{name}_{split}": getattr(dataset, f"{name}_{split}") for split in SPLITS}
    return {k: None if value is None else function(value) for k, value in every.items()}


def _columns(dataset: Dataset, schema: DataSchema, who: str) -> tuple[Any, Any]:
    """A function from this member's inputs to those of the schema, and the column names."""
    names, agreed = dataset.columns, schema.columns
    if names is None or agreed is None or names == agreed:
        return (lambda x: x), agreed
    unknown = [c for c in names if c not in agreed]
    known = {c.partition("=")[0] for c in names}
    lacks = (c for c in agreed if c not in names)
    missing = [c for c in lacks if "=" not in c or c.partition("=")[0] not in known]
    if unknown or missing:
        what = f"no column {missing[0]!r}, which the terms have" if missing else ""
        what = f"a column {unknown[0]!r} that the terms do not have" if unknown else what
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


HOLDOUT = 0.2  # share of a member without a test set, for the split auto


def read_data(source: str | Path | Dataset) -> Dataset:
    """Read a member's dataset. One class is enough: other members have the others.

    Raises:
        DataError: the data cannot be read.
    """
    if isinstance(source, Dataset):
        return source
    try:
        return load(source)
    except OneClass as error:
        return error.dataset


def check_split(split: str) -> float | None:
    """The share that every member holds out; 0 for test sets of their own (``given``), None for
    ``auto``: a member's test set, or a share of its samples where it has none.

    Raises:
        FieldError: members cannot split their data so.
    """
    call = read_split(split)
    if call.name == "auto":
        return None
    if call.name == "given":
        return 0.0
    if call.name == "holdout":
        return float(call.options["fraction"])
    raise FieldError(
        f"split = {split!r} is not for members, each of which has its own data; use auto, given or "
        "holdout(0.2)",
        "split",
    )


@dataclass(frozen=True)
class OwnRows:
    """Inputs and labels of a member in one array each, and the rows to train and to test on."""

    x: Array
    y: Array
    train: Array
    test: Array


def split_rows(dataset: Dataset, split: str, seed: int, name: str) -> OwnRows:
    """Split a member's data.

    OwnRows are drawn from the seed and the member's name, so they do not depend on who else takes
    part, nor on the order in which members join.

    Raises:
        DataError: the split asks for a test set that the member does not have.
    """
    share, x, y = check_split(split), dataset.x_train, dataset.y_train
    count = len(x)
    if share is None:
        share = HOLDOUT if dataset.x_test is None else 0.0
    elif share == 0.0 and dataset.x_test is None:
        raise DataError(f"{dataset.name} has no test set; use split = holdout(0.2)")
    if share:
        every = Partition((np.arange(count),), "all", seed, count)
        labels = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
        train, test = holdout(every, labels, share, seed, purpose=f"split of {name}")
        return OwnRows(x, y, train.clients[0], test.clients[0])
    assert dataset.x_test is not None
    assert dataset.y_test is not None
    test_rows = np.arange(count, count + len(dataset.x_test))
    joined = np.concatenate([x, dataset.x_test]), np.concatenate([y, dataset.y_test])
    return OwnRows(*joined, np.arange(count), test_rows)


def own_federation(
    dataset: Dataset, terms: Terms, name: str, device: torch.device | str = "cpu"
) -> Federation:
    """The federation whose only client is this member, under the terms.

    Raises:
        TermsError: the data do not fit the schema of the terms.
    """
    own = conform(dataset, terms.data, name)
    if str(own.x_train.dtype) != terms.data.dtype:
        types = f"{own.x_train.dtype}, the terms say {terms.data.dtype}"
        raise TermsError(f"{name}: inputs are {types}")
    rows = split_rows(own, terms.split, terms.seed, name)
    return Federation(
        rows.x,
        rows.y,
        [rows.train],
        terms.task,
        held_out=[rows.test] if len(rows.test) else None,
        moments=(own.mean, own.std),
        augment=terms.augment,
        dtype=getattr(torch, terms.dtype),
        device=device,
        tokens=terms.data.dtype == "int64",
        client_names=[name],
    )


# -- moments --------------------------------------------------------------------------------------


Numbers = Annotated[int, Range(0, 10**15)]  # more is implausible


@dataclass(frozen=True)
class Moments:
    """Sums over a member's training samples, per channel or column.

    Attributes:
        bytes: how often each of 256 values occurs, for 8-bit inputs; exact.
        count: numbers per channel or column.
        mean: their mean; the constant itself if all are equal.
        squares: sum of squared differences from that mean; 0 if all are equal.
    """

    bytes: tuple[tuple[Numbers, ...], ...] = ()
    count: Numbers = 0
    mean: tuple[float, ...] = ()
    squares: tuple[NotNegative, ...] = ()


def moments_of(x: Array, least: int = 0) -> Moments:
    """The moments of training inputs ``[n, C, ...]``; empty for token ids.

    A column in which fewer than ``least`` rows differ from all others is stated as constant: its
    sums would tell these few.

    >>> moments_of(np.array([[1.0, 5.0], [3.0, 5.0]], np.float32))
    Moments(bytes=(), count=2, mean=(2.0, 5.0), squares=(2.0, 0.0))
    """
    if x.dtype == np.int64:
        return Moments()
    channels = [np.ascontiguousarray(x[:, c]).ravel() for c in range(x.shape[1])]
    if x.dtype == np.uint8:
        return Moments(tuple(tuple(np.bincount(c, minlength=256).tolist()) for c in channels))
    means, squares = [], []
    for values in channels:
        if least > 1 and x.ndim == 2:
            distinct, counts = np.unique(values, return_counts=True)
            if len(values) - counts.max() < least:
                values = np.full_like(values, distinct[counts.argmax()])
        constant = bool((values == values[0]).all())
        mean = float(values[0]) if constant else float(values.mean(dtype=np.float64))
        means.append(mean)
        deviations = values.astype(np.float64) - mean
        squares.append(0.0 if constant else float(deviations @ deviations))
    return Moments(count=len(channels[0]), mean=tuple(means), squares=tuple(squares))


def without_rare_words(dataset: Dataset, least: int) -> Dataset:
    """A table without the words that fewer than ``least`` training rows have.

    Raises:
        DataError: no word of a column is left.
    """
    encoding = dataset.encoding
    if least <= 1 or not isinstance(encoding, TableEncoding):
        return dataset
    columns: list[ColumnEncoding] = []
    kept: list[int] = []
    for column, places in _places(encoding):
        count = len(column.words)
        if column.kind == "words":
            stay = _frequent(dataset.x_train[:, places[:count]], least)
            words = tuple(column.words[i] for i in stay)
            fill = column.fill and tuple(column.fill[i] for i in stay)
            column = dataclasses.replace(column, words=words, fill=fill)
            kept += [places[i] for i in stay]
        columns.append(column)
        kept += places[count:]
    if len(kept) == dataset.x_train.shape[1]:
        return dataset
    fewer = dataclasses.replace(encoding, columns=tuple(columns))
    return dataclasses.replace(
        dataset, **_each(dataset, "x", lambda x: np.ascontiguousarray(x[:, kept])),
        mean=dataset.mean[kept], std=dataset.std[kept], columns=fewer.names, encoding=fewer,
    )  # fmt: skip


def check_rare(dataset: Dataset, least: int) -> None:
    """Raise a DataError for what a profile on the data would tell of fewer samples."""
    if least <= 1:
        return
    x, count = dataset.x_train, len(dataset.x_train)
    if count < least:
        raise DataError(f"{count} samples are fewer than min_per_word = {least}")
    if x.dtype == np.uint8 and x.ndim == 2:
        raise DataError("columns of whole bytes are told value by value; save them as float32")
    if dataset.classes and tasks[dataset.task].one_class:
        every = [y for y in (dataset.y_train, dataset.y_test, dataset.y_val) if y is not None]
        counts = [np.bincount(y, minlength=dataset.outputs) for y in every]
        for i, name in enumerate(dataset.classes):
            samples = next((int(n[i]) for n in counts if n[i]), 0)
            if 0 < samples < least:
                raise DataError(
                    f"the class {name!r} has {samples} samples, and its name would leave; unite it "
                    f"with another, or set min_per_word = {samples}"
                )
    if isinstance(dataset.encoding, TableEncoding):
        for column, places in _places(dataset.encoding):
            _check_column(column, x[:, places[:1]], dataset.encoding.missing, least)


def _check_column(column: ColumnEncoding, x: Array, missing: str, least: int) -> None:
    drop = typed("drop", column.name)
    if column.kind == "words" and not column.words:
        raise DataError(
            f"no word of column {column.name!r} has {least} rows; group its words, or {drop}"
        )
    if column.kind == "words" or column.fill is None:
        return
    if missing == "median" and column.kind != "boolean":
        raise DataError(
            f"missing=median would send a value of one sample (column {column.name!r}); write "
            "missing=mean"
        )
    if (x != np.float32(column.fill[0])).sum() < least:  # the others may all be missing
        raise DataError(
            f"column {column.name!r} has fewer than {least} values that differ from their mean, "
            f"which would leave; write {drop}"
        )


def _places(encoding: TableEncoding) -> Iterator[tuple[ColumnEncoding, list[int]]]:
    """Each column, and where its encoded columns are."""
    start = 0
    for column in encoding.columns:
        end = start + len(column.names)
        yield column, list(range(start, end))
        start = end


def _frequent(one_hot: Array, least: int) -> list[int]:
    """The words that stay."""
    counts = (one_hot == 1).sum(0)
    order = np.argsort(counts, kind="stable")
    gone = 0
    for place, word in enumerate(order):
        if counts[word] >= least and (gone == 0 or gone >= least):
            return sorted(order[place:].tolist())
        gone += int(counts[word])
    return []
