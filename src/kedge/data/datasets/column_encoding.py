"""How one column of a table becomes columns of numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kedge.data.datasets.cells import Cells, has_comma
from kedge.errors import DataError
from kedge.grammar import write_value

Array = np.ndarray
Report = Callable[[DataError], None]

BOOLEANS = ("False", "True")
DATE_FORMATS = ("ISO8601", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y")
DAYS_PER_YEAR = 365.2425
COMMA = "has a comma; write numbers with a decimal point"


@dataclass(frozen=True)
class ColumnEncoding:
    """One column of a table.

    ``number`` and ``boolean`` (False is 0, True is 1) become one column, ``words`` one column per
    word (one-hot). A ``date`` becomes three: days since 1970-01-01 with the time of day as a
    fraction, and sine and cosine of the time of year, so that December is near January. A word that
    does not occur in ``words`` becomes zeros.

    Attributes:
        name: name of the column.
        kind: number, boolean, date or words.
        words: the words, in the order of their columns.
        format: the format of dates, one of ``DATE_FORMATS``, or those of several silos with "|"
            between them.
        fill: what a missing value becomes: a number, a day, or one number per word. None: missing
            values are errors.
        indicator: whether a last column ``name=missing`` marks missing values.
    """

    name: str
    kind: Literal["number", "boolean", "date", "words"]
    words: tuple[str, ...] = ()
    format: str = ""
    fill: tuple[float, ...] | None = None
    indicator: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the encoded columns."""
        names: tuple[str, ...] = (self.name,)
        if self.kind == "words":
            names = tuple(f"{self.name}={word}" for word in self.words)
        elif self.kind == "date":
            names = (self.name, f"{self.name}:sin", f"{self.name}:cos")
        return (*names, f"{self.name}=missing") if self.indicator else names

    def encode(self, cells: Cells, report: Report) -> Array:
        """Encode cells: float32 ``[n, len(names)]``. Cells that cannot be are reported."""
        if self.fill is None and cells.missing.any():
            report(MissingValues.of(cells))
        if self.kind == "words":
            block = self._one_hot(cells)
        else:
            values = self.values(cells, report)
            values[cells.missing] = self.fill[0] if self.fill is not None else 0.0
            block = _with_season(values) if self.kind == "date" else values[:, None]
        if self.indicator:
            block = np.concatenate([block, cells.missing[:, None]], 1)
        return block.astype(np.float32)

    def values(self, cells: Cells, report: Report) -> Array:
        """Numbers, zeros and ones, or days: float64 ``[n]``, NaN where missing or wrong."""
        if self.kind == "date":
            return self._days(cells, report)
        if self.kind == "boolean":
            # 0 and 1 are accepted for False and True
            places = cells.positions((*BOOLEANS, "0", "1"))
            wrong = (places < 0) & ~cells.missing
            if wrong.any():
                report(cells.error(wrong, "is neither true nor false; correct it"))
            return np.where(places < 0, np.nan, places % 2)
        return numbers(cells, report)

    def unknown(self, cells: Cells) -> list[str]:
        """Words that do not occur in the training data."""
        if self.kind != "words":
            return []
        return sorted(set(cells.values()) - set(self.words))

    def _one_hot(self, cells: Cells) -> Array:
        places = cells.positions(self.words)
        block = (places[:, None] == np.arange(len(self.words))).astype(np.float64)
        if self.fill is not None:
            block[cells.missing] = self.fill
        return block

    def _days(self, cells: Cells, report: Report) -> Array:
        if cells.is_number.any():
            report(cells.error(cells.is_number, "is not a date, as this column is; correct it"))
        days = np.full(len(cells.words), np.nan)
        for form in (*self.format.split("|"), DATE_FORMATS[0]):  # of a DataFrame: ISO texts
            if np.isnan(days).any():
                days = np.where(np.isnan(days), parse_days(cells.words, form), days)
        values = np.append(days, np.nan)[cells.codes]  # code -1: the last
        wrong = cells.is_word & np.isnan(values)
        if wrong.any():
            example = "2024-03-31" if "ISO8601" in self.format else self.format
            report(cells.error(wrong, f"is not a date such as {example}; correct it"))
        return values


def numbers(cells: Cells, report: Report) -> Array:
    """The numbers of a column: float64 ``[n]``, NaN where missing; words are reported."""
    if cells.is_word.any():
        commas = np.array([has_comma(word) for word in cells.words])[cells.codes] & cells.is_word
        if commas.any():
            report(cells.error(commas, COMMA))
        elif cells.is_word.any():
            report(cells.error(cells.is_word, "is not a number"))
    huge = cells.is_number & ~(np.abs(cells.numbers) <= np.finfo(np.float32).max)
    if huge.any():
        report(cells.error(huge, "is not a finite number; correct it or delete the row"))
    return np.where(huge, 0.0, cells.numbers)


def parse_days(words: tuple[str, ...], form: str) -> Array:
    """Days since 1970 of dates: float64 ``[n]``, NaN where a word is no date of this format.

    >>> parse_days(("1970-01-02", "1970-01-01 12:00", "x"), "ISO8601").tolist()
    [1.0, 0.5, nan]
    """
    import pandas as pd

    times = pd.to_datetime(list(words), format=form, errors="coerce", utc=True)
    since = times - pd.Timestamp(0, tz="UTC")
    return np.asarray(since / pd.Timedelta(days=1), np.float64)


def date_formats(words: tuple[str, ...]) -> tuple[str, ...]:
    """The formats that all words have, as dates."""
    few = words[:5]
    likely = [f for f in DATE_FORMATS if not np.isnan(parse_days(few, f)).any()]
    return tuple(f for f in likely if not np.isnan(parse_days(words, f)).any())


class MissingValues(DataError):
    """Missing values of one column, in one or several files; ``place`` is that of the first."""

    def __init__(self, column: str, place: str, cells: int, files: int = 1) -> None:
        self.column, self.place, self.cells, self.files = column, place, cells, files
        advice = self.advice([column]).replace("them", "it" if cells == 1 else "them")
        super().__init__(f"{self.short}; {advice}")

    @classmethod
    def of(cls, cells: Cells) -> MissingValues:
        """Those of one file."""
        which = np.flatnonzero(cells.missing)
        place = cells.table.place(int(cells.rows[which[0]]), cells.name)
        return cls(cells.name, place, len(which))

    @property
    def short(self) -> str:
        """The message without advice."""
        where = "this column" if self.files == 1 else f"this column of {self.files} files"
        more = f" (and {self.cells - 1} more in {where})" if self.cells > 1 else ""
        return f"{self.place} is a missing value{more}"

    @staticmethod
    def advice(columns: list[str]) -> str:
        """The options to type."""
        names = columns if len(columns) > 1 else columns[0]
        return (
            "fill them in with missing=mean (or median, indicator), leave out such rows with "
            f"missing=drop, or leave out the column{'s' if len(columns) > 1 else ''} with "
            f"{typed('drop', names)}"
        )

    def __add__(self, other: MissingValues) -> MissingValues:
        """Those of both, which are of one column in several files."""
        cells, files = self.cells + other.cells, self.files + other.files
        return MissingValues(self.column, self.place, cells, files)

    def __reduce__(self) -> tuple[type, tuple[str, str, int, int]]:
        return type(self), (self.column, self.place, self.cells, self.files)


def typed(option: str, value: str | list[str]) -> str:
    """An option as it is typed inside the double quotes of ``--data "..."``.

    >>> typed("drop", "age"), typed("drop", ["age", "chol 1"])
    ('drop=age', "drop=[age, 'chol 1']")
    """
    text = write_value(value)
    single = text if "'" in text else text.replace('"', "'")
    return f"{option}={single}"


def _with_season(days: Array) -> Array:
    angle = 2 * np.pi * days / DAYS_PER_YEAR
    return np.stack([days, np.sin(angle), np.cos(angle)], 1)
