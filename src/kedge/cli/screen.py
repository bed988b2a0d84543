"""The two consoles of the command line: stdout for results, stderr for everything else."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

console = Console()
errors = Console(stderr=True)
PIPE_WIDTH = 200  # characters; a terminal says how wide it is


def dim(text: str) -> None:
    """Print a note to standard error."""
    errors.print(Text(text), style="dim", highlight=False, soft_wrap=True)


def warn(text: object) -> None:
    """Print a warning to standard error."""
    errors.print(Text("warning: ", "yellow") + Text(str(text)), soft_wrap=True)


def print_table(table: RenderableType) -> None:
    """Print a table; in a file or a pipe it is as wide as it needs, since no number may be lost."""
    if console.is_terminal:
        console.print(table)
    else:
        Console(width=PIPE_WIDTH).print(table)


def plain_table(*columns: str, right: Sequence[str] = (), **options: Any) -> Table:
    """A table without lines; the columns of ``right`` are numbers."""
    table = Table(**{"box": None, "padding": (0, 2, 0, 0), "header_style": "bold"} | options)
    for i, column in enumerate(columns):
        justify: Any = "right" if column in right else "left"
        table.add_column(column, justify=justify, no_wrap=i == 0)
    return table


def next_steps(commands: Sequence[str]) -> None:
    """Print the commands that one would type next, one per line."""
    for i, command in enumerate(commands):
        dim(("next: " if i == 0 else "      ") + command)


#: What a terminal without Unicode shows instead.
_ASCII = {"±": "+-", "…": "...", "×": "x", "²": "2", "≤": "<=", "≥": ">="}
_ASCII |= dict.fromkeys("–—−", "-")


def _plainer(error: UnicodeError) -> tuple[str, int]:
    """Replace what the encoding of a stream lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(_ASCII.get(sign, "?") for sign in missing), error.end


def accept_any_text() -> None:
    """Let output streams replace characters that their encoding lacks, rather than fail."""
    codecs.register_error("kedge", _plainer)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="kedge")
