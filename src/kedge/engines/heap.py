"""Memory of the C library: whether that of freed tensors stays with the process."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache

MMAP_THRESHOLD, TRIM_THRESHOLD, TOP_PAD = -3, -1, -2  # options of glibc's mallopt


@cache
def keep_freed_memory() -> None:
    """Let glibc reuse the memory of freed tensors in this process, up to 1 GB. By default, memory
    of large ones returns to the system, which clears every page before the next step gets it
    again: a fifth of the time of a small CNN."""
    with suppress(OSError, AttributeError):  # another C library than glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(TRIM_THRESHOLD, 1 << 30)
        libc.mallopt(TOP_PAD, 1 << 26)
        for size in (1 << 30, 1 << 25):  # the maximum of new and old versions
            if libc.mallopt(MMAP_THRESHOLD, size):
                break


def return_freed_memory() -> None:
    """Give free memory back to the system, also what lies between pieces that are in use. Threads
    that allocate much, as those of a transport, leave it behind."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
