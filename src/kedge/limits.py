"""Memory: what is free within all limits, and errors that mean that it ran out.

It loads when there is hardly any memory, so it imports nothing large.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kedge.errors import OutOfMemory

#: Limits above this are none: cgroups v1 write the largest number of pages.
MAX_LIMIT_BYTES = 1 << 60
_SIGNS = re.compile(
    r"can't allocate memory|out of memory|cannot allocate memory|bad_alloc|failed to map segment",
    re.I,
)
_BYTES = re.compile(r"(?:allocate|tried to allocate) ([\d.]+) ?(bytes|[KMG]iB)", re.I)
_UNITS = {"bytes": 1.0, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def host_available(root: str = "/") -> int:
    """Free or reclaimable bytes of host memory.

    The least of what the machine has, what the process may still allocate (``ulimit -v``,
    ``ulimit -d``) and what its control groups leave (cgroups v1 and v2, all levels).

    Args:
        root: where ``/proc`` and ``/sys`` are.
    """
    files = Path(root)
    free = [_free_pages(files), *_process_limits(files), *_group_limits(files)]
    return max(min(free), 0)


def read_number(path: Path, name: str) -> int | None:
    """The number after a name in a file of ``/proc`` or ``/sys``; None if there is none, as on
    other systems than Linux."""
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    return None


def _free_pages(root: Path) -> int:
    free = read_number(root / "proc/meminfo", "MemAvailable:")
    if free is not None:
        return free * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # not Linux: the total


def _process_limits(root: Path) -> Iterator[int]:
    """Bytes that the limits of this process leave."""
    try:
        import resource  # not on Windows
    except ImportError:
        return
    for kind, used_name in (("RLIMIT_AS", "VmSize:"), ("RLIMIT_DATA", "VmData:")):
        limit, _ = resource.getrlimit(getattr(resource, kind))
        used = read_number(root / "proc/self/status", used_name)
        if limit != resource.RLIM_INFINITY and limit < MAX_LIMIT_BYTES and used is not None:
            yield limit - used * 1024


def _group_limits(root: Path) -> Iterator[int]:
    """Bytes that each control group of this process, and those above it, leave."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in ("0::/", *lines):  # in a container, the root is its own group
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inside = Path(path.lstrip("/"))
        for group in (inside, *inside.parents):
            left = _left(base / group, *names)
            if left is not None:
                yield left


def _left(group: Path, limit_name: str, used_name: str, cache_name: str) -> int | None:
    """Bytes that one control group leaves; None without a limit."""
    try:
        limit = int((group / limit_name).read_text())  # "max": no limit
        used = int((group / used_name).read_text())
    except (OSError, ValueError):
        return None
    if limit >= MAX_LIMIT_BYTES:
        return None
    # files that the kernel drops when memory is short
    return limit - used + (read_number(group / "memory.stat", f"{cache_name} ") or 0)


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
