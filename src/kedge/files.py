"""Write files whole: under a temporary name, synchronised, then renamed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path


def write_file(path: Path, content: bytes | Iterable[bytes | memoryview]) -> None:
    """Write a file; ``content`` may be an iterator over its parts. Nothing stays of a failed write.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            for piece in (content,) if isinstance(content, bytes) else content:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _synchronise(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _synchronise(folder: Path) -> None:
    """Make a rename last through a loss of power, where the system allows it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
