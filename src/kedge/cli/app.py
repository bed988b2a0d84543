"""The command ``kedge``: which commands there are, and what happens to errors.

A command lives in a module that is imported when the command is called, since most of them need
torch: ``kedge --help`` and ``kedge --version`` answer without it.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand

from kedge._version import __version__
from kedge.cli.screen import console as console
from kedge.cli.screen import errors
from kedge.errors import Interrupted, KedgeError

app = typer.Typer(
    help="Federated learning on heterogeneous data.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Entry(NamedTuple):
    """Where a command is, and its line in ``kedge --help``: its docstring's first paragraph."""

    function: str  # module:name
    panel: str
    help: str


COMMANDS = {
    "run": Entry(
        "kedge.cli.run:run",
        "Run",
        "Train with one method. Works without any argument: digits, 20 clients, 3 seeds.",
    ),
    "compare": Entry(
        "kedge.cli.run:compare",
        "Run",
        "Compare methods on the same partitions, cohorts and first weights.",
    ),
    "sweep": Entry(
        "kedge.cli.run:sweep",
        "Run",
        "Run all combinations of some settings; those that differ in numbers train side by side.",
    ),
    "demo": Entry(
        "kedge.cli.run:demo",
        "Run",
        "Compare a few methods on digits, draw the curves and the partition. No network needed.",
    ),
    "data": Entry(
        "kedge.cli.look:data",
        "Look",
        "List the datasets that are here, and those that could be.",
    ),
    "partition": Entry(
        "kedge.cli.look:partition",
        "Look",
        "Draw a partition: who holds how much of which class.",
    ),
    "list": Entry(
        "kedge.cli.look:list_things",
        "Look",
        "List the parts that methods are made of, or the things of another kind, e.g. models.",
    ),
    "show": Entry(
        "kedge.cli.look:show",
        "Look",
        "Show a part, a model, a partition, ...: what it does, its paper, options and ranges.",
    ),
    "check": Entry(
        "kedge.cli.prove:check",
        "Prove",
        "Check parts against the laws and against identities from their papers. Exit code 1 if one "
        "fails.",
    ),
    "conformance": Entry(
        "kedge.cli.prove:conformance",
        "Prove",
        "Print what the oracles expect and what was found. Exit code 1 if kedge is off; other "
        "libraries only inform.",
    ),
    "bench": Entry(
        "kedge.cli.prove:bench",
        "Prove",
        "Time rounds of kedge beside its rivals, in turn, on this machine. Missing rivals are "
        "named.",
    ),
}


def function_of(name: str) -> Callable[..., None]:
    """Import the function behind a command."""
    module, attribute = COMMANDS[name].function.split(":")
    found: Callable[..., None] = getattr(importlib.import_module(module), attribute)
    return found


class LazyCommand(TyperCommand):
    """A line in the help; the command itself is imported when it is called."""

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """The context of the command behind this line; ``args`` are parsed by that command."""
        assert self.name is not None
        alone = typer.Typer(add_completion=False)
        alone.command(self.name)(function_of(self.name))
        return typer.main.get_command(alone).make_context(info_name, args, parent, **extra)


def _placeholder() -> None:
    """Never called: see :class:`LazyCommand`."""


for _name, _entry in COMMANDS.items():
    app.command(_name, cls=LazyCommand, help=_entry.help, rich_help_panel=_entry.panel)(
        _placeholder
    )


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"kedge {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Federated learning on heterogeneous data."""


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    errors.print(Text("warning: ", "yellow") + Text(str(message)), soft_wrap=True)


def main() -> None:
    """Run the command; what a user got wrong ends in one line, not in a traceback."""
    warnings.showwarning = _show_warning
    try:
        app()
    except Interrupted as error:
        errors.print(str(error), highlight=False, soft_wrap=True)
        sys.exit(130)
    except KeyboardInterrupt:
        errors.print("stopped; what was saved is whole", highlight=False)
        sys.exit(130)
    except KedgeError as error:
        Console(stderr=True).print(Text("error: ", "bold red") + Text(str(error)), soft_wrap=True)
        sys.exit(2)
