"""The command ``kedge``."""

from __future__ import annotations


def main() -> None:
    """Run the command; what a user got wrong ends in one line, not in a traceback."""
    from kedge.cli import app

    app.main()
