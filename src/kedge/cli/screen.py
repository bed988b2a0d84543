"""The two consoles of the command line: results go to standard output, the rest to standard
error."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

console = Console()
errors = Console(stderr=True)


def dim(text: str) -> None:
    """Print a note beside the results."""
    errors.print(Text(text), style="dim", highlight=False, soft_wrap=True)
