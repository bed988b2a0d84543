"""Carry a request to a resident node on this machine, and its reply back.

This is all that a thin ClientApp does. It imports neither torch nor the rest of kedge, so a client
process starts fast and holds no data. Each message on the Unix socket is its length in 8 bytes,
little-endian, and its content.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence

LENGTH = 8
MAX_BYTES = 1 << 33  # of one message
CHUNK = 1 << 20
PIECE = 1 << 25  # bytes of one piece of a reply
RETRY_S = 0.5
PATIENCE_S = 60.0  # a node that was restarted needs some seconds; at most half of the time left


class NodeDown(Exception):
    """The resident node could not be reached, or went away before it answered."""


def forward(
    path: str, message: Sequence[bytes], deadline: float, patience_s: float = PATIENCE_S
) -> list[bytes]:
    """Send a request to the resident node at a Unix socket; repeated requests are harmless.

    Args:
        path: path of the socket.
        message: the request, in pieces.
        deadline: when the reply is not wanted any more, in seconds since 1970.
        patience_s: how long to wait for a node that does not run.

    Returns:
        The reply, in pieces.

    Raises:
        NodeDown: there is no reply.
    """
    now = time.time()
    end = now + min(patience_s, (deadline - now) / 2)  # so that the server hears why in time
    while True:
        try:
            return _exchange(path, message, deadline)
        except OSError as error:
            if time.time() + RETRY_S >= end:
                raise NodeDown(type(error).__name__) from None
            time.sleep(RETRY_S)


def _exchange(path: str, message: Sequence[bytes], deadline: float) -> list[bytes]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(max(1.0, deadline - time.time()))
        connection.connect(path)
        write(connection, message)
        return list(read(connection))


def write(connection: socket.socket, message: Sequence[bytes]) -> None:
    """Send one message, in pieces."""
    connection.sendall(sum(map(len, message)).to_bytes(LENGTH, "little"))
    for piece in message:
        connection.sendall(piece)


def read(connection: socket.socket, most: int = MAX_BYTES, piece: int = PIECE) -> Iterator[bytes]:
    """Receive one message in pieces of at most ``piece`` bytes; a ConnectionError if it is too long
    or the other side goes away."""
    size = int.from_bytes(_exactly(connection, LENGTH), "little")
    if size > most:
        raise ConnectionError(f"a message of {size} bytes, of {most} at most")
    for start in range(0, size, piece):
        yield bytes(_exactly(connection, min(piece, size - start)))


def _exactly(connection: socket.socket, size: int) -> bytearray:
    found = bytearray()
    while len(found) < size:  # it grows with what comes, not with what was announced
        piece = connection.recv(min(CHUNK, size - len(found)))
        if not piece:
            raise ConnectionError("the other side closed the connection")
        found += piece
    return found
