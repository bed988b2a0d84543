"""CSV files with a label column. All files of a dataset get the same encoding."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np

from kedge.core.task import tasks
from kedge.data.datasets.checks import check_task, reading
from kedge.data.datasets.columns import Column, class_column, feature_column, number_column
from kedge.data.datasets.dataset import SPLITS, Array, ReadResult, TaskOption
from kedge.data.datasets.find import TABLES
from kedge.errors import DataError, nearest
from kedge.schema import Doc

LABEL_NAMES = ("label", "target", "class", "y")

Columns = str | tuple[str, ...]


class Table(NamedTuple):
    """The cells of one file as text."""

    path: object
    columns: list[str]
    rows: list[list[str]]
    lines: list[int]  # line in the file of each row


def read_csv(
    paths: Sequence[Path],
    *,
    label: Annotated[Columns | None, Doc("column with the label, or several")] = None,
    task: TaskOption = None,
    drop: Annotated[Columns, Doc("columns to leave out")] = (),
    test: Annotated[str | None, Doc("a second file, to test on")] = None,
) -> ReadResult:
    """CSV tables: number columns stay, columns of a few words become one-hot.

    Several labels are for multilabel or regression. A path may also be a folder with train.csv and
    optionally test.csv and val.csv.
    """
    files = [(i, s, f) for i, path in enumerate(paths) for s, f in csv_files(path, test).items()]
    tables = [read_table(file) for _, _, file in files]
    trains = [split == "train" for _, split, _ in files]
    pairs, task, outputs, classes, columns = encode(tables, trains, label, task, drop)
    sources: list[dict[str, tuple[Array, Array]]] = [{} for _ in paths]
    for (i, split, _), pair in zip(files, pairs, strict=True):
        sources[i][split] = pair
    return ReadResult(sources, task, outputs, classes, columns)


def csv_files(path: Path, test: str | None = None) -> dict[str, Path]:
    """The file of each split."""
    if not path.is_dir():
        found = {"train": path}
    else:
        names = {(s, end): path / f"{s}{end}" for s in SPLITS for end in TABLES}
        found = {s: file for (s, _), file in names.items() if file.is_file()}
        if "train" not in found:
            raise DataError(f"{path}: there is no train.csv in this folder")
    return found | ({"test": Path(test).expanduser()} if test is not None else {})


def read_table(path: Path) -> Table:
    """Read the cells as stripped text.

    The delimiter is the one of comma, semicolon and tab that splits the header into most columns.

    Raises:
        DataError: the file is empty, not UTF-8, or has rows of different length.
    """
    with reading(path, "a CSV file"):
        data = path.read_bytes()
    if not data.strip():
        raise DataError(f"{path}: the file is empty")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: not UTF-8 text; save the file as CSV UTF-8"
        ) from error
    header = text.lstrip().split("\n", 1)[0]
    delimiter = max(",;\t", key=lambda d: len(next(csv.reader([header], delimiter=d))))
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows, lines, last_line = [], [], 0
    try:
        for row in reader:
            if any(cell.strip() for cell in row):
                rows.append([cell.strip() for cell in row])
                lines.append(last_line + 1)
            last_line = reader.line_num
    except csv.Error as error:
        raise DataError(f"{path}, line {last_line + 1}: {error}") from error
    columns = rows[0]
    _check_header(path, columns)
    if len(rows) == 1:
        raise DataError(f"{path}: only a header, no rows")
    for row, line in zip(rows, lines, strict=True):
        if len(row) != len(columns):
            raise DataError(
                f"{path}, line {line}: {len(row)} values, but the header has {len(columns)} columns"
            )
    return Table(path, columns, rows[1:], lines[1:])


def encode(
    tables: Sequence[Table],
    trains: Sequence[bool],
    label: str | tuple[str, ...] | None,
    task: str | None,
    drop: str | tuple[str, ...] = (),
) -> tuple[list[tuple[Array, Array]], str, int, tuple[str, ...] | None, tuple[str, ...]]:
    """Encode tables of the same columns.

    Args:
        tables: the tables.
        trains: for each table, whether it holds training rows.
        label: the label column or columns; guessed if None.
        task: name of the task; inferred if None.
        drop: columns to leave out.

    Returns:
        Inputs ``[n, F]`` and labels of each table, the task, the number of outputs, the class names
        and the F column names.

    Raises:
        DataError: a column is missing, ambiguous, or cannot be encoded.
    """
    check_task(task)
    columns = _common_columns(tables)
    path = tables[0].path
    labels = _label_columns(path, columns, label)
    dropped = [_find(path, columns, str(c)) for c in ((drop,) if isinstance(drop, str) else drop)]
    places = [(t.path, line) for t in tables for line in t.lines]
    train = np.repeat(trains, [len(t.rows) for t in tables])
    named = {}
    for name in columns:
        positions = [t.columns.index(name) for t in tables]
        cells = [row[i] for t, i in zip(tables, positions, strict=True) for row in t.rows]
        named[name] = Column(name, cells, places)
    encoded = [feature_column(named[c]) for c in columns if c not in (*labels, *dropped)]
    if not encoded:
        raise DataError(f"{path}: no column is left to learn from beside {', '.join(labels)}")
    x = np.concatenate([block for block, _ in encoded], axis=1)
    names = tuple(name for _, block in encoded for name in block)
    y, task, outputs, classes = _labels([named[c] for c in labels], task, train)
    cuts = np.cumsum([len(t.rows) for t in tables])[:-1]
    return (
        list(zip(np.split(x, cuts), np.split(y, cuts), strict=True)),
        task,
        outputs,
        classes,
        names,
    )


def _labels(
    columns: list[Column], task: str | None, train: Array
) -> tuple[Array, str, int, tuple[str, ...] | None]:
    if task is None:
        task = "classification" if len(columns) == 1 else "multilabel"
    kind = tasks[task]
    if kind.one_class:
        if len(columns) > 1:
            raise DataError(f"task={task} needs one label column, not several")
        y, classes = class_column(columns[0], train)
        return y, task, len(classes), classes
    y = np.stack([number_column(c) for c in columns], axis=1)
    for i, column in enumerate(columns):
        for wrong, text in kind.faults(y[:, i]):
            if wrong.any():
                raise column.error(int(np.flatnonzero(wrong)[0]), text)
    names = tuple(c.name for c in columns) if kind.has_classes else None
    return y, task, len(columns), names


def _common_columns(tables: Sequence[Table]) -> list[str]:
    first = tables[0]
    for table in tables[1:]:
        missing = [c for c in first.columns if c not in table.columns]
        extra = [c for c in table.columns if c not in first.columns]
        if missing or extra:
            what = f"no column {missing[0]!r}" if missing else f"a column {extra[0]!r}"
            raise DataError(
                f"{table.path} has {what}, unlike {first.path}; columns must be the same"
            )
    return first.columns


def _label_columns(
    path: object, columns: list[str], label: str | tuple[str, ...] | None
) -> list[str]:
    if label is not None:
        labels = label if isinstance(label, tuple | list) else (label,)
        return [_find(path, columns, str(c)) for c in labels]
    guesses = [c for c in columns if c.lower() in LABEL_NAMES]
    if len(guesses) == 1:
        return guesses
    what = "several columns could be the label" if guesses else "no column is called label"
    raise DataError(
        f"{path}: {what}. Write which it is, for example label={(guesses or columns[-1:])[0]!r}; "
        f"the columns are: {', '.join(guesses or columns)}"
    )


def _find(path: object, columns: list[str], name: str) -> str:
    if name in columns:
        return name
    near = nearest(name, columns)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise DataError(f"{path}: no column {name!r}.{hint} The columns are: {', '.join(columns)}")


def _check_header(path: object, columns: list[str]) -> None:
    for i, name in enumerate(columns):
        if not name:
            raise DataError(
                f"{path}: column {i + 1} has no name in the header; if it is only a row number, "
                "delete it (pandas: to_csv(..., index=False))"
            )
        if name in columns[:i]:
            raise DataError(f"{path}: two columns are called {name!r}; rename one")
    if all(_is_number(name) for name in columns):
        raise DataError(f"{path}: the first line is numbers; put a line with column names above it")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
