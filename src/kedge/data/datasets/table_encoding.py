"""The encoding of tables: raw columns in any order to the columns of the training data."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kedge.data.datasets.cells import Cells, read_cells
from kedge.data.datasets.column_encoding import ColumnEncoding, MissingValues, numbers
from kedge.data.datasets.table_files import Table, as_table
from kedge.data.encoding import Encoding, Samples, encodings
from kedge.errors import DataError, SeveralDataErrors, nearest

Array = np.ndarray
ID_NAMES = (
    "id",
    "ids",
    "patientid",
    "key",
    "name",
    "patient",
    "subject",
    "case",
    "record",
    "sample",
)


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

    def blocks(self, cells: Sequence[Cells], problems: Problems) -> Array:
        """The encoded columns side by side, float32 ``[n, F]``."""
        columns = zip(self.columns, cells, strict=True)
        return np.concatenate([column.encode(c, problems.add) for column, c in columns], axis=1)

    def require(self, table: Table) -> None:
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

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TableEncoding:
        def column(entry: Mapping[str, Any]) -> ColumnEncoding:
            fields: dict[str, Any] = {**entry, "words": tuple(entry["words"])}
            fields["fill"] = None if entry["fill"] is None else tuple(entry["fill"])
            return ColumnEncoding(**fields)

        columns = tuple(column(entry) for entry in values["columns"])
        return cls(**{**values, "columns": columns, "labels": tuple(values["labels"])})

    def _kept(self, cells: Sequence[Cells], table: Table) -> Array:
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

    def _ids(self, table: Table) -> list[str]:
        used = {*(c.name for c in self.columns), *self.labels}
        name = self.id or find_id(c for c in table.columns if c not in used)
        if name is not None and name in table.columns:
            texts = read_cells(table, name).texts()
            return [str(i) if word is None else word for i, word in enumerate(texts)]
        return [str(i) for i in table.frame.index]

    def _labels(self, table: Table, keep: Array, problems: Problems) -> Array | None:
        if not self.labels or any(name not in table.columns for name in self.labels):
            return None
        cells = [read_cells(table, name).take(keep) for name in self.labels]
        if all(c.missing.all() for c in cells):
            return None
        if self.classes:
            return cells[0].texts()
        values = np.stack([numbers(c, problems.add) for c in cells], axis=1)
        return values[:, 0] if len(cells) == 1 else values


class Problems:
    """Errors of a dataset, collected to be raised together."""

    def __init__(self) -> None:
        self.errors: list[DataError] = []

    def add(self, error: DataError) -> None:
        """Add an error; missing values of one column are one error, whatever the file."""
        if isinstance(error, MissingValues):
            for i, other in enumerate(self.errors):
                if isinstance(other, MissingValues) and other.column == error.column:
                    self.errors[i] = other + error
                    return
        self.errors += error.errors if isinstance(error, SeveralDataErrors) else [error]

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Add a DataError of the block."""
        try:
            yield
        except DataError as error:
            self.add(error)

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


def complete_rows(cells: Iterable[Cells]) -> Array:
    """Which rows have no missing value in any of the columns, bool ``[n]``."""
    return ~np.any([c.missing for c in cells], axis=0)


def warn_unknown(encoding: TableEncoding, tables: Sequence[Sequence[Cells]]) -> None:
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
