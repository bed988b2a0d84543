"""Files that a user asks for: checked before the work, written in one step after it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from kedge.errors import KedgeError


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


def write_target(path: Path, write: Callable[[Path], None]) -> None:
    """Call ``write(temporary)`` and rename the temporary file, so that no half file is left.

    Raises:
        KedgeError: the file cannot be written, e.g. since the disk is full.
    """
    temporary = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        write(temporary)
        temporary.replace(path)
    except OSError as error:
        raise KedgeError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):  # a read-only file system refuses even this
            temporary.unlink(missing_ok=True)
