"""Files that a user asks for: checked before the work, written in one step after it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from kedge.errors import KedgeError
from kedge.files import write_file


def check_target(path: str | Path, force: bool, suffix: str = "") -> Path:
    """The path of a file to be written.

    Raises:
        KedgeError: its folder does not exist, it exists already (unless ``force``), or its name
            does not end with ``suffix``.
    """
    path = Path(path).expanduser()
    if suffix and path.suffix.lower() != suffix:
        raise KedgeError(f"{path}: the name must end with {suffix}, such as {path.stem}{suffix}")
    if path.is_dir():
        raise KedgeError(
            f"{path} is a folder; give the name of a file, such as {path / 'out'}{suffix}"
        )
    if not path.parent.is_dir():
        raise KedgeError(f"{path} cannot be written: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise KedgeError(f"{path} cannot be written: the folder {path.parent} is not writable")
    if path.exists() and not force:
        raise KedgeError(f"{path} exists already; write --force to replace it")
    return path


def write_target(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file in one step, so that no half file is left.

    Raises:
        KedgeError: the file cannot be written, e.g. since the disk is full.
    """
    try:
        write_file(path, content)
    except OSError as error:
        raise KedgeError(f"{path} cannot be written: {error.strerror or error}") from None
