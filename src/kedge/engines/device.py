"""The device of a run: its name, and the precision of its matrix products and convolutions.

Passes in bfloat16 are the model's own matter, see :mod:`kedge.core.model`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def device_name(device: torch.device) -> str:
    """The name of a GPU, else the kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def effective(precision: str, device: torch.device) -> str:
    """The precision that a device has for a wanted one: only GPUs know TF32."""
    return "fp32" if precision == "tf32" and device.type != "cuda" else precision


@contextmanager
def precise(precision: str, device: torch.device) -> Iterator[None]:
    """Let matrix products and convolutions on a GPU be in TF32, or not, and then as before."""
    if effective(precision, device) != precision:
        warnings.warn(f"precision tf32 is for GPUs; on this {device.type} it is fp32", stacklevel=4)
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
