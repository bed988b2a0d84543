"""What one takes away from a report: all records as CSV, and what the page shows as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from kedge.csv_text import csv_lines
from kedge.report.page.facts import as_json
from kedge.report.page.source import Source
from kedge.runs.targets import write_target

#: The columns of the CSV file: one row per run, seed, round and number.
COLUMNS = ("run", "method", "seed", "round", "what", "of", "value")


def rows(sources: Sequence[Source]) -> Iterator[tuple[Any, ...]]:
    """All records in the long format: one row per number, as plotting libraries take it.

    ``of`` is the class or client of a list, otherwise empty.
    """
    for source in sources:
        for seed in source.seeds:
            names = _names(source, seed)
            for record in seed.records:
                start = (source.name, source.method, seed.number, record["round"])
                for what, of, value in _numbers(record, names):
                    yield (*start, what, of, value)


def _names(source: Source, seed: Any) -> dict[str, list[str]]:
    """The names of the entries of lists, where they are known."""
    clients = seed.clients
    if clients is None:
        return {}
    found = {"per_client": clients.names, "per_personal": clients.names}
    return found | ({"per_class": clients.classes} if clients.classes else {})


def _numbers(
    record: Mapping[str, Any], names: Mapping[str, list[str]]
) -> Iterator[tuple[str, str, Any]]:
    for key, value in record.items():
        if key == "round":
            continue
        if isinstance(value, dict):
            for name, inner in value.items():
                if _is_number(inner):
                    yield f"{key}.{name}", "", inner
        elif isinstance(value, list):
            own = names.get(key, [])
            for i, inner in enumerate(value):
                if _is_number(inner):
                    yield key, own[i] if i < len(own) else str(i), inner
        elif _is_number(value):
            yield key, "", value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def write_csv(sources: Sequence[Source], path: str | Path) -> Path:
    """Write all records in the long format.

    Raises:
        KedgeError: the file cannot be written.
    """
    target, table = Path(path), chain([COLUMNS], rows(sources))
    write_target(target, (line.encode() for line in csv_lines(table)))
    return target


def write_json(facts: Mapping[str, Any], path: str | Path) -> Path:
    """Write everything that the page shows.

    Raises:
        KedgeError: the file cannot be written.
    """
    target = Path(path)
    text = json.dumps(as_json(facts), allow_nan=False, ensure_ascii=False, indent=1)
    write_target(target, f"{text}\n".encode())
    return target
