"""Image folders: ``class/name.png``, or ``train/class/name.png`` beside ``test/class/name.png``.

New images are encoded in the size and mode of those that a model was trained on.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from PIL import Image

from kedge.data.datasets.arrays import deep_pixels
from kedge.data.datasets.dataset import Array, ReadResult
from kedge.data.datasets.formats import (
    SPLIT_NAMES,
    DataReader,
    Peek,
    check_memory,
    entries,
    folders,
    readers,
    reading,
)
from kedge.data.encoding import Encoding, Samples, conform, encodings, to_numpy
from kedge.errors import DataError, SeveralDataErrors
from kedge.schema import Count, Doc

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
GREY = ("1", "L", "LA", "La")
DEEP = ("I;16", "I;16L", "I;16B", "I", "F")  # grey, of 16 bits or real numbers
COLOUR = ("RGB", "RGBA", "RGBX", "RGBa", "P", "PA", "CMYK", "YCbCr", "HSV", "LAB")


Pixels = Annotated[Count | None, Doc("scale all images to size x size pixels, e.g. size=64")]
Channels = Annotated[Literal[1, 3] | None, Doc("make all images grey (1) or colour (3)")]


@readers.register("images")
@dataclass(frozen=True)
class Images(DataReader):
    """Folders of images; classes are the names of the folders: class/name.png.

    Without ``size`` and ``channels``, all images must have the same size and mode.
    """

    size: Pixels = None
    channels: Channels = None

    pieces = f"(?i)({'|'.join(map(re.escape, IMAGES))})$"
    examples = (
        ("xrays(size=64)", "scale all images to 64 x 64 pixels"),
        ("xrays(channels=1)", "make all images grey"),
    )

    @classmethod
    def detect(cls, path: Path) -> bool:
        subs = folders(path) if path.is_dir() else []
        if any(SPLIT_NAMES.get(sub.name.lower()) == "train" for sub in subs):
            return True
        return any(is_image(file) for sub in subs for file in entries(sub))

    @classmethod
    def peek(cls, path: Path) -> Peek:
        scans = {split: _scan(folder) for split, folder in _split_folders(path).items()}
        first = next(file for files in scans["train"].values() for file in files)
        with reading(first, "an image"), Image.open(first) as image:
            shape = (1 if image.mode in (*GREY, *DEEP) else 3, image.height, image.width)
        return shape, {s: sum(map(len, classes.values())) for s, classes in scans.items()}

    def read(self, paths: Sequence[Path], limit: int | None = None) -> ReadResult:
        splits = [_split_folders(path) for path in paths]
        scans = [{s: _scan(folder) for s, folder in source.items()} for source in splits]
        classes = _classes(splits, scans)
        number = {name: i for i, name in enumerate(classes)}
        first: FirstImage | None = None
        faults = ImageFaults()
        sources = []
        for source in scans:
            pairs = {}
            for split, found in source.items():
                images: list[Array] = []
                count = sum(map(len, found.values()))
                for file in (f for files in found.values() for f in files):
                    with faults.collect(file):
                        pixels = open_array(file, file, self.size, self.channels)
                        first = check_shape(pixels, file, first)
                        images.append(pixels)
                    if len(images) == 1:
                        check_memory(file.parent.parent, images[0].nbytes * count)
                y = np.repeat([number[c] for c in found], [len(files) for files in found.values()])
                if not faults.first:
                    pairs[split] = (np.stack(images), y.astype(np.int64))
            sources.append(pairs)
        faults.raise_all()
        assert first is not None
        encoding = ImageEncoding(first.shape, self.size is not None, str(first.dtype))
        names = tuple(classes)
        return ReadResult(sources, "classification", len(names), names, encoding=encoding)


class FirstImage(NamedTuple):
    """The first image of a dataset, whose shape all others must have."""

    shape: tuple[int, int, int]  # C, H, W
    where: object
    dtype: np.dtype


class ImageFaults:
    """Images that cannot be used: the first of every kind of fault, and how many there are."""

    def __init__(self) -> None:
        self.first: dict[str, DataError] = {}
        self.count: Counter[str] = Counter()

    @contextmanager
    def collect(self, file: Path) -> Iterator[None]:
        """Keep a DataError of the block; those that differ in file and numbers are of one kind."""
        try:
            yield
        except DataError as error:
            kind = re.sub(r"\d+", "", str(error).replace(str(file), ""))
            self.first.setdefault(kind, error)
            self.count[kind] += 1

    def raise_all(self) -> None:
        """Raise what was kept, all in one."""
        errors = [
            DataError(f"{error} (and {self.count[kind] - 1} more such images)")
            if self.count[kind] > 1
            else error
            for kind, error in self.first.items()
        ]
        if errors:
            raise errors[0] if len(errors) == 1 else SeveralDataErrors(errors)


def _split_folders(path: Path) -> dict[str, Path]:
    """The folder of each split; without split folders, the path itself is the training set."""
    found: dict[str, Path] = {}
    subs = folders(path)
    for sub in subs:
        split = SPLIT_NAMES.get(sub.name.lower())
        if split and split in found:
            raise DataError(f"{path}: both {found[split].name}/ and {sub.name}/ are {split} sets")
        if split:
            found[split] = sub
    if "train" not in found:
        return {"train": path}
    others = [sub.name for sub in subs if sub not in found.values()]
    if others:
        raise DataError(f"{path}: folder {others[0]}/ beside train/; classes belong inside train/")
    return found


def _scan(folder: Path) -> dict[str, list[Path]]:
    """The image files of each class, sorted. Some classes may be empty, but not all."""
    found: dict[str, list[Path]] = {}
    for sub in entries(folder):
        if not sub.is_dir():
            raise DataError(
                f"{sub}: a file beside the class folders; put it into one, or elsewhere"
            )
        files = entries(sub)
        for file in files:
            if file.is_dir() or file.suffix.lower() not in IMAGES:
                what = "a folder inside a class" if file.is_dir() else "not an image kedge reads"
                raise DataError(f"{file}: {what}; class folders hold only {', '.join(IMAGES)}")
        found[sub.name] = files
    if not any(found.values()):
        raise DataError(f"{folder}: no images; expected class/name.png in it")
    return found


def is_image(path: Path) -> bool:
    """Whether a path is an image file, by its ending."""
    return path.is_file() and path.suffix.lower() in IMAGES


def open_array(item: Any, where: object, size: int | None, channels: int | None) -> Array:
    """The pixels of a file or of an opened image, as :func:`to_array`."""
    if isinstance(item, Image.Image):
        return to_array(item, where, size, channels)
    with reading(item, "an image"), Image.open(item) as image:
        return to_array(image, item, size, channels)


def to_array(image: Image.Image, where: object, size: int | None, channels: int | None) -> Array:
    """Pixels as uint8 ``[C, H, W]``, without transparency; those of 16 bits as float32, 0 to 1.

    Args:
        image: an opened image.
        where: its location, for messages.
        size: height and width to resize to, or None.
        channels: 1 for grey, 3 for colour, or None for those of the image.
    """
    if image.mode in DEEP:
        return _deep_array(image, where, size, channels)
    if image.mode not in (*GREY, *COLOUR):
        raise DataError(f"{where}: pixels of mode {image.mode}; save images of 8 or 16 bits")
    mode = {None: "L" if image.mode in GREY else "RGB", 1: "L", 3: "RGB"}[channels]
    image = (
        image.convert("RGBA").convert(mode) if image.mode in ("P", "PA") else image.convert(mode)
    )
    if size is not None and image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    pixels = np.asarray(image, np.uint8)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _deep_array(image: Image.Image, where: object, size: int | None, channels: int | None) -> Array:
    """Grey pixels as float32 ``[C, H, W]``: 16 bits divided by 65535, real numbers as they are."""
    pixels = np.asarray(image)
    if image.mode != "F":
        if pixels.min() < 0 or pixels.max() > 65535:
            raise DataError(f"{where}: pixels outside 0 to 65535; save images of 8 or 16 bits")
        pixels = deep_pixels(pixels)
    if not np.isfinite(pixels).all():
        raise DataError(f"{where}: pixels that are NaN or infinite")
    if size is not None and image.size != (size, size):
        scaled = Image.fromarray(pixels.astype(np.float32))
        pixels = np.asarray(scaled.resize((size, size), Image.Resampling.BILINEAR))
    return np.repeat(pixels[None].astype(np.float32), channels or 1, axis=0)


def check_shape(pixels: Array, where: object, first: FirstImage | None) -> FirstImage:
    """Raise a DataError if an image differs in shape from the first one, which is returned."""
    shape = (pixels.shape[0], pixels.shape[1], pixels.shape[2])
    if first is None:
        return FirstImage(shape, where, pixels.dtype)
    if pixels.dtype != first.dtype:
        bits = "8 bits" if pixels.dtype == np.uint8 else "more than 8 bits"
        raise DataError(f"{where} has pixels of {bits}, unlike {first.where}; save all alike")
    if shape[1:] != first.shape[1:]:
        raise DataError(
            f"{where} is {shape[2]}x{shape[1]} pixels but {first.where} is {first.shape[2]}x"
            f"{first.shape[1]}; write size={min(first.shape[1:])} to scale all to one size"
        )
    if shape[0] != first.shape[0]:
        words = {1: "grey", 3: "colour"}
        raise DataError(
            f"{where} is {words[shape[0]]} but {first.where} is {words[first.shape[0]]}; "
            "write channels=1 or channels=3 to make all alike"
        )
    return first


def _classes(
    splits: list[dict[str, Path]], scans: list[dict[str, dict[str, list[Path]]]]
) -> list[str]:
    """The sorted classes with training images."""
    trained = {c for source in scans for c, files in source["train"].items() if files}
    for folder, source in zip(splits, scans, strict=True):
        for split, found in source.items():
            untrained = sorted(set(found) - trained)
            if untrained:
                name = untrained[0]
                raise DataError(
                    f"{folder[split] / name}: no training images of class {name!r} anywhere; "
                    f"the training data has: {', '.join(sorted(trained))}"
                )
    return sorted(trained)


# -- new images -----------------------------------------------------------------------------------


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
        files, labels = _image_files(path)
        x = np.stack([self._pixels(file, str(file)) for file in files])
        ids = tuple(str(file.relative_to(path)) for file in files)
        return Samples(x, ids, None if labels is None else np.array(labels))

    def _pixels(self, item: Any, where: str) -> Array:
        channels, height, width = self.shape
        size = height if self.resize else None
        pixels = open_array(item, where, size, channels)
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


def is_images(raw: Any) -> bool:
    """Whether this is a list of paths or PIL images."""
    if not isinstance(raw, Sequence) or isinstance(raw, (str, bytes)) or not len(raw):
        return False
    return all(isinstance(item, (str, os.PathLike, Image.Image)) for item in raw)


def _image_files(path: Path) -> tuple[list[Path], list[str] | None]:
    """The image files in a folder, and their classes if it has one folder per class.

    Raises:
        DataError: there are none, or files beside folders.
    """
    splits = {SPLIT_NAMES.get(sub.name.lower()): sub for sub in folders(path)}
    path = splits.get("test") or splits.get("train") or path
    files = [f for f in entries(path) if is_image(f)]
    found = [(f, sub.name) for sub in folders(path) for f in entries(sub) if f.is_file()]
    if files and found:
        raise DataError(f"{path}: images beside folders; give a folder with either of them")
    for file, _ in found:
        if file.suffix.lower() not in IMAGES:
            raise DataError(f"{file}: not an image kedge reads ({', '.join(IMAGES)})")
    if not files and not found:
        raise DataError(f"{path}: no images in this folder ({', '.join(IMAGES)})")
    return files or [f for f, _ in found], None if files else [label for _, label in found]
