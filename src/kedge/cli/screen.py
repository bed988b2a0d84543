"""The two consoles of the command line: stdout for results, stderr for everything else."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

console = Console()
errors = Console(stderr=True)


def dim(text: str) -> None:
    """Print a note to standard error."""
    errors.print(Text(text), style="dim", highlight=False, soft_wrap=True)
