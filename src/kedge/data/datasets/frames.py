"""DataFrames, one per client, as a dataset."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kedge.data.datasets.dataset import Dataset, Pair, assemble
from kedge.data.datasets.table_encoding import Problems
from kedge.data.datasets.table_files import Table, frame_table
from kedge.data.datasets.table_fit import Missing
from kedge.data.datasets.tables import Columns, encode
from kedge.errors import DataError
from kedge.schema import Option


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
    named = clients if isinstance(clients, Mapping) else dict(_numbered(clients))
    problems = Problems()
    tables = _tables(named, problems, "")
    tests: Mapping[str, Any] = {}
    if test is not None:
        tests = test if isinstance(test, Mapping) else {"": test}
        if isinstance(test, Mapping) and set(test) != set(named):
            raise DataError("test must be one DataFrame, or one for each client of the same name")
    test_tables = _tables(tests, problems, "test data of " if len(tests) > 1 else "test data")
    if not tables:
        problems.raise_all()
        raise DataError("there are no clients; give one DataFrame per client")
    given = [*tables.values(), *test_tables.values()]
    trains = [True] * len(tables) + [False] * len(test_tables)
    result = encode(given, trains, label, task, drop, missing, id, problems)
    names = [str(name) for name in tables]
    sources: list[dict[str, Pair]] = [{"train": p} for p in result.pairs[: len(names)]]
    test_pairs = dict(zip(test_tables, result.pairs[len(names) :], strict=True))
    if isinstance(test, Mapping):
        for source, name in zip(sources, tables, strict=True):
            source["test"] = test_pairs[name]
    dataset = assemble("frames", names, result.read_result(sources), tuple(names))
    if test is not None and not isinstance(test, Mapping):
        x_test, y_test = test_pairs[""]
        dataset = dataclasses.replace(dataset, x_test=x_test, y_test=y_test)
    return dataset


def _numbered(clients: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(f"client {k}", frame) for k, frame in enumerate(clients)]


def _tables(frames: Mapping[str, Any], problems: Problems, prefix: str) -> dict[str, Table]:
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
