"""The encoding of tables: raw columns in any order to the columns of the training data.

It is fitted on training rows, from what each silo could send: a :class:`Profile` of each column,
then what a mean, a median or the shares of words need, and the set of its labels. No function here
sees the values of two silos together. Wrong cells are reported where they are, at the silo.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from kedge.data.datasets.tables.files import (
    ColumnCells,
    DataTable,
    Report,
    as_number,
    as_table,
    read_cells,
)
from kedge.data.encoding import Array, Encoding, Samples, encodings
from kedge.errors import DataError, KedgeError, SeveralDataErrors, nearest
from kedge.grammar import write_value
from kedge.schema import ErrorCollector

ID_NAMES = (
    "id", "ids", "patientid", "key", "name", "patient", "subject", "case", "record", "sample",
)  # fmt: skip
BOOLEANS = ("False", "True")
DATE_FORMATS = ("ISO8601", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y")
DAYS_PER_YEAR = 365.2425
BINS = 1000  # of the histogram of a median, and most distinct values that are counted one by one
SLASHED = DATE_FORMATS[2:]  # 03/04/2024 may be of both
Missing = Literal["error", "mean", "median", "indicator", "drop"]
MAX_CATEGORIES = 20  # distinct values of a one-hot column, or of a class column with fractions
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

    def encode(self, cells: ColumnCells, report: Report) -> Array:
        """Encode cells: float32 ``[n, len(names)]``. Cells that cannot be are reported."""
        if self.fill is None and cells.missing.any():
            place, count = cells.first(cells.missing), int(cells.missing.sum())
            report(MissingValues(cells.name, place, count))
        if self.kind == "words":
            block = self._one_hot(cells)
        else:
            values = self.values(cells, report)
            values[cells.missing] = self.fill[0] if self.fill is not None else 0.0
            block = _with_season(values) if self.kind == "date" else values[:, None]
        if self.indicator:
            block = np.concatenate([block, cells.missing[:, None]], 1)
        return block.astype(np.float32)

    def values(self, cells: ColumnCells, report: Report) -> Array:
        """Numbers, zeros and ones, or days: float64 ``[n]``, NaN where missing or wrong."""
        if self.kind == "date":
            return self._days(cells, report)
        if self.kind == "boolean":
            # 0 and 1 are accepted for False and True
            places = cells.positions((*BOOLEANS, "0", "1"))
            wrong = (places < 0) & ~cells.missing
            cells.check(wrong, "is neither true nor false; correct it", report)
            return np.where(places < 0, np.nan, places % 2)
        return numbers(cells, report)

    def unknown(self, cells: ColumnCells) -> list[str]:
        """Words that do not occur in the training data."""
        if self.kind != "words":
            return []
        return sorted(set(cells.values()) - set(self.words))

    def _one_hot(self, cells: ColumnCells) -> Array:
        places = cells.positions(self.words)
        block = (places[:, None] == np.arange(len(self.words))).astype(np.float64)
        if self.fill is not None:
            block[cells.missing] = self.fill
        return block

    def _days(self, cells: ColumnCells, report: Report) -> Array:
        cells.check(cells.is_number, "is not a date, as this column is; correct it", report)
        days = np.full(len(cells.words), np.nan)
        for form in (*self.format.split("|"), DATE_FORMATS[0]):  # of a DataFrame: ISO texts
            if np.isnan(days).any():
                days = np.where(np.isnan(days), parse_days(cells.words, form), days)
        values = np.append(days, np.nan)[cells.codes]  # code -1: the last
        wrong = cells.is_word & np.isnan(values)
        example = "2024-03-31" if "ISO8601" in self.format else self.format
        cells.check(wrong, f"is not a date such as {example}; correct it", report)
        return values


def numbers(cells: ColumnCells, report: Report) -> Array:
    """The numbers of a column: float64 ``[n]``, NaN where missing; words are reported."""
    if cells.has_comma.any():
        report(cells.error(cells.has_comma, COMMA))
    else:
        cells.check(cells.is_word, "is not a number", report)
    huge = cells.is_number & ~(np.abs(cells.numbers) <= np.finfo(np.float32).max)
    cells.check(huge, "is not a finite number; correct it or delete the row", report)
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


def _with_season(days: Array) -> Array:
    angle = 2 * np.pi * days / DAYS_PER_YEAR
    return np.stack([days, np.sin(angle), np.cos(angle)], 1)


# -- tables ----------------------------------------------------------------------------------------


@encodings.register("table")
@dataclass(frozen=True)
class TableEncoding(Encoding):
    """The columns of a table, and what becomes of missing values.

    Attributes:
        columns: the columns that the model needs.
        labels: names of the label columns.
        classes: whether the label is a class, rather than numbers.
        missing: ``error``, ``mean``, ``median``, ``indicator`` or ``drop``.
        id: a column with names of rows, or None.
    """

    columns: tuple[ColumnEncoding, ...]
    labels: tuple[str, ...] = ()
    classes: bool = True
    missing: str = "error"
    id: str | None = None
    kind = "table"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the encoded columns."""
        return tuple(name for column in self.columns for name in column.names)

    def encode(self, raw: Any) -> Samples:
        """Encode the rows of a table.

        Columns may be in any order, and others are ignored. A word that does not occur in the
        training data becomes zeros, with a warning. With ``missing=drop``, rows with missing values
        are left out, with a warning; ``ids`` say which are left.

        Args:
            raw: the path of a CSV or Parquet file, a DataFrame, a dict of columns, or a list of
                rows as dicts.

        Returns:
            Inputs, float32 ``[n, F]``; ids from the id column, from the index of a DataFrame, or
            row numbers from 0; and labels if the table has all label columns and not only missing
            ones: class names (None where one is missing), object ``[n]``, or numbers (NaN where one
            is missing), float64 ``[n]`` or ``[n, labels]``.

        Raises:
            DataError: columns are missing, or cells cannot be encoded; lists all of them.
        """
        table = as_table(raw)
        self.require(table)
        problems = Problems()
        cells = [read_cells(table, column.name) for column in self.columns]
        keep = self._kept(cells, table)
        cells = [c.take(keep) for c in cells]
        x = self.blocks(cells, problems)
        labels = self._labels(table, keep, problems)
        problems.raise_all()
        warn_unknown(self, [cells])
        ids = np.asarray(self._ids(table), object)[keep]
        return Samples(x, tuple(ids), labels)

    def blocks(self, cells: Sequence[ColumnCells], problems: Problems) -> Array:
        """The encoded columns side by side, float32 ``[n, F]``."""
        columns = zip(self.columns, cells, strict=True)
        return np.concatenate([column.encode(c, problems.add) for column, c in columns], axis=1)

    def require(self, table: DataTable) -> None:
        """Raise a DataError that names all columns that the table lacks."""
        absent = [c.name for c in self.columns if c.name not in table.columns]
        if absent:
            near = nearest(absent[0], table.columns)
            hint = f" Is {near[0]!r} {absent[0]!r}? Then rename it." if near else ""
            if not near and all(c.fill is not None for c in self.columns):
                hint = " Add it; empty cells are filled in as in the training."
            raise DataError(
                f"{table.where}: no column {', '.join(map(repr, absent))}.{hint} "
                f"The model needs: {', '.join(c.name for c in self.columns)}"
            )

    def _kept(self, cells: Sequence[ColumnCells], table: DataTable) -> Array:
        """The rows that are encoded, bool ``[n]``."""
        if self.missing != "drop":
            return np.ones(len(table), bool)
        keep = complete_rows(cells)
        if not keep.any():
            raise DataError(f"{table.where}: every row has a missing value")
        if not keep.all():
            text = f"{table.where}: {(~keep).sum()} of {len(keep)} rows have missing values"
            warnings.warn(f"{text} and are left out, as in training", stacklevel=3)
        return keep

    def _ids(self, table: DataTable) -> list[str]:
        used = {*(c.name for c in self.columns), *self.labels}
        name = self.id or find_id(c for c in table.columns if c not in used)
        if name is not None and name in table.columns:
            texts = read_cells(table, name).texts()
            return [str(i) if word is None else word for i, word in enumerate(texts)]
        return [str(i) for i in table.frame.index]

    def _labels(self, table: DataTable, keep: Array, problems: Problems) -> Array | None:
        if not self.labels or any(name not in table.columns for name in self.labels):
            return None
        cells = [read_cells(table, name).take(keep) for name in self.labels]
        if all(c.missing.all() for c in cells):
            return None
        if self.classes:
            return cells[0].texts()
        values = np.stack([numbers(c, problems.add) for c in cells], axis=1)
        return values[:, 0] if len(cells) == 1 else values


def complete_rows(cells: Iterable[ColumnCells]) -> Array:
    """Which rows have no missing value in any of the columns, bool ``[n]``."""
    return ~np.any([c.missing for c in cells], axis=0)


def warn_unknown(encoding: TableEncoding, tables: Sequence[Sequence[ColumnCells]]) -> None:
    """Warn once about words that do not occur in the training data."""
    unknown = {
        column.name: sorted({word for cells in tables for word in column.unknown(cells[i])})
        for i, column in enumerate(encoding.columns)
    }
    found = [f"{name}={word}" for name, words in unknown.items() for word in words]
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        warnings.warn(
            f"no training row has {', '.join(found[:5])}{more}; such values are encoded as zeros",
            stacklevel=3,
        )


def find_id(columns: Iterable[str]) -> str | None:
    """The first column that is called like an identifier, or None.

    >>> find_id(["age", "patient_id"]), find_id(["age", "paid"])
    ('patient_id', None)
    """
    for column in columns:
        name = column.lower().replace(" ", "_").replace("-", "_")
        if name in ID_NAMES or name.endswith("_id") or name.startswith("id_"):
            return column
    return None


# -- problems -------------------------------------------------------------------------------------


class Problems(ErrorCollector):
    """Errors of a dataset, collected to be raised together."""

    errors: list[Any]

    def add(self, error: KedgeError) -> None:
        """Add an error; missing values of one column are one error, whatever the file."""
        if isinstance(error, MissingValues):
            for i, other in enumerate(self.errors):
                if isinstance(other, MissingValues) and other.column == error.column:
                    self.errors[i] = other + error
                    return
        self.errors += error.errors if isinstance(error, SeveralDataErrors) else [error]

    def raise_all(self) -> None:
        """Raise the errors: a single one unchanged, several as SeveralDataErrors."""
        if len(self.errors) == 1:
            raise self.errors[0]
        missing = [e for e in self.errors if isinstance(e, MissingValues)]
        if len(missing) > 1:  # the advice once
            short = [DataError(e.short) if isinstance(e, MissingValues) else e for e in self.errors]
            advice = MissingValues.advice([e.column for e in missing])
            raise SeveralDataErrors(short, f"Missing values: {advice}")
        if self.errors:
            raise SeveralDataErrors(self.errors)


class MissingValues(DataError):
    """Missing values of one column, in one or several files; ``place`` is that of the first."""

    def __init__(self, column: str, place: str, cells: int, files: int = 1) -> None:
        self.column, self.place, self.cells, self.files = column, place, cells, files
        advice = self.advice([column]).replace("them", "it" if cells == 1 else "them")
        super().__init__(f"{self.short}; {advice}")

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


# -- fitting ---------------------------------------------------------------------------------------


class Profile(NamedTuple):
    """What a silo sends about a column."""

    cells: int  # without missing ones
    words: int  # cells that are words
    distinct: int  # different values
    values: frozenset[str]  # at most MAX_CATEGORIES + 1 of them
    formats: frozenset[str]  # formats that all values have, as dates


def profile(cells: ColumnCells) -> Profile:
    """The profile of a column of one silo."""
    values = cells.values()
    formats: Sequence[str] = DATE_FORMATS
    if cells.is_number.any():
        formats = ()
    elif values:
        formats = date_formats(tuple(values))
    return Profile(
        int((~cells.missing).sum()),
        int(cells.is_word.sum()),
        len(values),
        frozenset(sorted(values)[: MAX_CATEGORIES + 1]),
        frozenset(formats),
    )


def fit_column(silos: Sequence[ColumnCells], missing: str, problems: Problems) -> ColumnEncoding:
    """The encoding of a column of training rows.

    Args:
        silos: the cells of each silo.
        missing: what to do with missing values.
        problems: collects cells and columns that cannot be encoded.
    """
    name = silos[0].name
    unusable = ColumnEncoding(name, "words", fill=None if missing == "error" else ())
    if not any(bool(cells.is_word.any()) for cells in silos):
        return _filled(ColumnEncoding(name, "number"), silos, missing, problems)
    profiles = [profile(cells) for cells in silos]
    count, words = sum(p.cells for p in profiles), sum(p.words for p in profiles)
    values = frozenset().union(*(p.values for p in profiles))
    if values <= {*BOOLEANS, "0", "1"}:
        column = ColumnEncoding(name, "boolean")
    elif any(cells.has_comma.any() for cells in silos):
        for cells in silos:
            cells.check(cells.has_comma, COMMA, problems.add)
        return unusable
    elif words < count / 2:
        for cells in silos:
            what = "is not a number, as most of this column are; correct it"
            cells.check(cells.is_word, what, problems.add)
        return unusable
    elif all(p.formats for p in profiles):
        form = _date_format(silos, [p.formats for p in profiles], problems)
        column = ColumnEncoding(name, "date", format=form)
    else:
        distinct = max([len(values), *(p.distinct for p in profiles)])
        if distinct > MAX_CATEGORIES:
            least = "" if len(profiles) == 1 else "at least "
            what = (
                f"is not a number, and with {least}{distinct} different values the column is too "
                f"varied for one-hot (at most {MAX_CATEGORIES}); leave it out with "
                f"{typed('drop', name)}, or with {typed('id', name)} if it names the rows, or "
                f"replace its values by at most {MAX_CATEGORIES} groups"
            )
            first = next(cells for cells in silos if cells.is_word.any())
            if _mostly_dates(silos):
                mixed = [c for c, p in zip(silos, profiles, strict=True) if not p.formats]
                _report_no_dates(mixed, problems)
            else:
                problems.add(DataError(f"{first.first(first.is_word)} {what}"))
            return unusable
        column = ColumnEncoding(name, "words", words=tuple(sorted(values)))
        _warn_alike(silos, "words")
    return _filled(column, silos, missing, problems)


def _filled(
    column: ColumnEncoding, silos: Sequence[ColumnCells], missing: str, problems: Problems
) -> ColumnEncoding:
    """The encoding with what missing values become."""
    if all(bool(cells.missing.all()) for cells in silos):
        what = f"every value is missing; leave it out with {typed('drop', column.name)}"
        where = silos[0].table.where
        problems.add(DataError(f"{where}, column {column.name!r}: {what}"))
        return dataclasses.replace(column, fill=(0.0,))
    if missing not in ("mean", "median", "indicator"):
        return column
    fill = _fill(column, silos, missing)
    has_missing = any(bool(cells.missing.any()) for cells in silos)
    return dataclasses.replace(column, fill=fill, indicator=missing == "indicator" and has_missing)


def _fill(column: ColumnEncoding, silos: Sequence[ColumnCells], missing: str) -> tuple[float, ...]:
    """What a missing value becomes."""
    if column.kind == "words":
        known = [cells.positions(column.words) for cells in silos]
        shares = word_shares([codes[codes >= 0] for codes in known], len(column.words))
        if missing == "median":  # the most frequent word
            shares = (np.arange(len(shares)) == shares.argmax()).astype(np.float64)
        elif missing == "indicator":
            shares = np.zeros(len(shares))
        return tuple(float(v) for v in shares)
    values = [column.values(cells, lambda error: None) for cells in silos]
    present = [v[np.isfinite(v)] for v in values]
    if not any(map(len, present)):
        return (0.0,)
    statistic = median if missing == "median" else mean
    return (statistic(present),)


def _date_format(
    silos: Sequence[ColumnCells], formats: Sequence[frozenset[str]], problems: Problems
) -> str:
    """The format of the dates, or those of the silos if they differ.

    Dates with slashes have one order of day and month in all silos, or a problem.
    """
    pairs = [(c, f) for c, f in zip(silos, formats, strict=True) if c.is_word.any()]
    slashed = [(cells, own) for cells, own in pairs if own <= frozenset(SLASHED)]
    found = [f for f in DATE_FORMATS if f not in SLASHED and any(f in own for _, own in pairs)]
    if slashed:
        orders = [f for f in SLASHED if all(f in own for _, own in slashed)]
        if len(orders) != 1:
            what = "may have the day or the month first; write dates as 2024-03-31"
            if not orders:
                what = "has the month first, and other files the day; write dates as 2024-03-31"
            wrong = next((c for c, own in slashed if SLASHED[0] not in own), slashed[0][0])
            problems.add(DataError(f"{wrong.first(wrong.is_word)} {what}"))
        found.append((orders or SLASHED)[0])
    return "|".join(found)


def _mostly_dates(silos: Sequence[ColumnCells]) -> bool:
    """Whether most words are dates, of whatever format."""
    words = tuple(word for cells in silos for word in cells.words)
    known = np.any([~np.isnan(parse_days(words, f)) for f in DATE_FORMATS], axis=0)
    return bool(known.mean() > 0.5)


def _report_no_dates(silos: Sequence[ColumnCells], problems: Problems) -> None:
    """The cells of each file that do not have the format of most of its dates."""
    for cells in silos:
        wrong = min((np.isnan(parse_days(cells.words, f)) for f in DATE_FORMATS), key=np.sum)
        others = np.append(wrong, False)[cells.codes] | cells.is_number
        what = "is not a date like most of this column; write dates as 2024-03-31, or drop it: "
        problems.add(cells.error(others, what + typed("drop", cells.name)))


def _warn_alike(silos: Sequence[ColumnCells], what: str) -> None:
    """Warn about values that differ in upper and lower case alone, and say where they are."""
    places: dict[str, dict[str, str]] = {}  # of each value in lower case: its spellings
    for cells in silos:
        for value in cells.values():
            places.setdefault(value.casefold(), {}).setdefault(value, str(cells.table.where))
    found = [
        " and ".join(f"{value!r} ({where})" for value, where in spellings.items())
        for _, spellings in sorted(places.items())
        if len(spellings) > 1
    ]
    if found:
        warnings.warn(
            f"column {silos[0].name!r}: {', '.join(found)} count as different {what}; if they mean "
            "the same, spell them alike in all files",
            stacklevel=2,
        )


def fit_classes(silos: Sequence[ColumnCells], problems: Problems) -> tuple[str, ...]:
    """The sorted class names of the training rows. Each silo sends the set of its own."""
    names = frozenset().union(*(cells.values() for cells in silos))
    rows = sum(len(cells) for cells in silos)
    where = f"{silos[0].table.where}, column {silos[0].name!r}"
    values = {name: as_number(name) for name in names}
    numeric = {name: value for name, value in values.items() if value is not None}
    if len(numeric) == len(names):
        order = sorted(names, key=float)
        for cells in silos:
            huge = cells.is_number & ~(np.abs(cells.numbers) < 1e15)
            fraction = cells.is_number & (cells.numbers % 1 != 0)
            if huge.any():
                problems.add(cells.error(huge, "cannot be a class"))
            elif len(names) > MAX_CATEGORIES and fraction.any():
                what = f"is one of {len(names)} different numbers; to predict them, write "
                problems.add(DataError(f"{cells.first(fraction)} {what}task=regression"))
    else:
        order = sorted(names)
        _warn_alike(silos, "classes")
    if len(order) > max(MAX_CATEGORIES, rows / 2):
        problems.add(
            DataError(
                f"{where}: {len(order)} different labels in {rows} rows cannot be classes; name "
                "another label column, or write task=regression if these are numbers to predict"
            )
        )
    return tuple(order)


# -- statistics over silos, each from messages that a silo could send ----------------------------


def mean(silos: Sequence[Array]) -> float:
    """The mean of all values.

    Each silo sends the number of its values and their sum.

    >>> mean([np.array([1.0, 2.0]), np.array([6.0])])
    3.0
    """
    messages = [(len(values), float(values.sum(dtype=np.float64))) for values in silos]
    count = sum(n for n, _ in messages)
    return sum(total for _, total in messages) / count


def median(silos: Sequence[Array]) -> float:
    """The median of all values.

    Each silo sends the lowest and the highest of its values and, if there are at most
    1,000 distinct ones, how often each occurs. If all silos could do so, the median is exact.
    Otherwise each silo sends a second message: a histogram of 1,000 equal bins from the lowest to
    the highest value of all silos. The median is then the middle of its bin, so that it is off by
    at most (highest - lowest) / 2,000.

    >>> median([np.array([1.0, 2.0]), np.array([6.0, 7.0])])
    4.0
    """
    counted = [np.unique(values, return_counts=True) for values in silos if len(values)]
    if all(len(distinct) <= BINS for distinct, _ in counted):
        values, place = np.unique(np.concatenate([v for v, _ in counted]), return_inverse=True)
        return _middle(values, np.bincount(place, np.concatenate([n for _, n in counted])))
    low, high = min(v[0] for v, _ in counted), max(v[-1] for v, _ in counted)
    edges = np.linspace(low, high, BINS + 1)
    counts = np.sum([np.histogram(values, edges)[0] for values in silos], axis=0)
    return _middle((edges[:-1] + edges[1:]) / 2, counts)


def word_shares(silos: Sequence[Array], words: int) -> Array:
    """The share of each word, ``[words]``.

    Args:
        silos: for each silo the index of every word, ``[n_k]``.
        words: number of words.

    Each silo sends how often each word occurs.

    >>> word_shares([np.array([0, 0]), np.array([1, 0])], 2).tolist()
    [0.75, 0.25]
    """
    counts = sum(np.bincount(codes, minlength=words) for codes in silos)
    return np.asarray(counts / max(1, np.sum(counts)))


def _middle(values: Array, counts: Array) -> float:
    """The mean of the two middle values of sorted ``values`` that occur ``counts`` times."""
    ends = np.cumsum(counts)
    n = int(ends[-1])
    below, above = np.searchsorted(ends, [(n - 1) // 2, n // 2], side="right")
    return float((values[below] + values[above]) / 2)
