"""The cells of one column of one table: numbers, words and missing values.

A cell has the same meaning wherever it comes from: ``1`` and ``1.0`` are the same number and the
same word, ``true`` is the word ``True``, and a date of a DataFrame is its ISO text.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kedge.errors import DataError

if TYPE_CHECKING:
    from kedge.data.datasets.tables.files import DataTable

Array = np.ndarray

Report = Callable[[DataError], None]

MISSING_VALUES = {"", "nan", "-nan", "na", "n/a", "#n/a", "<na>", "null", "nat", "?"}


@dataclass(frozen=True)
class ColumnCells:
    """One column of one table.

    Attributes:
        name: name of the column.
        table: where the cells are, for messages.
        rows: the row of each cell in the table, ``[n]``.
        numbers: float64 ``[n]``, NaN where the cell is a word or missing.
        codes: index of each word in ``words``, ``[n]``; -1 where the cell is a number or missing.
        words: distinct words.
        missing: bool ``[n]``.
    """

    name: str
    table: DataTable
    rows: Array
    numbers: Array
    codes: Array
    words: tuple[str, ...]
    missing: Array

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def is_word(self) -> Array:
        """Which cells are words, bool ``[n]``."""
        return self.codes >= 0

    @property
    def is_number(self) -> Array:
        """Which cells are numbers, bool ``[n]``."""
        return ~self.missing & (self.codes < 0)

    def take(self, keep: Array) -> ColumnCells:
        """The cells of some rows, given as a mask."""
        return ColumnCells(
            self.name, self.table, self.rows[keep], self.numbers[keep], self.codes[keep],
            self.words, self.missing[keep],
        )  # fmt: skip

    def positions(self, order: Sequence[str]) -> Array:
        """The index of each cell's text in ``order``, ``[n]``; -1 for others and missing ones."""
        place = {word: i for i, word in enumerate(order)}
        found = np.full(len(self), -1, np.int64)
        if self.words:
            known = np.array([place.get(word, -1) for word in self.words])
            found[self.is_word] = known[self.codes[self.is_word]]
        values, inverse = np.unique(self.numbers[self.is_number], return_inverse=True)
        if len(values):
            found[self.is_number] = np.array([place.get(text(v), -1) for v in values])[inverse]
        return found

    def texts(self) -> Array:
        """Every cell as a word, object ``[n]``; None where missing."""
        order = self.values()
        places = self.positions(order)
        return np.array([*order, None], object)[places]

    def values(self) -> list[str]:
        """The distinct values as words, without missing ones."""
        used = np.unique(self.codes[self.is_word])
        numbers = np.unique(self.numbers[self.is_number])
        return [*(self.words[i] for i in used), *(text(v) for v in numbers)]

    def check(self, wrong: Array, what: str, report: Report) -> None:
        """Report the first cell of a mask, if there is one."""
        if wrong.any():
            report(self.error(wrong, what))

    def error(self, wrong: Array, what: str) -> DataError:
        """A DataError for the first cell of a mask, which names file, line, column and cell."""
        which = np.flatnonzero(wrong)
        more = f" (and {len(which) - 1} more in this column)" if len(which) > 1 else ""
        return self.table.error(int(self.rows[which[0]]), self.name, what + more)


def text(number: float) -> str:
    """A number as a word: 1 and 1.0 are the same.

    >>> text(1.0), text(0.5)
    ('1', '0.5')
    """
    number = float(number)
    return str(int(number)) if number % 1 == 0 else repr(number)


def read_cells(table: DataTable, name: str) -> ColumnCells:
    """The cells of a column.

    Raises:
        DataError: the column holds lists or other objects.
    """
    import pandas as pd
    from pandas.api import types

    series = table.frame[name]
    n = len(series)
    rows, codes = np.arange(n), np.full(n, -1, np.int64)
    if types.is_timedelta64_dtype(series.dtype):
        series = series.dt.total_seconds() / 86400
    if types.is_numeric_dtype(series.dtype) and not types.is_bool_dtype(series.dtype):
        if types.is_complex_dtype(series.dtype):
            raise DataError(f"{table.where}, column {name!r}: complex numbers cannot be read")
        numbers = series.to_numpy(np.float64, na_value=np.nan)
        return ColumnCells(name, table, rows, numbers, codes, (), np.isnan(numbers))
    try:
        places, uniques = pd.factorize(series, use_na_sentinel=True)
    except TypeError as error:
        raise DataError(
            f"{table.where}, column {name!r}: cells must be numbers, text or dates ({error})"
        ) from error
    values = [_value(cell) for cell in uniques]
    words = tuple(dict.fromkeys(v for v in values if isinstance(v, str)))
    index = {word: i for i, word in enumerate(words)}
    number_of = [v if isinstance(v, float) else np.nan for v in values]
    code_of = [index.get(v, -1) if isinstance(v, str) else -1 for v in values]
    numbers = np.array([*number_of, np.nan])[places]  # place -1: the last, missing
    codes = np.array([*code_of, -1], np.int64)[places]
    return ColumnCells(name, table, rows, numbers, codes, words, np.isnan(numbers) & (codes < 0))


def _value(cell: Any) -> float | str | None:
    """A cell as a number, a word, or None if it is missing."""
    if isinstance(cell, bool | np.bool_):
        return str(bool(cell))
    if isinstance(cell, datetime.date):  # also datetime and pandas.Timestamp
        return cell.isoformat()
    if isinstance(cell, int | float | np.number):
        return None if cell != cell else float(cell)
    word = str(cell).strip()
    if word.lower() in MISSING_VALUES:
        return None
    value = as_number(word)
    if value is None and word.lower() in ("true", "false"):
        return word.capitalize()
    return word if value is None else value


def as_number(word: str) -> float | None:
    """A text as a number, or None if it is none."""
    try:
        return None if "_" in word else float(word)
    except ValueError:
        return None


def has_comma(word: str) -> bool:
    """Whether a word is a number with a decimal comma."""
    return word.count(",") == 1 and as_number(word.replace(",", ".")) is not None
