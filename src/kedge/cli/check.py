"""The command ``check``: parts against laws, and against identities from their papers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from kedge.cli.options import LOAD, load_files
from kedge.cli.screen import console, dim, plain_table
from kedge.errors import KedgeError
from kedge.loading import load_file

if TYPE_CHECKING:
    from kedge.check import Report


def check(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="parts, or a FILE.py that registers some; all if none"),
    ] = None,
    load: LOAD = None,
) -> None:
    """Check parts against the laws and against identities from their papers. Exit code 1 if one
    fails."""
    from kedge.check import check_part
    from kedge.core.part import parts

    load_files(load)
    chosen = [n for name in names or ["fedavg", *parts] for n in part_names(name)]
    reports = []
    for name in chosen:
        report = check_part(name)
        reports.append(report)
        console.print(check_table(report), highlight=False)
        console.print()
    failed = [r.part for r in reports if not r.ok]
    passed = sum(f.holds is True for r in reports for f in r.findings)
    if failed:
        console.print(Text(f"{', '.join(failed)}: not right", "bold red"))
        raise typer.Exit(1)
    console.print(Text(f"{passed} laws and identities hold for {', '.join(chosen)}", "green"))
    bare = [r.part for r in reports if not any(f.kind == "identity" for f in r.findings)]
    if bare:
        dim(
            f"{', '.join(bare)}: no identity yet, so the laws do not know its equation; work out a "
            "small case by hand and register it with @kedge.oracle"
        )


def part_names(name: str) -> list[str]:
    """A part's name, or the names of the parts that a file registers."""
    if not name.endswith(".py"):
        return [name]
    names = load_file(name).names("part")
    if not names:
        raise KedgeError(f"{name} registers no part; put @kedge.register above its class")
    return names


def check_table(report: Report) -> Table:
    """The laws and identities of a part, one row each."""
    table = plain_table(report.part, "", "detail")
    table.columns[0].no_wrap = False
    marks = {True: Text("ok", "green"), False: Text("FAILS", "bold red"), None: Text("-", "dim")}
    for found in report.findings:
        table.add_row(Text(f"{found.kind} {found.name}"), marks[found.holds], Text(found.detail))
    return table
