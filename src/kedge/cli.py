"""The command ``kedge``. Commands are typed functions that call the library; no logic lives
here."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

import kedge
from kedge import display
from kedge.check import check_part
from kedge.core.part import parts
from kedge.errors import KedgeError, UnknownName

app = typer.Typer(
    help="Federated learning on heterogeneous data.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"kedge {kedge.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Federated learning on heterogeneous data."""


@app.command("list")
def list_parts(
    pattern: Annotated[str, typer.Argument(help="part of a name, or a pattern such as fed*")] = "*",
) -> None:
    """List the parts that methods are made of. A method is a sum: scaffold+fedprox(mu=0.1)."""
    if not parts.match(pattern):
        raise UnknownName("part", pattern, parts, see="kedge list")
    console.print(display.methods_table(pattern))
    console.print(
        "\nP: parameters of the model, H: of its head, E: of the part itself; fedavg is the method "
        "without parts.\nMore about one: kedge show NAME",
        style="dim",
        highlight=False,
    )


@app.command()
def show(name: Annotated[str, typer.Argument(help="name of a part")]) -> None:
    """Show a part: equation, reference, fields, presets, what it sends and keeps."""
    console.print(display.part_page(name), highlight=False)


@app.command()
def check(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="parts, or a FILE.py that registers some; all if none"),
    ] = None,
) -> None:
    """Check parts against the laws and against identities from their papers. Exit code 1 if one
    fails."""
    wanted = [n for name in names or ["fedavg", *parts] for n in _named(name)]
    reports = []
    for name in wanted:
        report = check_part(name)
        reports.append(report)
        console.print(display.check_table(report), highlight=False)
        console.print()
    failed = [r.part for r in reports if not r.ok]
    held = sum(f.holds is True for r in reports for f in r.findings)
    if failed:
        console.print(Text(f"{', '.join(failed)}: not right", "bold red"))
        raise typer.Exit(1)
    console.print(Text(f"{held} laws and identities hold for {', '.join(wanted)}", "green"))


def _named(name: str) -> list[str]:
    """A part's name, or the names of the parts that a file registers."""
    if not name.endswith(".py"):
        return [name]
    if not Path(name).is_file():
        raise KedgeError(
            f"there is no file {name!r}; give a part's name or a file that registers one"
        )
    before = set(parts)
    runpy.run_path(name, run_name="kedge_user_parts")
    added = [n for n in parts if n not in before]
    if not added:
        raise KedgeError(f"{name} registers no part; put @kedge.register above its class")
    return added


def main() -> None:
    """Run the command; what a user got wrong ends in one line, not in a traceback."""
    try:
        app()
    except KedgeError as error:
        Console(stderr=True).print(Text("error: ", "bold red") + Text(str(error)), soft_wrap=True)
        sys.exit(2)
