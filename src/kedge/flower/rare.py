"""What joining must not tell under a policy: words and values that few samples have.

With ``min_per_word`` a word of a column that fewer rows have is not among its words, so it is
encoded as zeros, like a word that no row has. The words that are left out have so many rows
together, too, or one more is left out: their number follows from the others'.

A number that fills missing values is sent, so it must not be the value of one sample: medians are
refused, and means of few values. Of a column in which fewer rows differ from all others, the
moments are those of a constant (:func:`kedge.flower.own_data.moments_of`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from kedge.core.task import tasks
from kedge.data.datasets import Dataset
from kedge.data.datasets.tables.encoding import ColumnEncoding, TableEncoding, typed
from kedge.errors import DataError

Array = np.ndarray


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

    def cut(x: Any) -> Any:
        return None if x is None else np.ascontiguousarray(x[:, kept])

    fewer = dataclasses.replace(encoding, columns=tuple(columns))
    return dataclasses.replace(
        dataset, x_train=cut(dataset.x_train), x_test=cut(dataset.x_test), x_val=cut(dataset.x_val),
        mean=dataset.mean[kept], std=dataset.std[kept], columns=fewer.names, encoding=fewer,
    )  # fmt: skip


def check_rare(dataset: Dataset, least: int) -> None:
    """Raise a DataError for what a statement on the data would tell of fewer samples."""
    if least <= 1:
        return
    x, count = dataset.x_train, len(dataset.x_train)
    if count < least:
        raise DataError(f"{count} samples are fewer than min_per_word = {least}")
    if x.dtype == np.uint8 and x.ndim == 2:
        raise DataError("columns of whole bytes are told value by value; save them as float32")
    if dataset.classes and tasks[dataset.task].one_class:
        found = np.bincount(dataset.y_train, minlength=len(dataset.classes))
        for name, samples in zip(dataset.classes, found, strict=True):
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
