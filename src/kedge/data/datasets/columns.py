"""Encode one column of text cells as numbers, one-hot vectors or classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kedge.data.datasets.dataset import Array
from kedge.errors import DataError

MAX_CATEGORIES = 20  # distinct values of a one-hot column, or of a class column with fractions
MISSING_VALUES = {"", "nan", "na", "n/a", "null", "?"}


class Column(NamedTuple):
    """The cells of one column, of one or several files."""

    name: str
    cells: list[str]
    places: list[tuple[object, int]]  # file and line of each cell

    def numbers(self) -> dict[str, float | None]:
        """Each distinct cell as a number, or None if it is a word.

        Raises:
            DataError: a cell is missing.
        """
        numbers = {cell: _number(cell) for cell in set(self.cells)}
        self.reject(
            lambda cell: cell.lower() in MISSING_VALUES,
            "is a missing value; fill it in, delete the row, or leave out the column with "
            f'drop="{self.name}"',
            numbers,
        )
        return numbers

    def reject(
        self, wrong: Callable[[str], bool], what: str, distinct: dict[str, float | None]
    ) -> None:
        """Raise a DataError for the first row whose cell is wrong."""
        bad = {cell for cell in distinct if wrong(cell)}
        if bad:
            row = next(row for row, cell in enumerate(self.cells) if cell in bad)
            raise self.error(row, what)

    def error(self, row: int, what: str) -> DataError:
        """A DataError that names file, line, column and cell."""
        path, line = self.places[row]
        cell = repr(self.cells[row])
        shown = cell if len(cell) <= 60 else cell[:56] + "...'"
        return DataError(f"{path}, line {line}, column {self.name!r}: {shown} {what}")


def feature_column(column: Column) -> tuple[Array, tuple[str, ...]]:
    """Encode a feature: float32 ``[n, 1]`` of numbers or ``[n, words]`` one-hot, and the names."""
    numbers = column.numbers()
    words = [row for row, cell in enumerate(column.cells) if numbers[cell] is None]
    if not words:
        return number_column(column)[:, None], (column.name,)
    column.reject(_has_comma, "has a comma; write numbers with a decimal point", numbers)
    if len(words) < len(column.cells) / 2:
        raise column.error(words[0], "is not a number, as most of this column are; correct it")
    if len(numbers) > MAX_CATEGORIES:
        raise column.error(
            words[0],
            f"is not a number, and with {len(numbers)} different values the column is too varied "
            f'for one-hot (at most {MAX_CATEGORIES}); leave it out with drop="{column.name}"',
        )
    order = sorted(numbers)
    codes = np.array([order.index(cell) for cell in column.cells])
    one_hot = (codes[:, None] == np.arange(len(order))).astype(np.float32)  # [n, words]
    return one_hot, tuple(f"{column.name}={word}" for word in order)


def number_column(column: Column) -> Array:
    """Encode numbers: float32 ``[n]``."""
    numbers = column.numbers()
    column.reject(_has_comma, "has a comma; write numbers with a decimal point", numbers)
    column.reject(lambda cell: numbers[cell] is None, "is not a number", numbers)
    values = np.array([numbers[cell] for cell in column.cells], np.float64)
    huge = np.flatnonzero(~(np.abs(values) <= np.finfo(np.float32).max))
    if len(huge):
        raise column.error(int(huge[0]), "is not a finite number; correct it or delete the row")
    return values.astype(np.float32)


def class_column(column: Column, train: Array) -> tuple[Array, tuple[str, ...]]:
    """Encode classes: int64 ``[n]``, and the sorted class names.

    ``train`` marks training rows, a mask ``[n]``; every class must occur in one of them.
    """
    numbers = column.numbers()
    named = {cell: value for cell, value in numbers.items() if value is not None}
    if len(named) == len(numbers):
        column.reject(lambda cell: not abs(named[cell]) < 1e15, "cannot be a class", numbers)
        if len(set(named.values())) > MAX_CATEGORIES:
            what = (
                f"is one of {len(named)} different numbers; to predict them, write task=regression"
            )
            column.reject(lambda cell: named[cell] % 1 != 0, what, numbers)
        # 1 and 1.0 are one class, and 10 comes after 9
        names = {cell: repr(v) if v % 1 else str(int(v)) for cell, v in named.items()}
        order = sorted(set(names.values()), key=float)
    else:
        names = {cell: cell for cell in numbers}
        order = sorted(names)
    rows = len(column.cells)
    if len(order) > max(MAX_CATEGORIES, rows / 2):
        raise DataError(
            f"{column.places[0][0]}, column {column.name!r}: {len(order)} different labels in "
            f"{rows} rows cannot be classes; name another label column, or write task=regression "
            "if these are numbers to predict"
        )
    code = {name: i for i, name in enumerate(order)}
    y = np.array([code[names[cell]] for cell in column.cells], np.int64)
    unseen = np.flatnonzero(~np.isin(y, y[train]))
    if len(unseen):
        raise column.error(int(unseen[0]), "is a label that no training row has")
    return y, tuple(order)


def _number(cell: str) -> float | None:
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None


def _has_comma(cell: str) -> bool:
    return cell.count(",") == 1 and _number(cell.replace(",", ".")) is not None
