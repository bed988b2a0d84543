"""Read files below the folder of the board. Links are not followed, and what is read is counted."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

from kedge.files import MAX_TOML_BYTES, open_file, parse_json, parse_toml

MAX_BYTES = 64 * 2**20  # of one reading


class Stamp(NamedTuple):
    """What changes with a file."""

    inode: int
    size: int
    mtime_ns: int


class Reader:
    """Reads files, and counts: ``files`` opened and ``bytes`` read."""

    def __init__(self) -> None:
        self.files = self.bytes = 0

    def read(self, path: Path, start: int = 0, size: int = MAX_BYTES) -> bytes:
        """Bytes of a regular file from ``start``; from its end if that is negative.

        Raises:
            OSError: there is no such file, or it is a link, a pipe or a device.
        """
        with open_file(path, links=False) as file:
            self.files += 1
            if start:
                size = os.fstat(file.fileno()).st_size
                file.seek(start if start > 0 else max(0, size + start))
            content = file.read(size)
        self.bytes += len(content)
        return content

    def json(self, path: Path) -> dict[str, Any]:
        """An object in a JSON file; empty if there is none."""
        try:
            found = parse_json(self.read(path))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def toml(self, path: Path) -> dict[str, Any]:
        """The table in a TOML file; empty if there is none."""
        try:
            return parse_toml(self.read(path, size=MAX_TOML_BYTES).decode())
        except (OSError, ValueError):
            return {}


def stamp(path: Path) -> Stamp | None:
    """The stamp of a file; None if there is no such file, or if it is a link."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return Stamp(found.st_ino, found.st_size, found.st_mtime_ns)
