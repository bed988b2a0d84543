"""The command ``kedge``."""

from __future__ import annotations


def main() -> None:
    """Run the command. User errors are printed in one line, without a traceback."""
    from kedge.cli import app

    app.main()
