"""The last line of defence: an unforeseen error becomes one sentence and a log file."""

from __future__ import annotations

import errno
import os
import platform
import sys
import tempfile
import time
import traceback
from pathlib import Path

from kedge._version import __version__
from kedge.errors import KedgeError
from kedge.files import make_folder, write_file
from kedge.limits import is_out_of_memory, out_of_memory

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)
EXIT_CODE = 70  # EX_SOFTWARE: an internal error


def as_user_error(error: BaseException) -> KedgeError | None:
    """The error in a sentence if its cause is known: memory or disk space, or a locked file."""
    if is_out_of_memory(error):
        return out_of_memory(error)
    if isinstance(error, OSError) and error.errno in (*DISK_FULL, *NO_ACCESS):
        file = f"{error.filename}" if error.filename else "a file"
        advice = "free some disk space" if error.errno in DISK_FULL else "choose another folder"
        reason = (error.strerror or str(error)).lower()
        return KedgeError(f"{file} cannot be written or opened: {reason}; {advice}")
    return None


def sentence(error: BaseException) -> str:
    """What went wrong in one line, and where the traceback is."""
    first = (str(error).strip().splitlines() or [""])[0][:200]
    kind = type(error).__name__ + (f": {first}" if first else "")
    path = write_log(error)
    where = f"The details are in {path}" if path else "KEDGE_DEBUG=1 shows the details"
    return f"an error in kedge that should not happen ({kind}). {where}; please report it"


def write_log(error: BaseException) -> Path | None:
    """Write the traceback to the folder of the run, or of the user; None if neither is writable."""
    lines = traceback.format_exception(error)
    head = [
        f"kedge {__version__}, Python {platform.python_version()}, {platform.platform()}\n",
        f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {' '.join(sys.argv)}\n\n",
    ]
    for folder in _folders():
        path = folder / f"kedge-error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        try:
            make_folder(folder)
            write_file(path, "".join([*head, *lines]).encode(errors="replace"))
        except OSError:
            continue
        return path
    return None


def _folders() -> list[Path]:
    """Where the log may go, the best place first."""
    runs = sys.modules.get("kedge.runs.folder")
    opened: list[Path] = [p for p in getattr(runs, "opened", [])[-1:] if p.is_dir()]
    state = os.environ.get("XDG_STATE_HOME")
    home = Path(state) if state else Path(os.path.expanduser("~")) / ".local" / "state"
    return [*opened, home / "kedge", Path(tempfile.gettempdir())]
