"""The device of a run: its name, and the precision of matrix products and convolutions.

For bfloat16, see the autocast of :mod:`kedge.core.model`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

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
