"""Choose a setting of a row on validation data: short runs of one seed, equal for all rows."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

from kedge.engines import Execution
from kedge.errors import DataError
from kedge.files import make_folder, write_file
from kedge.reproduction.records import RUNS
from kedge.reproduction.table import Row, Table
from kedge.runs.config import Config
from kedge.runs.grid import Setting
from kedge.runs.result import plain
from kedge.runs.runner import Report
from kedge.runs.saved import read_json
from kedge.runs.sweep import LISTING, Watch, sweep


def choice_path(results: Path, table: Table, row: Row) -> Path:
    home, name = row.home
    return results / home / f"{name}.choice.{table.scale}.json"


def read_choice(results: Path, table: Table, row: Row) -> dict[str, Any] | None:
    """The setting that was chosen for a row, e.g. ``{"lr": 0.1}``; None if there is no choice yet,
    or if it was made among other values or for another method."""
    path, choose = choice_path(results, table, row), table.choose
    if choose is None or not path.is_file():
        return None
    try:
        found = read_json(path, "delete it")
    except DataError:
        return None
    wanted = [choose.key, list(choose.values), choose.rounds, choose.seed, row.method]
    if not isinstance(found, dict):
        return None
    if [found.get(key) for key in ("key", "values", "rounds", "seed", "method")] != wanted:
        return None
    return {choose.key: found["chosen"]} if found.get("chosen") in choose.values else None


def read_choices(results: Path, table: Table) -> dict[str, dict[str, Any]]:
    """What was chosen for each row of a table; empty where nothing was."""
    return {row.name: read_choice(results, table, row) or {} for row in table.rows}


def choose_value(
    results: Path,
    table: Table,
    row: Row,
    config: Config,
    watch: Watch | None = None,
    report: Report | None = None,
    execution: Execution | None = None,
) -> dict[str, Any]:
    """Train with each value, and choose the best one on validation data; it is recorded.

    Raises:
        KedgeError: the settings do not fit the data.
        Interrupted: the user pressed Ctrl-C, or ``watch`` requested a stop.
    """
    choose = table.choose
    assert choose is not None
    short = dataclasses.replace(config, rounds=choose.rounds, validation=choose.validation)
    settings = [
        Setting({choose.key: value}, dataclasses.replace(short, **{choose.key: value}))
        for value in choose.values
    ]
    folder = results / RUNS / row.home[0] / f"{row.home[1]}.choice.{table.scale}"
    found = sweep(
        settings, folder, (folder / LISTING).is_file(), watch, report, execution=execution
    )
    scores = [r.validation.mean if r.validation else math.nan for r in found.results]
    sign = 1.0 if found.results[0].higher_is_better else -1.0
    best = max(range(len(scores)), key=lambda i: (not math.isnan(scores[i]), sign * scores[i]))
    written = {
        "recipe": table.name,
        "row": row.name,
        "scale": table.scale,
        "method": row.method,
        "key": choose.key,
        "values": list(choose.values),
        "validation": scores,
        "chosen": choose.values[best],
        "seed": choose.seed,
        "rounds": choose.rounds,
        "share": choose.validation,
        "device": found.results[0].device,
        "date": time.strftime("%Y-%m-%d"),
    }
    path = choice_path(results, table, row)
    try:
        make_folder(path.parent, inside=results)
        text = json.dumps(plain(written), indent=1)
        write_file(path, f"{text}\n".encode(), inside=results)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from None
    return {choose.key: choose.values[best]}
