"""The command ``diagnose``: sheets of findings, in the terminal or as JSON."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kedge.cli.options import JSON, LOAD, load_files
from kedge.cli.screen import console, dim
from kedge.errors import FieldError

if TYPE_CHECKING:
    from kedge.history.sheet import Sheet


def diagnose(
    subject: Annotated[
        str, typer.Argument(metavar="DATA|RUN", help="data as for run --data, or a run's folder")
    ],
    *,
    what: Annotated[
        str | None,
        typer.Option(
            help="data, training, privacy, or several: data,training. Of data: data; of a run: "
            "data,training"
        ),
    ] = None,
    partition: Annotated[
        str | None, typer.Option(help="of data: a partition, see: kedge list partitions")
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(help="of data: number of clients; one per silo, or 20, if left out"),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="of data: where test data come from, as for run")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="seed of the partition, or one of the run's seeds")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(help="of data: samples whose features are compared, at most (20000)"),
    ] = None,
    rounds: Annotated[
        str | None,
        typer.Option(help="of a run: rounds to diagnose, such as 1,10; others are replayed"),
    ] = None,
    client: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="of a run: the client whose privacy is diagnosed, else the largest"
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", "-o", metavar="FILE.html", help="write a page with tables and charts"
        ),
    ] = None,
    as_json: JSON = False,
    load: LOAD = None,
) -> None:
    """Measure how unlike clients are, or what training made of it, with a verdict in words.

    kedge diagnose digits --partition "dirichlet(0.1)" --clients 10
    kedge diagnose "hospitals(label=sick)"                    a folder with a file per client
    kedge diagnose runs/digits-1 --what training --rounds 1,10 -o digits.html
    """
    from kedge.api.diagnosing import diagnose as measure
    from kedge.files import check_target
    from kedge.report.page import write_sheets

    load_files(load)
    target = check_target(out, True, ".html") if out else None
    sheets = measure(
        subject,
        what,
        partition=partition,
        clients=clients,
        split=split,
        seed=seed,
        samples=samples,
        rounds=_numbers(rounds),
        client=client,
        report=None if as_json else dim,
    )
    if as_json:
        typer.echo(json.dumps({"sheets": [sheet.to_dict() for sheet in sheets]}))
        if target is not None:
            write_sheets(sheets, target, _title(subject, sheets))
        return
    from kedge.cli.sheets import print_sheet

    for i, sheet in enumerate(sheets):
        if i:
            console.print()
        print_sheet(sheet)
    if target is not None:  # last, so that a full disk does not keep the findings from being read
        write_sheets(sheets, target, _title(subject, sheets))
        dim(f"wrote {target}")
    _next(subject, sheets)


def _title(subject: str, sheets: list[Sheet]) -> str:
    return sheets[0].title if len(sheets) == 1 else f"Diagnosis of {subject}"


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(piece) for piece in text.split(",")]
    except ValueError:
        raise FieldError(f"--rounds {text} is not a list of numbers, such as 1,10,50") from None


def _next(subject: str, sheets: list[Sheet]) -> None:
    """What to type next: of data the methods to compare, of a run its report."""
    from kedge.api.diagnosing import is_run
    from kedge.cli.next_steps import show

    if is_run(subject):
        names = ", ".join(dict.fromkeys(sheet.name for sheet in sheets))
        single = (Path(subject) / "config.toml").is_file()
        if not os.access(subject, os.W_OK):
            return
        dim(f"kept in {Path(subject) / ('' if single else '*') / 'diagnosis'}: {names}")
        show([f"kedge report {shlex.quote(subject)}"])
        return
    [sheet] = sheets
    options = sheet.command.removeprefix("kedge diagnose ")
    show([f"kedge compare {' '.join(sheet.values['methods'])} --data {options}"])
