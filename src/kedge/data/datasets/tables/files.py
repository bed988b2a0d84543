"""Tables: CSV files (also .gz), Parquet files and DataFrames, and where their cells are."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kedge.data.datasets.formats import check_memory, reading
from kedge.data.datasets.tables.cells import MISSING_VALUES, as_number
from kedge.errors import DataError
from kedge.limits import host_available

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

    def error(self, row: int, column: str, what: str) -> DataError:
        """A DataError that names file, line (or row), column and cell."""
        return DataError(f"{self.place(row, column)} {what}")

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
        return raw_rows(self.where, *self.source)[1:]


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
        has_comma = column.astype("string").str.strip().str.fullmatch(DECIMAL_COMMA).fillna(False)
        if has_comma.any():
            cells = column[has_comma].astype("string").str.replace(".", "", regex=False)
            column = column.astype(object)
            column[has_comma] = cells.str.replace(",", ".", regex=False).astype(object)
            frame[name] = column
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


def raw_rows(where: object, text: str, delimiter: str) -> list[tuple[int, list[str]]]:
    """Line and cells of every row of a CSV text, header first, without blank lines.

    Raises:
        DataError: a quote is not closed, or rows have different lengths.
    """
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows: list[tuple[int, list[str]]] = []
    last_line = 0
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                if rows and len(cells) != len(rows[0][1]):
                    raise DataError(
                        f"{where}, line {last_line + 1}: {len(cells)} values, but the header has "
                        f"{len(rows[0][1])} columns"
                    )
                rows.append((last_line + 1, cells))
            last_line = reader.line_num
    except csv.Error as error:
        raise DataError(f"{where}, line {last_line + 1}: {error}") from error
    return rows


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

    names = _header(path, text, delimiter)
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
        return _parse_slowly(path, text, delimiter)
    if len(frame.columns) != len(names) or not isinstance(frame.index, pd.RangeIndex):
        return _parse_slowly(path, text, delimiter)
    if not len(frame):
        raise DataError(f"{path}: only a header, no rows")
    frame.columns = pd.Index(names)
    # pandas fills up short rows: they, and rows of commas alone, lack the last value
    is_short = frame[names[-1]].isna().any()
    return _parse_slowly(path, text, delimiter, frame) if is_short else frame


def _parse_slowly(path: Path, text: str, delimiter: str, frame: Any = None) -> Any:
    """Check every row, and use ``frame`` if it has as many."""
    import pandas as pd

    (_, header), *rows = raw_rows(path, text, delimiter)
    if not rows:
        raise DataError(f"{path}: only a header, no rows")
    if frame is not None and len(frame) == len(rows):
        return frame
    return pd.DataFrame(
        [cells for _, cells in rows], columns=[name.strip() for name in header], dtype=object
    )


def _header(path: Path, text: str, delimiter: str) -> list[str]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        first = next(itertools.filterfalse(_is_blank, reader), [])
    except csv.Error as error:
        raise DataError(f"{path}, line 1: {error}") from error
    return [cell.strip() for cell in first]


def _is_blank(cells: list[str]) -> bool:
    return not any(cell.strip() for cell in cells)


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
