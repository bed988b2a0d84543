"""Image files, in the size and mode of the images that a model was trained on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from kedge.data.arrays import conform, to_numpy
from kedge.data.datasets.checks import reading
from kedge.data.datasets.dataset import ReadResult
from kedge.data.datasets.find import IMAGES, SPLIT_NAMES, entries, folders
from kedge.data.datasets.images import to_array
from kedge.data.encoding import Array, Encoding, Samples, encodings
from kedge.errors import DataError


@encodings.register("image")
@dataclass(frozen=True)
class ImageEncoding(Encoding):
    """Image files of any mode, PIL images or arrays, as arrays of one shape.

    Attributes:
        shape: channels, height and width of the training images.
        resize: whether the training images were scaled to this size, as new ones then are, too.
        dtype: type of the pixels.
    """

    shape: tuple[int, ...]
    resize: bool = False
    dtype: str = "uint8"

    kind: ClassVar[str] = "image"

    def encode(self, raw: Any) -> Samples:
        """Encode image files (a path or a list of paths), a folder of them, PIL images or arrays.

        In a folder with one folder per class, the names of these are the labels. Of ``train`` and
        ``test`` in a folder, ``test`` is taken.
        """
        if isinstance(raw, Image.Image):
            raw = [raw]
        if isinstance(raw, (str, os.PathLike)):
            return self._encode_path(Path(raw).expanduser())
        if is_images(raw):
            ids, names = [], set()
            for i, item in enumerate(raw):
                name = str(i) if isinstance(item, Image.Image) else str(Path(item).name)
                ids.append(str(item) if name in names else name)
                names.add(name)
            return Samples(
                np.stack([self._pixels(item, f"image {i}") for i, item in enumerate(raw)]),
                tuple(ids),
            )
        x = conform(to_numpy(raw, "the input"), self.shape, self.dtype, "the input")
        return Samples(x, tuple(map(str, range(len(x)))))

    def _encode_path(self, path: Path) -> Samples:
        if path.is_file():
            return Samples(self._pixels(path, str(path))[None], (path.name,))
        if not path.is_dir():
            raise DataError(f"{path}: there is no such file or folder")
        files, labels = image_files(path)
        x = np.stack([self._pixels(file, str(file)) for file in files])
        ids = tuple(str(file.relative_to(path)) for file in files)
        return Samples(x, ids, None if labels is None else np.array(labels))

    def _pixels(self, item: Any, where: str) -> Array:
        channels, height, width = self.shape
        size = height if self.resize else None
        if isinstance(item, Image.Image):
            pixels = to_array(item, where, size, channels)
        else:
            with reading(item, "an image"), Image.open(item) as image:
                pixels = to_array(image, item, size, channels)
        if pixels.shape != self.shape:
            raise DataError(
                f"{where} is {pixels.shape[2]}x{pixels.shape[1]} pixels; the model takes "
                f"{width}x{height}. Scale it first, or train with the option size={height}, which "
                "scales new images as well"
            )
        if pixels.dtype != self.dtype:
            raise DataError(
                f"{where} has pixels of type {pixels.dtype}, the training images had {self.dtype}; "
                "save it with as many bits as these"
            )
        return pixels

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ImageEncoding:
        return cls(tuple(values["shape"]), bool(values["resize"]), str(values["dtype"]))


def is_images(raw: Any) -> bool:
    """Whether this is a list of paths or PIL images."""
    if not isinstance(raw, Sequence) or isinstance(raw, (str, bytes)) or not len(raw):
        return False
    return all(isinstance(item, (str, os.PathLike, Image.Image)) for item in raw)


def image_files(path: Path) -> tuple[list[Path], list[str] | None]:
    """The image files in a folder, and their classes if it has one folder per class.

    Raises:
        DataError: there are none, or files beside folders.
    """
    splits = {SPLIT_NAMES.get(sub.name.lower()): sub for sub in folders(path)}
    path = splits.get("test") or splits.get("train") or path
    files = [f for f in entries(path) if f.is_file() and f.suffix.lower() in IMAGES]
    found = [(f, sub.name) for sub in folders(path) for f in entries(sub) if f.is_file()]
    if files and found:
        raise DataError(f"{path}: images beside folders; give a folder with either of them")
    for file, _ in found:
        if file.suffix.lower() not in IMAGES:
            raise DataError(f"{file}: not an image kedge reads ({', '.join(IMAGES)})")
    if not files and not found:
        raise DataError(f"{path}: no images in this folder ({', '.join(IMAGES)})")
    return files or [f for f, _ in found], None if files else [label for _, label in found]


def with_image_encoding(result: ReadResult, size: int | None) -> ReadResult:
    """What a reader of images returned, with its encoding; ``size`` is the reader's option."""
    x = result.sources[0]["train"][0]
    return result._replace(
        encoding=ImageEncoding(tuple(x.shape[1:]), size is not None, str(x.dtype))
    )
