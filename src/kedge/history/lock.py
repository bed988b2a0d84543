"""One process at a time trains in the folder of a run.

The system holds the lock (``flock``), so it ends with the process. The board asks by taking it for
an instant; whoever trains waits a second before it gives up. Earlier versions of kedge took another
kind of lock (``lockf``); they and this one do not see each other's, so train with one of them only.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from filelock import FileLock, Timeout, lock_descriptor

from kedge.errors import KedgeError
from kedge.files import NotPlain, open_append, open_file

NAME = ".lock"
TRAINING = "another process is training there. Wait until it has ended, or choose another --out"


class Lock:
    """The lock of a folder. File systems without locks are not locked."""

    def __init__(self) -> None:
        self._lock: FileLock | None = None

    def take(self, folder: Path, why: str = TRAINING) -> None:
        """Lock the folder; nothing happens if this lock is held already.

        Raises:
            KedgeError: another process holds the lock; ``why`` says what it does, and what to do.
        """
        if self._lock is not None:
            return
        path = folder / NAME
        lock = FileLock(path, timeout=1, thread_local=False, fallback_to_soft=False)
        try:
            os.close(open_append(path))  # no link, and no file that has another name
            lock.acquire()
            self._file = path.stat()
        except NotPlain as error:
            raise KedgeError(f"{path}: {error.strerror}; delete it") from None
        except Timeout:
            raise KedgeError(f"{folder} is in use: {why}") from None
        except OSError:
            return  # whatever is wrong with the folder shows when a file is written
        self._lock = lock

    def give_back(self) -> None:
        """Let other processes train in the folder."""
        if self._lock is not None and self._lock.is_locked:  # a copy in a forked process is not
            path = Path(self._lock.lock_file)
            try:
                with contextlib.suppress(OSError):
                    if os.path.samestat(self._file, path.stat()):  # not of a folder made anew
                        path.unlink()
            finally:
                self._lock.release()
        self._lock = None

    def __del__(self) -> None:
        self.give_back()


def is_locked(folder: Path) -> bool | None:
    """Whether a process trains in a folder; None if this cannot be told."""
    try:
        with open_file(folder / NAME, links=False) as file:
            return not lock_descriptor(file.fileno(), blocking=False)
    except FileNotFoundError:
        return False
    except OSError:
        return None
