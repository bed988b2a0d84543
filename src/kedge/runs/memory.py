"""Out of memory: one sentence that says what to lower."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kedge.errors import OutOfMemory
from kedge.limits import host_available

if TYPE_CHECKING:  # this module must load when there is hardly any memory
    from kedge.runs.config import Config

_SIGNS = re.compile(
    r"can't allocate memory|out of memory|cannot allocate memory|bad_alloc|failed to map segment",
    re.I,
)
_BYTES = re.compile(r"(?:allocate|tried to allocate) ([\d.]+) ?(bytes|[KMG]iB)", re.I)
_UNITS = {"bytes": 1.0, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, numpy or torch means that memory ran out."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == 12:  # ENOMEM
        return True
    return isinstance(error, (RuntimeError, ImportError)) and bool(_SIGNS.search(str(error)))


def out_of_memory(error: BaseException, doing: str = "", lower: str = "") -> OutOfMemory:
    """The error as a sentence: what was tried, what is free, and what to lower.

    >>> str(out_of_memory(MemoryError("Unable to allocate 7.45 GiB for an array"), "reading data"))
    'out of memory while reading data: 8.0 GB more ... Use less data, or a machine with more memory'
    """
    asked = _BYTES.search(str(error))
    amount = ""
    if asked:
        amount = f" {float(asked[1]) * _UNITS[asked[2].lower()] / 1e9:.1f} GB more"
    lower = lower or "Use less data, or a machine with more memory"
    where = f" while {doing}" if doing else ""
    tried = f":{amount} did not fit" if amount else ""
    free = f"{host_available() / 1e9:.1f} GB are free now"
    return OutOfMemory(f"out of memory{where}{tried} ({free}). {lower}")


@contextmanager
def memory_errors(config: Config) -> Iterator[None]:
    """Turn errors that mean out of memory into an :class:`OutOfMemory` for these settings."""
    try:
        yield
    except OutOfMemory:
        raise
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        doing = f"training {config.method} on {config.data}"
        lower = (
            f"Lower --chunk (clients at once) or --batch (now {config.batch}), keep client state "
            "elsewhere (--state file), or choose a smaller --model"
        )
        raise out_of_memory(error, doing, lower) from error
