"""The two consoles of the command line: stdout for results, stderr for everything else."""

from __future__ import annotations

import codecs
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

console = Console()
errors = Console(stderr=True)


def dim(text: str) -> None:
    """Print a note to standard error."""
    errors.print(Text(text), style="dim", highlight=False, soft_wrap=True)


def print_table(table: Table) -> None:
    """Print a table; one that is too wide for the screen goes on, since no number may be lost."""
    size = console.measure(table, options=console.options.update(max_width=1000))
    width = max(console.width, size.minimum if console.is_terminal else size.maximum)
    Console(width=width).print(table, crop=False)


#: What a terminal without Unicode shows instead.
_ASCII = {"±": "+-", "…": "...", "–": "-", "—": "-", "×": "x", "²": "2", "≤": "<=", "≥": ">="}


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
