"""Export a report: all records as CSV, and what the page shows as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from kedge.csv_text import csv_lines
from kedge.files import encoded, write_target
from kedge.history.run import Run, Seed
from kedge.report.page import as_json

#: The columns of the CSV file: one row per run, seed, round and number.
COLUMNS = ("run", "method", "seed", "round", "what", "of", "value")


def rows(runs: Sequence[Run]) -> Iterator[tuple[Any, ...]]:
    """All records in the long format: one row per number, as plotting libraries take it.

    ``of`` is the class or client of a list, otherwise empty.
    """
    for run in runs:
        for seed in run.seeds:
            names, columns = _names(seed), seed.columns
            numbers = {name: columns.by_round(name) for name in columns.named}
            for round in columns.rounds:
                start = (run.name, run.method, seed.number, round)
                for what, values in numbers.items():
                    if math.isfinite(values.get(round, math.nan)):
                        yield (*start, what, "", values[round])
                for what, lists in columns.lists.items():
                    own = names.get(what, [])
                    for i, value in enumerate(lists.get(round, [])):
                        if value is not None and math.isfinite(value):
                            yield (*start, what, own[i] if i < len(own) else str(i), value)


def _names(seed: Seed) -> dict[str, list[str]]:
    """The names of the entries of lists, where they are known."""
    clients = seed.clients
    if clients is None:
        return {}
    found = {"per_client": clients.names, "per_personal": clients.names}
    return found | ({"per_class": clients.classes} if clients.classes else {})


def write_csv(runs: Sequence[Run], path: str | Path) -> Path:
    """Write all records in the long format.

    Raises:
        KedgeError: the file cannot be written.
    """
    target, table = Path(path), chain([COLUMNS], rows(runs))
    write_target(target, (encoded(line) for line in csv_lines(table)))
    return target


def write_json(facts: Mapping[str, Any], path: str | Path) -> Path:
    """Write everything that the page shows.

    Raises:
        KedgeError: the file cannot be written.
    """
    target = Path(path)
    text = json.dumps(as_json(facts), allow_nan=False, ensure_ascii=False, indent=1)
    write_target(target, encoded(f"{text}\n"))
    return target
