"""CSV and Parquet files with a label column. All files of a dataset get the same encoding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np

from kedge.core.task import tasks
from kedge.data.datasets.cells import Cells, read_cells
from kedge.data.datasets.checks import check_task
from kedge.data.datasets.column_encoding import numbers, typed
from kedge.data.datasets.dataset import SPLITS, Array, Pair, ReadResult, TaskOption
from kedge.data.datasets.find import TABLES
from kedge.data.datasets.table_encoding import (
    Problems,
    TableEncoding,
    complete_rows,
    find_id,
    warn_unknown,
)
from kedge.data.datasets.table_files import Table, read_table
from kedge.data.datasets.table_fit import Missing, fit_classes, fit_column
from kedge.errors import DataError, nearest
from kedge.schema import Doc

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


def read_csv(
    paths: Sequence[Path],
    *,
    label: Annotated[Columns | None, Doc("column with the label, or several: label=sick")] = None,
    task: TaskOption = None,
    drop: DropOption = (),
    missing: MissingOption = "error",
    id: Annotated[str | None, Doc("column that names the rows, no input: id=patient")] = None,
    test: Annotated[str | None, Doc("a file to test on, for all silos: test='new.csv'")] = None,
) -> ReadResult:
    """Tables in CSV (.csv, .tsv, also .gz) or Parquet files.

    Numbers stay, true and false become 1 and 0, columns of a few words become one-hot, and dates
    become days since 1970 with sine and cosine of the time of year. Columns may be in any order.
    Means, medians and words are those of all rows outside test files, summed over files. Several
    labels are for multilabel or regression. A path may also be a folder with train.csv and
    optionally test.csv and val.csv.
    """
    problems = Problems()
    tables: dict[Path, Table | None] = {}
    files: list[tuple[int | None, str, Path]] = [
        (i, s, f) for i, path in enumerate(paths) for s, f in csv_files(path).items()
    ]
    if test is not None:  # of all paths together, in place of their own
        files = [(i, s, f) for i, s, f in files if s != "test"]
        files.append((None, "test", Path(test).expanduser()))
    for _, _, file in files:
        if file not in tables:
            tables[file] = None
            with problems.collect():
                tables[file] = read_table(file)
    readable = [(i, split, tables[f]) for i, split, f in files]
    good = [(i, split, table) for i, split, table in readable if table is not None]
    if not any(split == "train" for _, split, _ in good):
        problems.raise_all()
    result = encode(
        [t for *_, t in good], [s == "train" for _, s, _ in good], label, task, drop, missing,
        id, problems,
    )  # fmt: skip
    sources: list[dict[str, Pair]] = [{} for _ in paths]
    common = None
    for (i, split, _), pair in zip(good, result.pairs, strict=True):
        if i is None:
            common = pair
        else:
            sources[i][split] = pair
    return result.read_result(sources)._replace(common_test=common)


def csv_files(path: Path) -> dict[str, Path]:
    """The file of each split."""
    if not path.is_dir():
        return {"train": path}
    names = {(s, end): path / f"{s}{end}" for s in SPLITS for end in TABLES}
    found = {s: file for (s, _), file in names.items() if file.is_file()}
    if "train" not in found:
        raise DataError(f"{path}: there is no train.csv in this folder")
    return found


class EncodedTables(NamedTuple):
    """Tables of one encoding."""

    pairs: list[Pair]  # inputs [n, F] and labels of each table
    task: str
    outputs: int
    classes: tuple[str, ...] | None
    encoding: TableEncoding

    def read_result(self, sources: Sequence[dict[str, Pair]]) -> ReadResult:
        """What a reader returns; ``sources`` are the pairs by path and split."""
        names = self.encoding.names
        return ReadResult(sources, self.task, self.outputs, self.classes, names, self.encoding)


def encode(
    tables: Sequence[Table],
    trains: Sequence[bool],
    label: Columns | None,
    task: str | None,
    drop: Columns = (),
    missing: Missing = "error",
    id: str | None = None,
    problems: Problems | None = None,
) -> EncodedTables:
    """Fit an encoding on the tables of training rows and encode all of them.

    Args:
        tables: the tables, at least one with training rows.
        trains: for each table, whether it holds training rows.
        label: the label column or columns; guessed if None.
        task: name of the task; inferred if None.
        drop: columns to leave out.
        missing: what to do with missing values.
        id: a column that names rows and is no input.
        problems: errors found before, which are raised with those of this call.

    Raises:
        DataError: columns are missing or ambiguous, or cells cannot be encoded; lists all of them.
    """
    check_task(task)
    problems = problems or Problems()
    with problems.collect():
        result, inputs = _encode(tables, trains, label, task, drop, missing, id, problems)
    problems.raise_all()
    warn_unknown(result.encoding, inputs)
    return result


def _encode(
    tables: Sequence[Table],
    trains: Sequence[bool],
    label: Columns | None,
    task: str | None,
    drop: Columns,
    missing: Missing,
    id_column: str | None,
    problems: Problems,
) -> tuple[EncodedTables, list[list[Cells]]]:
    """The encoded tables and the cells of their inputs, good only if there are no problems."""
    train = tables[list(trains).index(True)]
    every = list(dict.fromkeys(c for table in tables for c in table.columns))
    asked = [drop] if isinstance(drop, str) else [str(c) for c in drop]
    dropped = [*asked, *([id_column] if id_column else [])]
    labels: list[str] = []
    wrong_names = Problems()
    with wrong_names.collect():
        labels = _label_columns(train.where, train.columns, label)
    for name in dropped:
        with wrong_names.collect():
            _find(train.where, every, name)
    wrong_names.raise_all()
    columns = [c for c in train.columns if c not in dropped]
    features = [c for c in columns if c not in labels]
    if not features:
        raise DataError(
            f"{train.where}: no column is left to learn from beside {', '.join(labels)}"
        )
    usable = [_same_columns(table, train, columns, dropped, problems) for table in tables]
    kept = [(t, is_train) for t, is_train, ok in zip(tables, trains, usable, strict=True) if ok]
    cells = [_read(table, [*features, *labels], missing, problems) for table, _ in kept]
    fitted = [c for c, (_, is_train) in zip(cells, kept, strict=True) if is_train]
    encoded = tuple(
        fit_column([c[i] for c in fitted], missing, problems) for i in range(len(features))
    )
    y, task, outputs, classes = _labels(
        [c[len(features) :] for c in cells], [t for _, t in kept], task, problems
    )
    names = id_column or find_id(dropped)
    encoding = TableEncoding(encoded, tuple(labels), tasks[task].one_class, missing, names)
    inputs = [c[: len(features)] for c in cells]
    x = [encoding.blocks(c, problems) for c in inputs]
    pairs = list(zip(x, y, strict=True))
    return EncodedTables(pairs, task, outputs, classes, encoding), inputs


def _read(table: Table, columns: Sequence[str], missing: str, problems: Problems) -> list[Cells]:
    cells = [read_cells(table, name) for name in columns]
    if missing != "drop":
        return cells
    keep = complete_rows(cells)
    if not keep.any():
        problems.add(DataError(f"{table.where}: every row has a missing value; drop columns"))
        return cells
    return [c.take(keep) for c in cells]


def _labels(
    tables: Sequence[Sequence[Cells]], trains: Sequence[bool], task: str | None, problems: Problems
) -> tuple[list[Array], str, int, tuple[str, ...] | None]:
    """The labels of each table, the task, the number of outputs and the class names."""
    count = len(tables[0])
    if task is None:
        task = "classification" if count == 1 else "multilabel"
    kind = tasks[task]
    for cells in (c for columns in tables for c in columns):
        if cells.missing.any():
            problems.add(cells.error(cells.missing, MISSING_LABEL))
    if kind.one_class:
        if count > 1:
            raise DataError(f"task={task} needs one label column, not several")
        fitted = [c[0] for c, is_train in zip(tables, trains, strict=True) if is_train]
        classes = fit_classes(fitted, problems)
        codes = [columns[0].positions(classes) for columns in tables]
        for columns, y in zip(tables, codes, strict=True):
            unseen = (y < 0) & ~columns[0].missing
            if unseen.any():
                problems.add(columns[0].error(unseen, "is a label that no training row has"))
        return codes, task, len(classes), classes
    ys = []
    for columns in tables:
        for cells in columns:
            for wrong, text in kind.faults(cells.numbers):
                wrong = wrong & cells.is_number
                if wrong.any():
                    problems.add(cells.error(wrong, text))
        values = [numbers(cells, problems.add) for cells in columns]
        ys.append(np.stack(values, axis=1).astype(np.float32))
    names = tuple(c.name for c in tables[0]) if kind.has_classes else None
    return ys, task, count, names


def _same_columns(
    table: Table, first: Table, columns: Sequence[str], dropped: Sequence[str], problems: Problems
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


def _label_columns(path: object, columns: list[str], label: Columns | None) -> list[str]:
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
