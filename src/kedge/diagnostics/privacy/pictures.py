"""Inputs as a person sees them: values from 0 to 1, and PNG images."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator

import torch
from PIL import Image
from torch import Tensor

from kedge.data.encoding import moments_like
from kedge.data.federation import Federation
from kedge.history.sheet import png_uri

Features = Callable[[Tensor], Tensor]  # values from 0 to 1 [B, ...] to features [B, D]
MIN_SIDE = 64  # pixels; smaller pictures are enlarged by a whole factor
CHUNK = 2048  # training samples at a time


class Pixels:
    """The scale of a federation's inputs, from what a model sees to 0..1 and back.

    8-bit images are divided by 255. Other images take the range of all training values, tables and
    series that of each column or channel.

    >>> from kedge.core.task import Classification
    >>> data = Federation(torch.tensor([[1.0], [3.0]]), [0, 1], [[0, 1]], Classification(2),
    ...                   moments=([2.0], [1.0]))
    >>> Pixels(data).to_unit(torch.tensor([[-1.0], [0.0]])).tolist()
    [[0.0], [0.5]]
    """

    def __init__(self, federation: Federation) -> None:
        shape, x = federation.input_shape, federation.x
        dtype, device = federation.dtype, federation.device
        self.is_image = len(shape) == 3 and shape[0] in (1, 3)
        zero, one = torch.zeros(1), torch.ones(1)
        given = federation.moments or (zero, one)
        self._mean, self._std = moments_like(given, shape, dtype, device)
        low, high = torch.zeros((), dtype=dtype, device=device), torch.ones((), device=device)
        if x.dtype != torch.uint8 and len(shape) == 3:
            low, high = x.min(), x.max()
        elif x.dtype != torch.uint8:
            flat = x.reshape(len(x), shape[0], -1)
            low, high = (
                v.reshape(-1, *(1,) * (len(shape) - 1))
                for v in (flat.amin((0, 2)), flat.amax((0, 2)))
            )
        self._low, self._width = low, torch.where(high > low, high - low, torch.ones_like(high))

    def to_unit(self, x: Tensor) -> Tensor:
        """Inputs of the model ``[B, ...]`` as values from 0 to 1; beyond them, cut off."""
        return ((x * self._std + self._mean - self._low) / self._width).clamp(0, 1)

    def from_unit(self, u: Tensor) -> Tensor:
        """Values from 0 to 1 as inputs of the model."""
        return (u * self._width + self._low - self._mean) / self._std


def unit_rows(federation: Federation, pixels: Pixels, rows: Tensor) -> Iterator[Tensor]:
    """Samples of some rows, from 0 to 1 and flat, ``[n, D]`` at a time."""
    for chunk in torch.split(rows, CHUNK):
        yield pixels.to_unit(federation.clean(chunk).x).flatten(1)


def picture(u: Tensor) -> str:
    """An image ``[1 or 3, H, W]`` of values from 0 to 1 as a PNG in a data URI.

    >>> picture(torch.zeros(1, 8, 8)).startswith("data:image/png;base64,")
    True
    """
    bytes_ = (u.detach().cpu().to(torch.float32) * 255).round().clamp(0, 255).to(torch.uint8)
    array = bytes_.permute(1, 2, 0).numpy()
    image = Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
    factor = max(1, math.ceil(MIN_SIDE / min(image.size)))
    if factor > 1:
        size = (image.width * factor, image.height * factor)
        image = image.resize(size, Image.Resampling.NEAREST)
    content = io.BytesIO()
    image.save(content, "PNG", optimize=True)
    return png_uri(content.getvalue())


def image_row(u: Tensor, row: str, column: str, caption: str = "") -> dict[str, str]:
    """An image in a chart of images."""
    return {"image": picture(u), "caption": caption, "row": row, "column": column}
