"""What memory some work takes, and how much there is."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge.engines.torch_private import watching_tensors

COARSE = 100_000_000  # bytes below which the segments of CUDA's allocator are too coarse to count


class Need(NamedTuple):
    """Bytes that training takes beside data, server and state: for a first client, and for each
    further one."""

    first: int
    lane: int

    def of(self, lanes: int) -> int:
        return self.first + (lanes - 1) * self.lane

    def lanes(self, room: float) -> int:
        """How many clients fit at once; 0: not even one."""
        if room < self.first:
            return 0
        return 1 + int((room - self.first) // self.lane) if self.lane > 0 else 1_000_000_000


def peak(work: Callable[[], Any], device: torch.device) -> int:
    """Bytes that some work held at once, at most, on top of what was there before."""
    if device.type != "cuda":
        held, earlier = _Held(), _process_bytes()
        with watching_tensors(held.watch) as watched:
            work()
        return held.most if watched else max(1, _process_bytes() - earlier)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    work()
    torch.cuda.synchronize(device)
    most = torch.cuda.max_memory_allocated(device) - before[0]
    torch.cuda.empty_cache()
    # recorded graphs hold on to what they use when they run: it is reserved, but not allocated
    kept = torch.cuda.memory_reserved(device) - before[1]
    return max(most, kept) if kept > COARSE else most


class _Held:
    """Counts the bytes of all tensors that are made while some work runs, as long as they live."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._known: set[int] = set()

    def watch(self, inputs: Any, outputs: Any) -> None:
        """Called for every operator; what was there before is not counted."""
        for value in _tensors(inputs):
            self._note(value, 0)
        for value in _tensors(outputs):
            self._note(value, None)

    def _note(self, value: Tensor, size: int | None) -> None:
        storage = value.untyped_storage()
        name = storage._cdata
        if name in self._known:
            return
        size = storage.nbytes() if size is None else size
        self._known.add(name)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, name, size)

    def _gone(self, name: int, size: int) -> None:
        self._known.discard(name)
        self.now -= size


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _process_bytes() -> int:
    """The most memory that this process has held, as the system counts it."""
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def available(device: torch.device) -> int:
    """Bytes that a run may take on a device now."""
    if device.type != "cuda":
        return host_available()
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + cached)


def host_available() -> int:
    """Bytes of the host's memory that are free or can be freed, within the container's limit."""
    free = _free_pages()
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())  # "max" where there is none
        free = min(free, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return max(free, 0)


def _free_pages() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # not Linux: all there is
