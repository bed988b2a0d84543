"""The device of a run: its name, and the precision of matrix products and convolutions.

For bfloat16, see the autocast of :mod:`kedge.core.model`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
