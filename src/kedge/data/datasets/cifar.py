"""CIFAR-10 and CIFAR-100 in their Python version: pickled batches, read by a restricted unpickler.

A pickle can run any code. The unpickler builds only dictionaries, lists, numbers and bytes. What
NumPy would build of an array or its type is left out, too: a forged state of ``numpy.dtype`` makes
it follow any address. Other classes and functions are rejected before they are imported.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from kedge.data.datasets.arrays import LabelledArray, assemble_labels, check_lengths, inputs
from kedge.data.datasets.dataset import Array, ReadResult
from kedge.data.datasets.formats import DataReader, Peek, readers, reading
from kedge.errors import DataError, FieldError
from kedge.schema import Doc

BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))


@readers.register("cifar")
@dataclass(frozen=True)
class Cifar(DataReader):
    """CIFAR-10 and CIFAR-100 in their Python version."""

    labels: Annotated[
        Literal["fine", "coarse"], Doc("of CIFAR-100: its 100 classes or 20 superclasses")
    ] = "fine"

    pieces = "_batch|^(train|test)$"
    precedence = 3

    @classmethod
    def detect(cls, path: Path) -> bool:
        return _folder(path) is not None

    @classmethod
    def peek(cls, path: Path) -> Peek:
        return (3, 32, 32), {"train": 50_000, "test": 10_000}

    def read(self, paths: Sequence[Path], limit: int | None = None) -> ReadResult:
        found: list[LabelledArray] = []
        names = None
        for i, path in enumerate(paths):
            folder = _folder(path)
            if folder is None:
                raise DataError(
                    f"{path}: neither data_batch_1 (CIFAR-10) nor train, test, meta (CIFAR-100)"
                )
            is_cifar10 = (folder / BATCHES[0]).is_file()
            if is_cifar10 and self.labels == "coarse":
                raise FieldError("labels=coarse is for CIFAR-100; CIFAR-10 has one set of labels")
            key = "labels" if is_cifar10 else f"{self.labels}_labels"
            names = _class_names(folder, is_cifar10, self.labels) or names
            files = {"train": "train", "test": "test"}
            if is_cifar10:
                files = {**dict.fromkeys(BATCHES, "train"), "test_batch": "test"}
            for file, split in files.items():
                x, y = _batch(folder / file, key)
                found.append(LabelledArray(i, split, x, f"{folder / file}: {key}", y))
        classes = len(names) if names else (limit if self.labels == "fine" else 20)
        return assemble_labels(found, len(paths), limit=classes, names=names)


def _folder(path: Path) -> Path | None:
    """The folder with the batches: ``path`` or its subfolder of the published name."""
    for folder in (path, path / "cifar-10-batches-py", path / "cifar-100-python"):
        if (folder / BATCHES[0]).is_file():
            return folder
        if all((folder / name).is_file() for name in ("train", "test", "meta")):
            return folder
    return None


def _batch(path: Path, key: str) -> tuple[Array, Array]:
    """Images [n, 3, 32, 32] and labels of one file."""
    content = _unpickle(path)
    data, labels = content.get(b"data"), content.get(key.encode())
    if not isinstance(data, _Stub) or not isinstance(labels, list):
        has = ", ".join(repr(_text(k)) for k in content) or "nothing"
        raise DataError(f"{path}: not a CIFAR batch: needed are 'data' and {key!r}, it has {has}")
    x = data.pixels(f"{path}: data")
    if x.ndim != 2 or x.shape[1] != 3072:
        raise DataError(f"{path}: data has shape {x.shape}; CIFAR has [images, 3072]")
    wrong = [i for i, v in enumerate(labels) if not isinstance(v, int) or abs(v) >= 1 << 31]
    if wrong:
        raise DataError(
            f"{path}: {key}, row {wrong[0]}: {labels[wrong[0]]!r:.40} is not a class number"
        )
    y = np.array(labels, np.int64)
    check_lengths(f"{path}: data", x, key, y)
    return inputs(x.reshape(-1, 3, 32, 32), f"{path}: data"), y


def _class_names(folder: Path, is_cifar10: bool, labels: str) -> tuple[str, ...] | None:
    path = folder / ("batches.meta" if is_cifar10 else "meta")
    if not path.is_file():
        return None
    names = _unpickle(path).get(b"label_names" if is_cifar10 else f"{labels}_label_names".encode())
    is_valid = isinstance(names, list) and all(isinstance(n, (bytes, str)) for n in names)
    return tuple(map(_text, names)) if is_valid and names else None


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _unpickle(path: Path) -> dict[Any, Any]:
    """The dictionary in a CIFAR file. Keys are bytes, also if Python 3 wrote the file."""
    if not path.is_file():
        raise DataError(f"{path}: missing; unpack all of the CIFAR archive")
    with reading(path, "a CIFAR batch"):
        data = path.read_bytes()
        if not data:
            raise DataError(f"{path}: the file is empty (0 bytes)")
        unpickler = _Unpickler(io.BytesIO(data), encoding="bytes")
        unpickler.path = path
        content = unpickler.load()
    if not isinstance(content, dict):
        raise DataError(f"{path}: not a CIFAR batch but a {type(content).__name__}")
    return {k.encode() if isinstance(k, str) else k: v for k, v in content.items()}


class _Stub:
    """What a pickle says of an array or of its type."""

    def __init__(self, *args: Any) -> None:
        self.args, self.state = args, ()

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def pixels(self, where: str) -> Array:
        """The array, if it is one of bytes; ``where`` is its location, for messages."""
        match self.state or self.args:
            case (_, tuple(shape), _Stub(args=(kind, *_)), fortran, bytes(raw)):  # __reduce__
                order: Any = "F" if fortran else "C"
            case (bytes(raw) | bytearray(raw), _Stub(args=(kind, *_)), tuple(shape), order):
                pass  # _frombuffer, of pickle protocol 5
            case _:
                raise DataError(f"{where} is not an array of bytes")
        if _text(kind) not in ("u1", "|u1", "uint8"):
            raise DataError(f"{where} has type {_text(kind)[:20]}; CIFAR's images are uint8 ('u1')")
        try:
            return np.frombuffer(raw, np.uint8).reshape(shape, order=order)
        except (TypeError, ValueError):
            raise DataError(f"{where} announces shape {shape} but holds {len(raw)} bytes") from None


class _Unpickler(pickle.Unpickler):
    path: Path

    def find_class(self, module: str, name: str) -> Any:
        match module.replace("._core", ".core"), name:
            case ("numpy", "ndarray" | "dtype") | ("numpy.core.multiarray", "_reconstruct"):
                return _Stub
            case ("numpy.core.numeric", "_frombuffer"):
                return _Stub
            case ("_codecs", "encode") | ("__builtin__", "bytes"):  # bytes of Python 3 for Python 2
                return lambda text="", codec="latin1": text.encode("latin1")
        raise DataError(
            f"{self.path}: refused: this pickle asks for {module}.{name}, which no CIFAR file "
            "needs and which could run code; nothing was run. Get it from a source you trust"
        )
