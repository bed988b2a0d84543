"""``kedge board``: a local page over a folder of runs."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import webbrowser
from html import escape
from pathlib import Path
from typing import Annotated

import typer

from kedge.cli.screen import console, dim, warn
from kedge.errors import KedgeError
from kedge.files import write_file

NEEDED = ("starlette", "uvicorn")


def board(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="a folder of runs")] = "runs",
    host: Annotated[
        str, typer.Option(help="address to listen on; others than loopback let the network in")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free")] = 8765,
    browser: Annotated[
        bool | None,
        typer.Option(
            "--open/--no-browser", help="open the page (default: on a desktop)", show_default=False
        ),
    ] = None,
) -> None:
    """Watch the runs below a folder on a local page: live curves, comparisons, notes, stop.

    The address has a token. A browser is opened by a file, since other users see its arguments.

    kedge board                      the runs in runs/
    kedge board ~/experiments --port 9000 --no-browser
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise KedgeError(f"kedge board needs {' and '.join(missing)}: pip install 'kedge[board]'")
    root = Path(folder)
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        raise KedgeError(f"{folder} {what}; name a folder of runs: kedge board DIR")
    from kedge.board.guard import is_loopback
    from kedge.board.serve import serve

    def ready(address: str) -> None:
        if not is_loopback(host):
            warn(f"the board listens on {host}: whoever has the address can read and stop runs")
        line = f"Board of {folder}: {address}"
        console.print(line, highlight=False, soft_wrap=True, markup=False)
        dim("Ctrl-C ends it")
        if _has_desktop() if browser is None else browser:
            text = f'<meta http-equiv="refresh" content="0;url={escape(address)}">'
            write_file(page, text.encode(), private=True)
            webbrowser.open(page.as_uri())

    with tempfile.TemporaryDirectory(prefix="kedge-board-") as private:  # of this user alone
        page = Path(private) / "board.html"
        serve(root, host, port, ready, dim)
    dim("The board is closed")


def _has_desktop() -> bool:
    """Whether a browser would appear before the user."""
    if not sys.stdout.isatty() or "SSH_CONNECTION" in os.environ:
        return False
    shown = any(name in os.environ for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    return shown or sys.platform in ("darwin", "win32")
