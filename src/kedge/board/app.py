"""The routes of the board. Runs are named by identifiers of the server's own listing."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

import kedge.report
from kedge.board.guard import REPORT_POLICY, Guard
from kedge.board.panel import commands, curves, table
from kedge.board.watch import Catalogue, Entry, Live, dumped
from kedge.errors import FieldError
from kedge.files import find_link
from kedge.history.folder import checked, request_stop, write_notes

WEB = Path(kedge.report.__file__).parent / "web"
STATIC = WEB / "board"
SHARED = ("shared.js", "shared.css", "vendor/d3.min.js", "vendor/plot.umd.min.js")
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
MAX_BODY = 65_536  # bytes
MAX_COMPARED = 50  # runs at once


class Board:
    """The application over a folder.

    Args:
        root: the folder of runs.
        host: the address it listens on.
        port: and its port.
        token: given in the address; drawn if empty.

    Attributes:
        app: the ASGI application, guarded.
        live: the stream of changes.
    """

    def __init__(self, root: Path, host: str = "127.0.0.1", port: int = 0, token: str = "") -> None:
        self.token, self.key = token or secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self.catalogue = Catalogue(root)
        self.live = Live(self.catalogue)
        self.files = {path.name: path for path in STATIC.iterdir() if path.suffix in TYPES}
        self.files |= {Path(name).name: WEB / name for name in SHARED}
        routes = [
            Route("/", self.page),
            Route("/static/{name}", self.static),
            Route("/events", self.events),
            Route("/runs", self.runs),
            Route("/sparks", self.sparks),
            Route("/run/{id}", self.run),
            Route("/run/{id}/curves", self.curves),
            Route("/table", self.table),
            Route("/report", self.report),
            Route("/run/{id}/stop", self.stop, methods=["POST"]),
            Route("/run/{id}/notes", self.notes, methods=["POST"]),
        ]
        inner = Starlette(routes=routes, exception_handlers={HTTPException: _refuse})
        self.app = Guard(inner, host, port, self.token, self.key)

    # -- the page -----------------------------------------------------------------------------

    def page(self, request: Request) -> Response:
        """The page, with the key that only it knows."""
        text = (STATIC / "index.html").read_text(encoding="utf-8")
        return HTMLResponse(text.replace("{{key}}", self.key))

    def static(self, request: Request) -> Response:
        """A file of the page."""
        path = self.files.get(request.path_params["name"])
        if path is None:
            raise HTTPException(404, "there is no such file")
        return Response(path.read_bytes(), media_type=TYPES[path.suffix])

    async def events(self, request: Request) -> Response:
        """Server-sent events: all runs, then what changes."""
        headers = {"X-Accel-Buffering": "no"}
        return StreamingResponse(self.live.stream(), 200, headers, "text/event-stream")

    # -- what is asked ------------------------------------------------------------------------

    def runs(self, request: Request) -> Response:
        """All runs, now."""
        self.catalogue.refresh()
        return _json({"title": self.catalogue.title, "rows": self.catalogue.rows()})

    def sparks(self, request: Request) -> Response:
        """Small curves of the runs that are in view."""
        entries = self._several(request, MAX_COMPARED)
        return _json({entry.id: entry.spark() or [] for entry in entries})

    def run(self, request: Request) -> Response:
        """One run: its row, settings, columns, and the commands that repeat or resume it."""
        entry = self._one(request)
        reader = self.catalogue.reader
        return _json(
            {
                "row": entry.row(),
                "settings": {key: str(value) for key, value in entry.config.items()},
                "columns": entry.columns(),
                "commands": commands(entry, self.catalogue.title, reader),
            }
        )

    def curves(self, request: Request) -> Response:
        """Points of one column over rounds, from where the page has them."""
        entry = self._one(request)
        query = request.query_params
        column = query.get("column") or entry.run().column
        words = [word for word in query.get("after", "").split(",") if word]
        if not all(
            word.isdecimal() and len(word) < 10 for word in [*words, query.get("epoch", "0")]
        ):
            raise HTTPException(400, "after and epoch are numbers")
        after, epoch = [int(word) for word in words], int(query.get("epoch", "0"))
        return _json(curves(entry, column, after, epoch))

    def table(self, request: Request) -> Response:
        """The comparison of several runs with the first of them."""
        return _json(table(self._several(request, MAX_COMPARED), self.catalogue.reader))

    def report(self, request: Request) -> Response:
        """The report of some runs, made now."""
        folders = [entry.path for entry in self._several(request, MAX_COMPARED)]
        if any(map(find_link, folders)):  # what reads them might follow these
            raise HTTPException(409, "there is no report: a folder has links")
        page = _report(folders)
        return HTMLResponse(page, headers={"Content-Security-Policy": REPORT_POLICY})

    # -- what is changed ----------------------------------------------------------------------

    async def stop(self, request: Request) -> Response:
        """Ask a run to stop after its round."""
        entry = self._one(request)
        if not entry.is_live:
            raise HTTPException(409, "this run does not train")
        await run_in_threadpool(_written, request_stop, entry.path)
        await self.live.look()
        return _json({"row": entry.row()})

    async def notes(self, request: Request) -> Response:
        """Replace the tags and the note of a run."""
        entry = self._one(request)
        given = await _body(request)
        try:
            notes = checked(given.get("tags"), given.get("note"))
        except FieldError as error:
            raise HTTPException(400, str(error)) from None
        await run_in_threadpool(_written, write_notes, entry.path, notes)
        await self.live.look()
        return _json({"row": entry.row()})

    # -- which runs ---------------------------------------------------------------------------

    def _one(self, request: Request) -> Entry:
        entry = self.catalogue.opened(request.path_params["id"])
        if entry is None:
            raise HTTPException(404, "there is no such run")
        return entry

    def _several(self, request: Request, most: int) -> list[Entry]:
        names = list(dict.fromkeys(request.query_params.get("ids", "").split(",")))
        if len(names) > most:
            raise HTTPException(400, f"at most {most} runs at once")
        entries = [self.catalogue.opened(name) for name in names]
        found = [entry for entry in entries if entry is not None]
        if not found:
            raise HTTPException(404, "there is no such run")
        return found


def _report(folders: Sequence[Path]) -> str:
    """The page of a report. What makes it needs the whole library, hence not before."""
    from kedge.history.find import find
    from kedge.report.page import facts_of, render

    try:
        return render(facts_of(find(folders)))
    except Exception as error:  # noqa: BLE001  (the board goes on, whatever a folder holds)
        raise HTTPException(409, f"there is no report: {error}") from None


def _written(write: Any, *arguments: Any) -> None:
    try:
        write(*arguments)
    except OSError as error:
        raise HTTPException(409, f"it cannot be written: {error.strerror}") from None


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object of a request."""
    content = b""
    async for piece in request.stream():
        content += piece
        if len(content) > MAX_BODY:
            raise HTTPException(413, "that is too long")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise HTTPException(400, "a JSON object is expected")
    return found


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json({"error": error.detail}, error.status_code)


def _json(value: Any, status: int = 200) -> Response:
    return Response(dumped(value), status, media_type="application/json")
