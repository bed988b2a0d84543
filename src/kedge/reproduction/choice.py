"""Choose a setting of a row on validation data: short runs of one seed, equal for all rows."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

from kedge.errors import DataError
from kedge.files import finite, make_folder, write_file
from kedge.history.experiment import kind_of
from kedge.history.folder import read_own_json
from kedge.reproduction.records import RUNS
from kedge.reproduction.table import PaperRow, PaperTable
from kedge.runs.grid import Setting
from kedge.runs.train import PLAIN, Options, experiment, setting_jobs
from kedge.settings import Config


def choice_path(results: Path, table: PaperTable, row: PaperRow) -> Path:
    home, name = row.home
    return results / home / f"{name}.choice.{table.scale}.json"


def read_choice(results: Path, table: PaperTable, row: PaperRow) -> dict[str, Any] | None:
    """The setting that was chosen for a row, e.g. ``{"lr": 0.1}``; None if there is no choice yet,
    or if it was made among other values or for another method."""
    path, choose = choice_path(results, table, row), table.choose
    if choose is None or not path.is_file():
        return None
    try:
        found = read_own_json(path, "delete it")
    except DataError:
        return None
    wanted = [choose.key, list(choose.values), choose.rounds, choose.seed, row.method]
    if not isinstance(found, dict):
        return None
    if [found.get(key) for key in ("key", "values", "rounds", "seed", "method")] != wanted:
        return None
    return {choose.key: found["chosen"]} if found.get("chosen") in choose.values else None


def read_choices(results: Path, table: PaperTable) -> dict[str, dict[str, Any]]:
    """What was chosen for each row of a table; empty where nothing was."""
    return {row.name: read_choice(results, table, row) or {} for row in table.rows}


def choose_value(
    results: Path,
    table: PaperTable,
    row: PaperRow,
    config: Config,
    options: Options = PLAIN,
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
    is_begun = bool(kind_of(folder))
    found = experiment("sweep", setting_jobs(settings), folder, is_begun, options).results
    scores = [r.validation.mean if r.validation else math.nan for r in found]
    sign = 1.0 if found[0].higher_is_better else -1.0
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
        "device": found[0].device,
        "date": time.strftime("%Y-%m-%d"),
    }
    path = choice_path(results, table, row)
    try:
        make_folder(path.parent, inside=results)
        text = json.dumps(finite(written), indent=1)
        write_file(path, f"{text}\n".encode(), inside=results)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from None
    return {choose.key: choose.values[best]}
