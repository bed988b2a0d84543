"""Large messages wait on disk, not in memory.

A message is bytes, or a file where it is large. The file has no name: nothing of it stays behind,
whatever happens to the process. This module needs the standard library alone.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TypeAlias

Message: TypeAlias = bytes | IO[bytes]

MAX_IN_MEMORY = 1 << 20  # bytes of a message


class Unnamed(io.BufferedRandom):
    """A file without a name, closed with its last reference."""

    def __del__(self) -> None:
        self.close()


def spooled(pieces: Iterable[bytes], folder: Path | None = None) -> Message:
    """Join the pieces of a message: as bytes if they are few, else as a file without a name.

    Args:
        pieces: the pieces. If they are a list, each is removed once it is written, so that the
            memory is freed.
        folder: where the file is; the system's folder for temporary files if None.
    """
    source = _taken(pieces) if isinstance(pieces, list) else iter(pieces)
    first, size = list[bytes](), 0
    for piece in source:
        first.append(piece)
        size += len(piece)
        if size > MAX_IN_MEMORY:
            break
    else:
        return b"".join(first)
    file = Unnamed(tempfile.TemporaryFile(dir=folder, buffering=0))  # noqa: SIM115
    for part in (_taken(first), source):
        for piece in part:
            file.write(piece)
    file.flush()
    return file


def _taken(pieces: list[bytes]) -> Iterable[bytes]:
    pieces.reverse()
    while pieces:
        yield pieces.pop()


def size_of(message: Message) -> int:
    """Bytes of a message."""
    return len(message) if isinstance(message, bytes) else message.seek(0, io.SEEK_END)
