"""Tables as datasets: CSV and Parquet files, and DataFrames. All of one have the same encoding."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from kedge.core.task import tasks
from kedge.data.datasets.arrays import check_task
from kedge.data.datasets.dataset import (
    SPLITS,
    Array,
    Dataset,
    Pair,
    ReadResult,
    TaskOption,
    assemble,
)
from kedge.data.datasets.formats import DataReader, Peek, entries, readers, reading, suffix_of
from kedge.data.datasets.tables.encoding import (
    Missing,
    Problems,
    TableEncoding,
    complete_rows,
    find_id,
    fit_classes,
    fit_column,
    numbers,
    typed,
    warn_unknown,
)
from kedge.data.datasets.tables.files import (
    PARQUET,
    ColumnCells,
    DataTable,
    frame_table,
    read_cells,
    read_table,
)
from kedge.errors import DataError, nearest
from kedge.schema import Doc, Option

LABEL_NAMES = ("label", "target", "class", "y")

Columns = str | tuple[str, ...]
DropOption = Annotated[Columns, Doc("columns to leave out: drop=[chol,visit]")]
MissingOption = Annotated[
    Missing, Doc("missing values: mean, median, indicator (mean and a mark) or drop (the rows)")
]
MISSING_LABEL = (
    "is a missing value; labels are never filled in: correct it, or leave out such rows with "
    "missing=drop"
)

MAX_LINE = 2**24  # bytes of a line that are counted as one


@readers.register("csv")
@dataclass(frozen=True)
class Tables(DataReader):
    """Tables in CSV (.csv, .tsv, also .gz) or Parquet files.

    Numbers stay, true and false become 1 and 0, columns of a few words become one-hot, and dates
    become days since 1970 with sine and cosine of the time of year. Columns may be in any order.
    Means, medians and words are those of all rows outside test files, summed over files. Several
    labels are for multilabel or regression. A path may also be a folder with train.csv and
    optionally test.csv and val.csv.
    """

    label: Annotated[Columns | None, Doc("column with the label, or several: label=sick")] = None
    task: TaskOption = None
    drop: DropOption = ()
    missing: MissingOption = "error"
    id: Annotated[str | None, Doc("column that names the rows, no input: id=patient")] = None
    test: Annotated[str | None, Doc("a file to test on, for all silos: test='new.csv'")] = None

    suffixes = (".csv", ".tsv", ".csv.gz", ".tsv.gz", *PARQUET)
    precedence = 1
    examples = (
        ("patients.csv(label=sick)", "the label is the column sick"),
        ("patients.csv(label=dose, task=regression)", "predict a number"),
        ("patients.csv(drop=[chol,visit])", "leave out two columns"),
        ("patients.csv(missing=median)", "fill in missing values; or mean, indicator, drop"),
        ("patients.csv(id=patient)", "the column names the rows in predictions"),
        ("patients.csv.gz(test='new.csv')", "test on a second file"),
        ("hospitals(label=sick, missing=mean)", "a folder with one file per client"),
    )

    @classmethod
    def detect(cls, path: Path) -> bool:
        names = {p.name.lower() for p in entries(path) if p.is_file()} if path.is_dir() else set()
        return super().detect(path) or any(f"train{suffix}" in names for suffix in cls.suffixes)

    @classmethod
    def peek(cls, path: Path) -> Peek:
        return None, {split: _count_rows(file) for split, file in cls._files(path).items()}

    @classmethod
    def _files(cls, path: Path) -> dict[str, Path]:
        """The file of each split."""
        if not path.is_dir():
            return {"train": path}
        names = {(s, end): path / f"{s}{end}" for s in SPLITS for end in cls.suffixes}
        found = {s: file for (s, _), file in names.items() if file.is_file()}
        if "train" not in found:
            raise DataError(f"{path}: there is no train.csv in this folder")
        return found

    def read(self, paths: Sequence[Path], limit: int | None = None) -> ReadResult:
        problems = Problems()
        tables: dict[Path, DataTable] = {}
        files: list[tuple[int | None, str, Path]] = [
            (i, s, f) for i, path in enumerate(paths) for s, f in self._files(path).items()
        ]
        if self.test is not None:  # of all paths together, in place of their own
            files = [(i, s, f) for i, s, f in files if s != "test"]
            files.append((None, "test", Path(self.test).expanduser()))
        for file in dict.fromkeys(file for *_, file in files):
            with problems.collect():
                tables[file] = read_table(file)
        good = [PlacedTable(i, split, tables[f]) for i, split, f in files if f in tables]
        if not any(table.is_train for table in good):
            problems.raise_all()
        return self.encode(good, len(paths), problems)

    def encode(
        self, tables: Sequence[PlacedTable], paths: int, problems: Problems | None = None
    ) -> ReadResult:
        """Fit an encoding on the tables of training rows and encode all of them.

        Args:
            tables: the tables, at least one with training rows.
            paths: number of paths.
            problems: errors found before, which are raised with those of this call.

        Raises:
            DataError: columns are missing or ambiguous, or cells cannot be encoded; lists all of
                them.
        """
        check_task(self.task)
        problems = problems or Problems()
        with problems.collect():
            result, encoding, inputs = self._encode(tables, paths, problems)
        problems.raise_all()
        warn_unknown(encoding, inputs)
        return result

    def _encode(
        self, tables: Sequence[PlacedTable], paths: int, problems: Problems
    ) -> tuple[ReadResult, TableEncoding, list[list[ColumnCells]]]:
        """What was read, its encoding and the cells of the inputs of each table; good only if there
        are no problems."""
        train = next(own.table for own in tables if own.is_train)
        every = list(dict.fromkeys(c for own in tables for c in own.table.columns))
        asked = [self.drop] if isinstance(self.drop, str) else [str(c) for c in self.drop]
        dropped = [*asked, *([self.id] if self.id else [])]
        labels: list[str] = []
        wrong_names = Problems()
        with wrong_names.collect():
            labels = label_columns(train.where, train.columns, self.label)
        for name in dropped:
            with wrong_names.collect():
                find_column(train.where, every, name)
        wrong_names.raise_all()
        columns = [c for c in train.columns if c not in dropped]
        features = [c for c in columns if c not in labels]
        if not features:
            raise DataError(
                f"{train.where}: no column is left to learn from beside {', '.join(labels)}"
            )
        kept = [t for t in tables if _same_columns(t.table, train, columns, dropped, problems)]
        cells = [_read(own.table, [*features, *labels], self.missing, problems) for own in kept]
        fitted = [c for c, own in zip(cells, kept, strict=True) if own.is_train]
        encoded = tuple(
            fit_column([c[i] for c in fitted], self.missing, problems) for i in range(len(features))
        )
        y, task, outputs, classes = _labels(
            [c[len(features) :] for c in cells], [t.is_train for t in kept], self.task, problems
        )
        names = self.id or find_id(dropped)
        encoding = TableEncoding(encoded, tuple(labels), tasks[task].one_class, self.missing, names)
        inputs = [c[: len(features)] for c in cells]
        pairs = zip([encoding.blocks(c, problems) for c in inputs], y, strict=True)
        sources: list[dict[str, Pair]] = [{} for _ in range(paths)]
        common: dict[str, Pair] = {}
        for own, pair in zip(kept, pairs, strict=True):
            (common if own.path is None else sources[own.path])[own.split] = pair
        result = ReadResult(sources, task, outputs, classes, encoding.names, encoding)
        return result._replace(common_test=common.get("test")), encoding, inputs


class PlacedTable(NamedTuple):
    """A table and its place in a dataset."""

    path: int | None  # its number; None: of all paths together
    split: str
    table: DataTable

    @property
    def is_train(self) -> bool:
        """Whether it holds training rows."""
        return self.split == "train"


def _count_rows(path: Path) -> int:
    suffix = suffix_of(path)
    if suffix in PARQUET:
        return len(read_table(path))
    open_file = gzip.open if suffix.endswith(".gz") else open
    with reading(path, "a CSV file"), open_file(path, "rb") as file:
        lines = iter(partial(file.readline, MAX_LINE), b"")
        return max(0, sum(1 for line in lines if line.strip()) - 1)


def _read(
    table: DataTable, columns: Sequence[str], missing: str, problems: Problems
) -> list[ColumnCells]:
    cells = [read_cells(table, name) for name in columns]
    if missing != "drop":
        return cells
    keep = complete_rows(cells)
    if not keep.any():
        problems.add(DataError(f"{table.where}: every row has a missing value; drop columns"))
        return cells
    return [c.take(keep) for c in cells]


def _labels(
    tables: Sequence[Sequence[ColumnCells]],
    trains: Sequence[bool],
    task: str | None,
    problems: Problems,
) -> tuple[list[Array], str, int, tuple[str, ...] | None]:
    """The labels of each table, the task, the number of outputs and the class names."""
    count = len(tables[0])
    if task is None:
        task = "classification" if count == 1 else "multilabel"
    kind = tasks[task]
    for cells in (c for columns in tables for c in columns):
        cells.check(cells.missing, MISSING_LABEL, problems.add)
    if kind.one_class:
        if count > 1:
            raise DataError(f"task={task} needs one label column, not several")
        fitted = [c[0] for c, is_train in zip(tables, trains, strict=True) if is_train]
        classes = fit_classes(fitted, problems)
        codes = [columns[0].positions(classes) for columns in tables]
        for columns, y in zip(tables, codes, strict=True):
            unseen = (y < 0) & ~columns[0].missing
            columns[0].check(unseen, "is a label that no training row has", problems.add)
        return codes, task, len(classes), classes
    ys = []
    for columns in tables:
        for cells in columns:
            for wrong, text in kind.faults(cells.numbers):
                cells.check(wrong & cells.is_number, text, problems.add)
        values = [numbers(cells, problems.add) for cells in columns]
        ys.append(np.stack(values, axis=1).astype(np.float32))
    names = tuple(c.name for c in tables[0]) if kind.has_classes else None
    return ys, task, count, names


def _same_columns(
    table: DataTable,
    first: DataTable,
    columns: Sequence[str],
    dropped: Sequence[str],
    problems: Problems,
) -> bool:
    """Whether a table has these columns and no others; a problem if not."""
    lacks = [c for c in columns if c not in table.columns]
    extra = [c for c in table.columns if c not in columns and c not in dropped]
    if lacks or extra:
        what = f"no column {', '.join(map(repr, lacks))}"
        if not lacks:
            what = f"a column {', '.join(map(repr, extra))}"
        wrong = lacks or extra
        option = typed("drop", wrong[0] if len(wrong) == 1 else wrong)
        advice = f"{'add it, or ' if lacks else ''}leave it out with {option}"
        alike = [(c, near[0]) for c in lacks if (near := nearest(c, extra))]
        if alike:
            pairs = ", ".join(f"{own!r} is {name!r}" for name, own in alike)
            advice = f"if {pairs}, use one name in all files; otherwise {advice}"
        same = f"unlike {first.where}; columns must be the same"
        problems.add(DataError(f"{table.where} has {what}, {same}: {advice}"))
    return not lacks


def label_columns(path: object, columns: list[str], label: Columns | None) -> list[str]:
    """The label columns: those that are named, or the only one that is called like a label.

    Raises:
        DataError: there is no such column, or none or several could be the label.
    """
    if label is not None:
        labels = label if isinstance(label, tuple | list) else (label,)
        return [find_column(path, columns, str(c)) for c in labels]
    guesses = [c for c in columns if c.lower() in LABEL_NAMES]
    if len(guesses) == 1:
        return guesses
    what = "several columns could be the label" if guesses else "no column is called label"
    raise DataError(
        f"{path}: {what}. Write which it is, for example label={(guesses or columns[-1:])[0]!r}; "
        f"the columns are: {', '.join(guesses or columns)}"
    )


def find_column(path: object, columns: list[str], name: str) -> str:
    """The name of a column; a DataError if there is none of that name."""
    if name in columns:
        return name
    near = nearest(name, columns)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise DataError(f"{path}: no column {name!r}.{hint} The columns are: {', '.join(columns)}")


# -- DataFrames -----------------------------------------------------------------------------------


def dataset_of_frames(
    clients: Mapping[str, Any] | Sequence[Any],
    label: Columns | None = None,
    *,
    task: str | None = None,
    drop: Columns = (),
    missing: Missing = "error",
    id: str | None = None,
    test: Any = None,
) -> Dataset:
    """A dataset of one pandas DataFrame per client, encoded as tables in files are.

    Args:
        clients: a DataFrame for each name of a client, or a list of DataFrames, named "client 0"
            and so on.
        label: the label column, or several; guessed if None, as for CSV files.
        task: name of the task; guessed if None.
        drop: columns to leave out.
        missing: ``error``, ``mean``, ``median``, ``indicator`` or ``drop``.
        id: a column that names the rows and is no input.
        test: a DataFrame to test on, or one for each client.

    Returns:
        The dataset, whose silos are the clients.

    Raises:
        DataError: columns or cells cannot be used; lists all of them, with client and row.

    >>> import pandas as pd
    >>> north = pd.DataFrame({"age": [50, 60], "sick": ["yes", "no"]})
    >>> south = pd.DataFrame({"sick": ["no", "no"], "age": [70, 80]})
    >>> dataset = dataset_of_frames({"north": north, "south": south}, label="sick")
    >>> dataset.describe(), dataset.group_names
    ('frames: 1 columns, 2 classes, 4 train, 2 silos', ('north', 'south'))
    """
    missing = Option("missing", Missing).check(missing)
    if not isinstance(clients, Mapping):
        clients = {f"client {k}": frame for k, frame in enumerate(clients)}
    problems = Problems()
    tables = _frame_tables(clients, problems, "")
    tests: Mapping[str, Any] = {}
    if test is not None:
        tests = test if isinstance(test, Mapping) else {"": test}
        if isinstance(test, Mapping) and set(test) != set(clients):
            raise DataError("test must be one DataFrame, or one for each client of the same name")
    test_tables = _frame_tables(tests, problems, "test data of " if len(tests) > 1 else "test data")
    if not tables:
        problems.raise_all()
        raise DataError("there are no clients; give one DataFrame per client")
    places = {name: i for i, name in enumerate(clients)}
    tested = places if isinstance(test, Mapping) else {}  # a common test set has no place
    given = [PlacedTable(places[name], "train", table) for name, table in tables.items()]
    given += [PlacedTable(tested.get(k), "test", table) for k, table in test_tables.items()]
    found = Tables(label, task, drop, missing, id).encode(given, len(clients), problems)
    names = [str(name) for name in clients]
    return assemble("frames", names, found, tuple(names))


def _frame_tables(
    frames: Mapping[str, Any], problems: Problems, prefix: str
) -> dict[str, DataTable]:
    import pandas as pd

    tables = {}
    for name, frame in frames.items():
        where = f"{prefix}{name}"
        if not isinstance(frame, pd.DataFrame):
            problems.add(DataError(f"{where}: {type(frame).__name__} is no pandas DataFrame"))
            continue
        with problems.collect():
            tables[name] = frame_table(where, frame)
    return tables
