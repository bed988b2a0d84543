"""Compare methods on the same partitions, cohorts and initial weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kedge.data.datasets import Dataset, load
from kedge.engines.device import resolve_device
from kedge.errors import Interrupted
from kedge.files import check_links
from kedge.runs.config import Config
from kedge.runs.environment import CONFIG
from kedge.runs.folder import Folder, new_path
from kedge.runs.headline import like_with_like, split_of, with_personal
from kedge.runs.listing import Listing, settings_row
from kedge.runs.observing import Observe
from kedge.runs.planning import PLANNING
from kedge.runs.result import Result
from kedge.runs.runner import Report, run, simulation, slug

LISTING = "compare.json"
POOLED = "pooled data"
TYPES: dict[str, type] = {"name": str, "yardstick": str}
Watch = Callable[[str, int, dict[str, Any]], None]  # (name, seed, record of a round)


class Row(NamedTuple):
    """One row of a comparison: a method, or a yardstick."""

    name: str
    config: Config
    yardstick: str = ""


def rows_of(configs: Sequence[Config], pooled: bool = False) -> list[Row]:
    """One row per configuration; with ``pooled``, also one that trains on the pooled data.

    The pooled data are those of all clients that train, with the same initial weights, optimiser
    and tests. A round takes as many samples as the clients of a round take together.
    """
    rows = [Row(config.method, config) for config in configs]
    if pooled:
        plain = dataclasses.replace(configs[0], method="fedavg")
        rows.append(Row(POOLED, plain, POOLED))
    return rows


def saved_rows(out: str | Path) -> list[Row]:
    """The rows of the comparison in a folder.

    Raises:
        KedgeError: the folder holds no comparison, or its files are damaged.
    """
    listing = _listing(out)
    return [Row(row["name"], listing.config(row), row["yardstick"]) for row in listing.read(TYPES)]


def _listing(out: str | Path, renumber: Callable[[], Path] | None = None) -> Listing:
    return Listing(out, LISTING, "comparison", renumber)


def compare(
    rows: Sequence[Row],
    out: str | Path | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    report: Report | None = None,
    numbered: bool = False,
    observe: Observe | None = None,
) -> list[Result]:
    """Run several methods on the same partitions, cohorts and initial weights.

    All of them are built once before the first one trains, so that a mistake shows at once.

    Args:
        rows: the methods and yardsticks, with settings that are equal but for the method.
        out: folder with one subfolder per row; None saves nothing.
        resume: continue the runs in ``out``; those that are missing are started.
        watch: called as ``watch(name, seed, record)`` after every round.
        report: called with each line of the plans.
        numbered: whether ``out`` is from :func:`~kedge.runs.folder.new_path`.
        observe: makes the observer of each run, such as its loggers.
    """
    dataset = load(rows[0].config.data)
    rows = _alike(rows, dataset)
    first = rows[0].config
    if out is None:
        _check(rows, dataset)
        results = [_run(row, None, False, watch, report, dataset, observe) for row in rows]
        return like_with_like(results)
    renumber = (lambda: new_path(first, Path(out).parent, "compare")) if numbered else None
    listing = _listing(out, renumber)
    if resume:
        check_links(listing.root)
    known = listing.read(TYPES) if resume and listing.path.exists() else []
    if not resume:
        listing.check_free()
    folders = [slug(row.name) for row in rows]
    started = [resume and (listing.root / f / CONFIG).exists() for f in folders]
    for row, name, is_started in zip(rows, folders, started, strict=True):
        if is_started:
            Folder.resume(listing.root / name, row.config)  # raises if the settings differ
        else:
            Folder.create(listing.root / name, row.config)
    _check([row for row, is_started in zip(rows, started, strict=True) if not is_started], dataset)
    own = [
        {"folder": folder, "name": row.name, "yardstick": row.yardstick} | settings_row(row.config)
        for row, folder in zip(rows, folders, strict=True)
    ]
    listing.write([*(row for row in known if row["folder"] not in folders), *own], resume)
    with listing.given_back():
        results = [
            _run(row, listing.root / name, is_started, watch, report, dataset, observe)
            for row, name, is_started in zip(rows, folders, started, strict=True)
        ]
    return like_with_like(results)


def _alike(rows: Sequence[Row], dataset: Dataset) -> list[Row]:
    """The rows with the same tests: if one method is personal, all are tested client by client.

    A yardstick has no personal models, but is tested on the same samples.
    """
    configs = with_personal([row.config for row in rows])
    alike = []
    for row, config in zip(rows, configs, strict=True):
        if row.yardstick:
            split = split_of(configs[0], dataset)
            config = dataclasses.replace(config, split=split, personal=False)
        alike.append(row._replace(config=config))
    return alike


def _run(
    row: Row,
    path: Path | None,
    resume: bool,
    watch: Watch | None,
    report: Report | None,
    dataset: Dataset,
    observe: Observe | None,
) -> Result:
    watch_one = None if watch is None else (lambda seed, record: watch(row.name, seed, record))
    try:
        return run(
            row.config, path, resume, watch_one, dataset, report, False, row.yardstick, observe
        )
    except Interrupted as error:  # the comparison is resumed, not this run alone
        whole = "" if path is None else str(path.parent)
        raise Interrupted(str(error).replace(f"--out {path} ", f"--out {whole} ")) from None


def _check(rows: Sequence[Row], dataset: Dataset) -> None:
    """Build the first seed of every row, and raise what is wrong with it."""
    for row in rows:
        device, seed = resolve_device(row.config.device), row.config.seeds[0]
        simulation(row.config, dataset, seed, device, PLANNING, pooled=bool(row.yardstick))
