"""Memory: the peak of some work, and the bytes that are free."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge.engines.torch_private import watching_operators
from kedge.limits import host_available as host_available
from kedge.limits import read_number

MIN_RESERVED_BYTES = 100_000_000  # below it, the segments of CUDA's allocator are too coarse


class Need(NamedTuple):
    """Bytes of training beside data, server and state: for the first client, and for each further
    one."""

    first: int
    lane: int

    def of(self, lanes: int) -> int:
        """Bytes of so many clients at once."""
        return self.first + (lanes - 1) * self.lane

    def lanes(self, budget: float) -> int:
        """The number of clients at once that fit into ``budget`` bytes."""
        if budget < self.first:
            return 0
        return 1 + int((budget - self.first) // self.lane) if self.lane > 0 else 1_000_000_000


def peak(work: Callable[[], Any], device: torch.device) -> int:
    """Peak memory of some work in bytes, beyond the memory in use before.

    On a CPU the tensors that operators return are counted. If torch cannot report them, the growth
    of the process's peak is returned, at least 1: a lower bound.

    >>> peak(lambda: torch.zeros(1000), torch.device("cpu"))
    4000
    """
    if device.type != "cuda":
        live, before_work = _LiveBytes(), _process_peak()
        with watching_operators(live.watch) as watched:
            work()
        return live.peak if watched else max(1, _process_peak() - before_work)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    work()
    torch.cuda.synchronize(device)
    allocated = torch.cuda.max_memory_allocated(device) - before[0]
    torch.cuda.empty_cache()
    # captured graphs keep the memory of their replays reserved, but not allocated
    reserved = torch.cuda.memory_reserved(device) - before[1]
    return max(allocated, reserved) if reserved > MIN_RESERVED_BYTES else allocated


class _LiveBytes:
    """Bytes of the live tensors that were created while some work ran."""

    def __init__(self) -> None:
        self.current = self.peak = 0
        self._storages: set[int] = set()

    def watch(self, name: str, inputs: Any, outputs: Any) -> None:
        """Called for every operator. Inputs that existed before are not counted."""
        for value in _tensors(inputs):
            self._add(value, 0)
        for value in _tensors(outputs):
            self._add(value, None)

    def _add(self, value: Tensor, size: int | None) -> None:
        storage = value.untyped_storage()
        address = storage._cdata
        if address in self._storages:
            return
        size = storage.nbytes() if size is None else size
        self._storages.add(address)
        self.current += size
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._remove, address, size)

    def _remove(self, address: int, size: int) -> None:
        self._storages.discard(address)
        self.current -= size


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


def _process_peak() -> int:
    """Peak resident memory of this process in bytes."""
    peak = read_number(Path("/proc/self/status"), "VmHWM:")
    if peak is not None:  # on Linux, getrusage would include the peak of the parent before exec
        return peak * 1024
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def available(device: torch.device) -> int:
    """Free bytes on a device, with those that torch has cached."""
    if device.type != "cuda":
        return host_available()
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + cached)
