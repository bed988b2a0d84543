"""The process of the board: a free port, the server, and its end by Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn

from kedge.board.app import Board
from kedge.errors import KedgeError

PORT, TRIES = 8765, 50


class BoardServer(uvicorn.Server):
    """Ends the streams of open pages first, for they never end by themselves."""

    board: Board
    loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called on Ctrl-C, between any two instructions: a stream that is just about to wait would
        miss a message, so the loop ends the streams."""
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self.board.live.close)
        super().handle_exit(sig, frame)


def serve(
    root: Path,
    host: str,
    port: int,
    ready: Callable[[str], None],
    say: Callable[[str], None],
) -> None:
    """Serve the page until Ctrl-C.

    Args:
        root: the folder of runs.
        host: the address to listen on.
        port: the first port to try; 0 takes any that is free.
        ready: called with the address of the page, which has the token.
        say: called with a message if another port is taken.

    Raises:
        KedgeError: no port can be had.
    """
    listener = listen(host, port)
    with contextlib.closing(listener):
        found: int = listener.getsockname()[1]
        if port and found != port:
            say(f"port {port} is in use; the board is on port {found}")
        board = Board(root, host, found)
        config = uvicorn.Config(
            board.app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=2,
        )
        server = BoardServer(config)
        server.board = board
        ready(address(host, found, board.token))
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])


def address(host: str, port: int, token: str) -> str:
    """The address of the page, with its token."""
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}/?token={token}"


def listen(host: str, port: int) -> socket.socket:
    """A socket on the first free port from ``port`` on.

    Raises:
        KedgeError: the address is not of this machine, or no port is free.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except (OSError, UnicodeError) as error:
        raise KedgeError(f"--host {host} is no address of this machine: {error}") from None
    for number in range(port, min(65536, port + TRIES)):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, number))
            listener.listen(128)
            return listener
        except OSError as error:
            listener.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise KedgeError(f"--host {host} cannot be used: {error.strerror}") from None
    raise KedgeError(f"no port from {port} on is free; choose another one with --port")
