"""One column of text cells as numbers, as one-hot or as classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kedge.data.datasets.dataset import Array
from kedge.errors import DataError

FEW = 20  # distinct values up to which words become one-hot and fractions may be classes
MISSING = {"", "nan", "na", "n/a", "null", "?"}


class Column(NamedTuple):
    name: str
    cells: list[str]
    places: list[tuple[object, int]]  # file and line of every cell

    def numbers(self) -> dict[str, float | None]:
        """Every distinct cell as a number, or None where it is none. Missing values are refused."""
        found = {cell: _number(cell) for cell in set(self.cells)}
        self.refuse(
            lambda cell: cell.lower() in MISSING,
            "is a missing value; fill it in, delete the row, or leave out the column with "
            f'drop="{self.name}"',
            found,
        )
        return found

    def refuse(
        self, wrong: Callable[[str], bool], what: str, distinct: dict[str, float | None]
    ) -> None:
        """Raise for the first row whose cell is wrong."""
        bad = {cell for cell in distinct if wrong(cell)}
        if bad:
            row = next(row for row, cell in enumerate(self.cells) if cell in bad)
            raise self.error(row, what)

    def error(self, row: int, what: str) -> DataError:
        path, line = self.places[row]
        cell = repr(self.cells[row])
        shown = cell if len(cell) <= 60 else cell[:56] + "...'"
        return DataError(f"{path}, line {line}, column {self.name!r}: {shown} {what}")


def feature_column(column: Column) -> tuple[Array, tuple[str, ...]]:
    """float32 ``[n, 1]`` of numbers or ``[n, words]`` of zeros and ones, and their names."""
    numbers = column.numbers()
    words = [row for row, cell in enumerate(column.cells) if numbers[cell] is None]
    if not words:
        return number_column(column)[:, None], (column.name,)
    column.refuse(_has_comma, "has a comma; write numbers with a decimal point", numbers)
    if len(words) < len(column.cells) / 2:
        raise column.error(words[0], "is not a number, as most of this column are; correct it")
    if len(numbers) > FEW:
        raise column.error(
            words[0],
            f"is not a number, and with {len(numbers)} different values the column is too varied "
            f'for one-hot (at most {FEW}); leave it out with drop="{column.name}"',
        )
    order = sorted(numbers)
    at = np.array([order.index(cell) for cell in column.cells])
    hot = (at[:, None] == np.arange(len(order))).astype(np.float32)  # [n, words]
    return hot, tuple(f"{column.name}={word}" for word in order)


def number_column(column: Column) -> Array:
    """float32 ``[n]``."""
    numbers = column.numbers()
    column.refuse(_has_comma, "has a comma; write numbers with a decimal point", numbers)
    column.refuse(lambda cell: numbers[cell] is None, "is not a number", numbers)
    values = np.array([numbers[cell] for cell in column.cells], np.float64)
    huge = np.flatnonzero(~(np.abs(values) <= np.finfo(np.float32).max))
    if len(huge):
        raise column.error(int(huge[0]), "is not a finite number; correct it or delete the row")
    return values.astype(np.float32)


def class_column(column: Column, train: Array) -> tuple[Array, tuple[str, ...]]:
    """int64 ``[n]`` and the sorted names of the classes, all of which occur in training rows."""
    numbers = column.numbers()
    named = {cell: value for cell, value in numbers.items() if value is not None}
    if len(named) == len(numbers):
        column.refuse(lambda cell: not abs(named[cell]) < 1e15, "cannot be a class", numbers)
        if len(set(named.values())) > FEW:
            what = (
                f"is one of {len(named)} different numbers; to predict them, write task=regression"
            )
            column.refuse(lambda cell: named[cell] % 1 != 0, what, numbers)
        # 1 and 1.0 are one class, and 10 comes after 9
        names = {cell: repr(v) if v % 1 else str(int(v)) for cell, v in named.items()}
        order = sorted(set(names.values()), key=float)
    else:
        names = {cell: cell for cell in numbers}
        order = sorted(names)
    rows = len(column.cells)
    if len(order) > max(FEW, rows / 2):
        raise DataError(
            f"{column.places[0][0]}, column {column.name!r}: {len(order)} different labels in "
            f"{rows} rows cannot be classes; name another label column, or write task=regression "
            "if these are numbers to predict"
        )
    number = {name: i for i, name in enumerate(order)}
    y = np.array([number[names[cell]] for cell in column.cells], np.int64)
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
