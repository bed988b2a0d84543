"""Tables: CSV files (also .gz), Parquet files and DataFrames, their columns and cells.

A cell has the same meaning wherever it comes from: ``1`` and ``1.0`` are the same number and the
same word, ``true`` is the word ``True``, and a date of a DataFrame is its ISO text.
"""

from __future__ import annotations

import csv
import datetime
import gzip
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kedge.data.datasets.formats import check_memory, reading
from kedge.errors import DataError
from kedge.limits import host_available

Array = np.ndarray

Report = Callable[[DataError], None]

MISSING_VALUES = {"", "nan", "-nan", "na", "n/a", "#n/a", "<na>", "null", "nat", "?"}
PARQUET = (".parquet", ".pq")
#: Bytes of memory per byte of a CSV file, at least: its content, its text and a copy of 4 bytes.
CSV_COPIES = 6
SHOWN_CHARACTERS = 60  # of a cell in a message
DECIMAL_COMMA = r"[+-]?(\d+|\d{1,3}(\.\d{3})+),\d+([eE][+-]?\d+)?"


@dataclass(frozen=True)
class DataTable:
    """A table and its place.

    Attributes:
        where: a path or another name, for messages.
        frame: a pandas DataFrame with the columns as given.
        source: text and delimiter of a CSV file; lines and cells are looked up in it only for
            messages.
    """

    where: object
    frame: Any
    source: tuple[str, str] | None = None

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self.frame.columns)

    def __len__(self) -> int:
        return len(self.frame)

    def place(self, row: int, column: str) -> str:
        """File, line (or row), column and cell, for messages."""
        if self.source is None:
            value = self.frame[column].iloc[row]
            cell = repr(value.item() if isinstance(value, np.generic) else value)
            place = f"row {row}"
        else:
            line, cells = self._raw[row]
            at = self.columns.index(column)
            cell = repr(cells[at].strip())
            place = f"line {line}"
        shown = cell if len(cell) <= SHOWN_CHARACTERS else cell[: SHOWN_CHARACTERS - 4] + "...'"
        return f"{self.where}, {place}, column {column!r}: {shown}"

    @cached_property
    def _raw(self) -> list[tuple[int, list[str]]]:
        assert self.source is not None
        return list(raw_rows(self.where, *self.source))[1:]


def read_table(path: Path) -> DataTable:
    """Read a .csv, .tsv or Parquet file; .gz is unpacked.

    The delimiter is the one of comma, semicolon and tab that splits the header into most columns.
    Where it is a semicolon, ``3,78`` is a number with a decimal comma, and ``1.203,5`` is 1203.5.

    Raises:
        DataError: the file is empty, not UTF-8, has rows of different length or bad column names,
            or Parquet is read without pyarrow.
    """
    if path.suffix.lower() in PARQUET:
        return _read_parquet(path)
    with reading(path, "a CSV file"):
        most = host_available() // CSV_COPIES
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise DataError(
                f"{path}: more than {most / 1e9:.1f} GB of text; with the memory that is free here "
                "no more can be read. Use less data, or a machine with more memory"
            )
    if not data.strip():
        raise DataError(f"{path}: the file is empty")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: not UTF-8 text; save the file as CSV UTF-8"
        ) from error
    header = (text.lstrip().splitlines() or [""])[0]
    delimiter = max(",;\t", key=lambda d: len(next(csv.reader([header], delimiter=d))))
    frame = _parse(path, text, delimiter)
    return DataTable(path, _with_points(frame) if delimiter == ";" else frame, (text, delimiter))


def _with_points(frame: Any) -> Any:
    """A copy with decimal points in place of decimal commas."""
    from pandas.api import types

    frame = frame.copy()
    for name in frame.columns:
        column = frame[name]
        if types.is_numeric_dtype(column.dtype):
            continue
        cells = column.astype("string")
        has_comma = cells.str.strip().str.fullmatch(DECIMAL_COMMA).fillna(False).astype(bool)
        if has_comma.any():
            points = cells.str.replace(".", "", regex=False).str.replace(",", ".", regex=False)
            frame[name] = column.astype(object).mask(has_comma, points.astype(object))
    return frame


def as_table(raw: Any) -> DataTable:
    """A path, a DataFrame, a mapping of columns or a sequence of rows as a table.

    Raises:
        DataError: it is none of these, or the file cannot be read.
    """
    import pandas as pd

    if isinstance(raw, str | Path):
        path = Path(raw).expanduser()
        if not path.exists():
            raise DataError(f"{path}: there is no such file")
        return read_table(path)
    if isinstance(raw, pd.DataFrame):
        return frame_table("the table", raw)
    is_rows = isinstance(raw, Sequence) and all(isinstance(row, Mapping) for row in raw)
    if isinstance(raw, Mapping) or (is_rows and raw):
        try:
            return frame_table("the table", pd.DataFrame(raw))
        except ValueError as error:
            raise DataError(f"these columns are no table: {error}") from error
    raise DataError(
        f"a table must be the path of a CSV or Parquet file, a DataFrame or a dict of columns, "
        f"not {type(raw).__name__}"
    )


def frame_table(where: object, frame: Any) -> DataTable:
    """A DataFrame as a table, with column names as text.

    Raises:
        DataError: there are no rows, or two columns of one name.
    """
    names = [str(name).lstrip("\ufeff").strip() for name in frame.columns]  # a BOM
    check_header(where, names, numbers=True)
    if not len(frame):
        raise DataError(f"{where}: only a header, no rows")
    return DataTable(where, frame.set_axis(names, axis=1))


def raw_rows(where: object, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Line and cells of every row of a CSV text, header first, without blank lines.

    Raises:
        DataError: a quote is not closed, or rows have different lengths.
    """
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    last_line = width = 0
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                width = width or len(cells)
                if len(cells) != width:
                    raise DataError(
                        f"{where}, line {last_line + 1}: {len(cells)} values, but the header has "
                        f"{width} columns"
                    )
                yield last_line + 1, cells
            last_line = reader.line_num
    except csv.Error as error:
        raise DataError(f"{where}, line {last_line + 1}: {error}") from error


def check_header(where: object, columns: Sequence[str], numbers: bool = False) -> None:
    """Raise a DataError unless all columns have names, all different, and not only numbers."""
    for i, name in enumerate(columns):
        if not name:
            raise DataError(
                f"{where}: column {i + 1} has no name in the header; if it is only a row number, "
                "delete it (pandas: to_csv(..., index=False))"
            )
        if name in columns[:i]:
            raise DataError(f"{where}: two columns are called {name!r}; rename one")
    if not numbers and all(as_number(name) is not None for name in columns):
        raise DataError(
            f"{where}: the first line is numbers; put a line with column names above it"
        )


def _parse(path: Path, text: str, delimiter: str) -> Any:
    """The DataFrame of a CSV text, by pandas; rows of commas alone are left out."""
    import pandas as pd

    _, header = next(raw_rows(path, text, delimiter), (0, []))
    names = [cell.strip() for cell in header]
    check_header(path, names)
    spellings = {s for v in MISSING_VALUES for s in (v, v.upper(), v.capitalize())} | {"NaN", "NaT"}
    try:
        frame = pd.read_csv(
            io.StringIO(text),
            sep=delimiter,
            keep_default_na=False,
            na_values=sorted(spellings),
            low_memory=False,
        )
    except Exception:  # noqa: BLE001 - pandas has several types; the message is ours
        frame = pd.DataFrame()
    good = len(frame.columns) == len(names) and isinstance(frame.index, pd.RangeIndex)
    if good:
        frame.columns = pd.Index(names)
    # pandas fills up short rows: they, and rows of commas alone, lack the last value
    if not good or frame[names[-1]].isna().any():
        rows = [cells for _, cells in raw_rows(path, text, delimiter)][1:]
        if not good or len(frame) != len(rows):
            frame = pd.DataFrame(rows, columns=names, dtype=object)
    if not len(frame):
        raise DataError(f"{path}: only a header, no rows")
    return frame


def _read_parquet(path: Path) -> DataTable:
    import pandas as pd

    try:
        with reading(path, "a Parquet file"):
            from pyarrow import parquet

            head = parquet.read_metadata(path)
            check_memory(path, 8 * head.num_rows * head.num_columns)  # repeated values take none
            frame = pd.read_parquet(path)
    except DataError as error:
        if isinstance(error.__cause__, ImportError):
            raise DataError(
                f"{path}: Parquet needs the package pyarrow: pip install 'kedge[parquet]'"
            ) from error
        raise
    return frame_table(path, frame.reset_index(drop=True))


# -- cells -----------------------------------------------------------------------------------------


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

    @property
    def has_comma(self) -> Array:
        """Which cells are numbers with a decimal comma, bool ``[n]``."""
        commas = [
            w.count(",") == 1 and as_number(w.replace(",", ".")) is not None for w in self.words
        ]
        return np.array([*commas, False])[self.codes]  # code -1: the last

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
        more = f" (and {wrong.sum() - 1} more in this column)" if wrong.sum() > 1 else ""
        return DataError(f"{self.first(wrong)} {what}{more}")

    def first(self, wrong: Array) -> str:
        """File, line, column and text of the first cell of a mask."""
        return self.table.place(int(self.rows[wrong.argmax()]), self.name)


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
