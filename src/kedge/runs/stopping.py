"""Stop a run from outside, as by Ctrl-C: its round is completed and a checkpoint is saved.

The request is a file in the folder of the run, which the training looks for after every round. A
signal would need the process: its number may have been taken by another one, it may live on another
machine or in another container, and in a notebook it would interrupt more than the run. The file
reaches whoever trains in the folder, and nobody else. It is removed when the training stops, and
when it starts, so that an old request does not stop a run that is resumed.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from kedge.errors import Interrupted, Paused
from kedge.files import create_file

STOP = "stop"
#: How the last lines of ``log.txt`` begin if a run did not complete.
INTERRUPTED, FAILED = "interrupted: ", "failed: "
MAX_REASON = 300  # characters


def request_stop(folder: Path) -> None:
    """Ask the training in a folder to stop after its round.

    Raises:
        OSError: the folder is not writable.
    """
    with contextlib.suppress(FileExistsError):  # someone has asked already
        create_file(folder / STOP)


def is_stop_requested(folder: Path) -> bool:
    """Whether someone asked for a stop."""
    return os.path.lexists(folder / STOP)


def clear_stop(folder: Path) -> None:
    """Withdraw the request, if there is one."""
    with contextlib.suppress(OSError):
        os.unlink(folder / STOP)


def failures(log: str) -> dict[int, str]:
    """Why seeds ended before their last round, from the log of a run.

    >>> failures("2026-01-01 00:00:00  failed: seed 3: the loss is not finite")
    {3: 'the loss is not finite'}
    """
    found: dict[int, str] = {}
    for line in log.splitlines():
        match = re.search(rf"  (?:{FAILED})?seed (\d+): (.*)", line)
        if match and re.match(r"(started|resumed|stopped)", match[2]):
            found.pop(int(match[1]), None)
        elif match:
            found[int(match[1])] = match[2]
    return found


def end_line(error: BaseException) -> str:
    """A line for the log of a run that did not complete: why.

    >>> end_line(Interrupted("stopped after round 3 of seed 0. Resume with: --out a --resume"))
    'interrupted: stopped after round 3 of seed 0'
    """
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, (Interrupted, KeyboardInterrupt, Paused)):
        return INTERRUPTED + (text.split(". ")[0] or "Ctrl-C")
    return FAILED + (text or type(error).__name__)[:MAX_REASON]
