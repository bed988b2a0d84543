"""The device of a run: its name, precision, memory and threads.

For bfloat16, see the autocast of :mod:`kedge.core.model`.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

import torch

from kedge.errors import FieldError


def device_name(device: torch.device) -> str:
    """The name of a GPU, else the type of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def effective(precision: str, device: torch.device) -> str:
    """The precision that a device uses for a given one; only GPUs have TF32.

    >>> effective("tf32", torch.device("cpu"))
    'fp32'
    """
    return "fp32" if precision == "tf32" and device.type != "cuda" else precision


@contextmanager
def precise(precision: str, device: torch.device) -> Iterator[None]:
    """Set whether a GPU uses TF32 for matrix products and convolutions; restore it on exit."""
    if effective(precision, device) != precision:
        warnings.warn(f"precision tf32 needs a GPU; {device.type} uses fp32", stacklevel=4)
    if device.type != "cuda":
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = precision != "fp32"
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def resolve_device(name: str) -> torch.device:
    """The device with this name; ``auto`` is the GPU if there is one.

    Raises:
        FieldError: the device is not available. There is no fallback to the CPU.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise FieldError(f"device = {name!r}, but torch sees no GPU here; use device = cpu")
    if name == "mps" and not torch.backends.mps.is_available():
        raise FieldError("device = 'mps', but torch has no MPS device here; use device = cpu")
    return torch.device(name)


# -- memory of the C library -----------------------------------------------------------------------

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


# -- threads of torch on a CPU ---------------------------------------------------------------------


def use_threads(count: int) -> None:
    """Compute with so many threads from now on; 0 changes nothing."""
    if count and count != torch.get_num_threads():
        torch.set_num_threads(count)


@contextmanager
def restored_threads() -> Iterator[None]:
    """Restore the number of threads on exit."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        use_threads(before)
