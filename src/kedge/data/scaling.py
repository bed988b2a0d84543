"""What happens to encoded inputs before a model sees them: 8-bit values to 0..1, then moments.

Training batches, test batches and predictions on raw inputs all go through these functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Moments = tuple[Tensor, Tensor]  # mean and standard deviation, shaped like one input or broadcast


def moments_like(
    moments: tuple[Any, Any], shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Moments:
    """Mean and standard deviation per channel or column, for inputs of a shape without batch."""
    broadcast = (-1, *(1,) * (len(shape) - 1))
    mean, std = (torch.as_tensor(m, dtype=dtype, device=device) for m in moments)
    return mean.reshape(broadcast), std.reshape(broadcast)


def to_unit(x: Tensor, dtype: torch.dtype) -> Tensor:
    """8-bit values as numbers from 0 to 1; others unchanged."""
    return x.to(dtype) / 255 if x.dtype == torch.uint8 else x


def normalise(x: Tensor, moments: Moments | None) -> Tensor:
    """Zero mean and unit variance per channel or column; unchanged without moments."""
    if moments is None:
        return x
    mean, std = moments
    return (x - mean) / std
