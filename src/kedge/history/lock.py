"""One process at a time trains in the folder of a run."""

from __future__ import annotations

import contextlib
import os
import struct
import sys
from pathlib import Path

from kedge.errors import KedgeError
from kedge.files import NotPlain, open_append

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
TRAINING = "another process is training there. Wait until it has ended, or choose another --out"
#: The C structure ``flock``: type, whence, start, length and process, in the system's order.
_FLOCK = "qqihh" if sys.platform == "darwin" else "hhqqi4x"


class Lock:
    """The lock of a folder; it ends with the process. File systems without locks are not locked."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._path = Path()
        self._owner = os.getpid()

    def take(self, folder: Path, why: str = TRAINING) -> None:
        """Lock the folder; nothing happens if this lock is held already.

        Raises:
            KedgeError: another process holds the lock; ``why`` says what it does, and what to do.
        """
        if fcntl is None or self._file is not None:
            return
        path = folder / NAME
        with contextlib.suppress(FileNotFoundError):  # given back in between
            while True:
                try:
                    file = open_append(path)
                except NotPlain as error:
                    raise KedgeError(f"{path}: {error.strerror}; delete it") from None
                except OSError:
                    return  # whatever is wrong with the folder shows when a file is written
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except (BlockingIOError, PermissionError):
                    os.close(file)
                    raise KedgeError(f"{folder} is in use: {why}") from None
                except OSError:
                    os.close(file)
                    return
                if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
                    self._file, self._path = file, path
                    return
                os.close(file)  # it was given back in between: this file has no name any more

    def give_back(self) -> None:
        """Let other processes train in the folder."""
        if self._file is None or os.getpid() != self._owner:  # a copy in a forked process
            return
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._file), os.stat(self._path)):
                os.unlink(self._path)
        os.close(self._file)
        self._file = None

    def __del__(self) -> None:
        self.give_back()


def is_locked(folder: Path) -> bool | None:
    """Whether another process trains in a folder; None if this cannot be told.

    The lock is asked for, not taken, so that a run that starts meanwhile is not refused. Not for
    the process that trains: closing the file would give its own lock back.
    """
    if fcntl is None:
        return None
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        file = os.open(folder / NAME, flags)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    mac = sys.platform == "darwin"
    fields = (0, 0, 0, fcntl.F_RDLCK, 0) if mac else (fcntl.F_RDLCK, 0, 0, 0, 0)
    try:
        found = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(_FLOCK, *fields))
    except OSError:
        return None
    finally:
        os.close(file)
    return bool(struct.unpack(_FLOCK, found)[3 if mac else 0] != fcntl.F_UNLCK)
