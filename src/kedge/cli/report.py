"""The command ``report``, and the report at the end of commands that train."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kedge.cli.options import LOAD, load_files
from kedge.cli.screen import dim, warn

if TYPE_CHECKING:
    from kedge.reproduction.command import Reproduction

NAME = "report.html"
NO_REPORT = Annotated[
    bool, typer.Option("--no-report", help=f"do not write {NAME} into the folder")
]


def report(
    runs: Annotated[
        list[str],
        typer.Argument(help="folders of runs, comparisons, sweeps or results of reproduce"),
    ],
    *,
    out: Annotated[
        str | None,
        typer.Option("-o", "--out", metavar="FILE.html", help=f"default: {NAME} in the folder"),
    ] = None,
    csv: Annotated[
        str | None, typer.Option(metavar="FILE", help="also all records, one row per number")
    ] = None,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="also everything that the page shows")
    ] = None,
    figures: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="also figures for a paper: SVG and PDF, 3.3 in wide"),
    ] = None,
    title: Annotated[str, typer.Option(help="heading of the page")] = "",
    load: LOAD = None,
) -> None:
    """Write a page about runs: who wins and how sure that is, curves, classes, clients, settings.

    kedge report runs/digits-compare-1
    kedge report runs/digits-fedavg-1 runs/digits-scaffold-1 -o report.html
    kedge report runs/digits-compare-1 --figures figures/ --csv records.csv
    """
    from kedge.api.report import write_report

    load_files(load)
    target = Path(out) if out else (Path(runs[0]) / NAME if len(runs) == 1 else Path(NAME))
    for path in write_report(runs, target, csv=csv, json=json, figures=figures, title=title):
        dim(str(path))


def after_training(folder: Path | None, skip: bool) -> None:
    """Write the report of a folder and print its path. Whatever goes wrong is a warning: the
    training has succeeded."""
    if skip or folder is None:
        return
    from kedge.report.page import report as write

    try:
        dim(f"report: {write(folder, folder / NAME)}")
    except Exception as error:  # noqa: BLE001
        again = f"kedge report {shlex.quote(str(folder))}"
        warn(f"the report could not be written ({error}). To write it: {again}")


def after_reproduction(found: list[Reproduction], folder: Path, skip: bool) -> None:
    """The same for the results of ``reproduce``."""
    if skip or not any(one.records for one in found):
        return
    from kedge.reproduction.page import write_reproduction

    try:
        dim(f"report: {write_reproduction(found, folder / NAME)}")
    except Exception as error:  # noqa: BLE001
        again = f"kedge report {shlex.quote(str(folder))}"
        warn(f"the report could not be written ({error}). To write it: {again}")
