"""CIFAR-10 and CIFAR-100 in their Python version: pickled batches, read by a restricted unpickler.

A pickle can run any code. The unpickler builds only dictionaries, lists, numbers and bytes. For a
numpy array it builds a placeholder that records shape and bytes. Any other class is rejected before
it is imported.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from kedge.data.datasets.checks import check_lengths, reading, targets
from kedge.data.datasets.dataset import Array, ReadResult
from kedge.data.datasets.find import cifar_folder
from kedge.data.datasets.input_arrays import inputs
from kedge.errors import DataError, FieldError
from kedge.schema import Doc

BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))


def read_cifar(
    paths: Sequence[Path],
    *,
    labels: Annotated[
        Literal["fine", "coarse"], Doc("of CIFAR-100: its 100 classes or 20 superclasses")
    ] = "fine",
    limit: int | None = None,
) -> ReadResult:
    """CIFAR-10 and CIFAR-100 in their Python version."""
    batches_x, ys, names = [], [], None
    for path in paths:
        folder = cifar_folder(path)
        if folder is None:
            raise DataError(
                f"{path}: neither data_batch_1 (CIFAR-10) nor train, test, meta (CIFAR-100)"
            )
        is_cifar10 = (folder / BATCHES[0]).is_file()
        if is_cifar10 and labels == "coarse":
            raise FieldError("labels=coarse is for CIFAR-100; CIFAR-10 has one set of labels")
        key = "labels" if is_cifar10 else f"{labels}_labels"
        train, test = (BATCHES, ("test_batch",)) if is_cifar10 else (("train",), ("test",))
        names = _class_names(folder, is_cifar10, labels) or names
        for files in (train, test):
            batches = [_batch(folder / file, key) for file in files]
            ys += [
                (f"{folder / file}: {key}", y) for file, (_, y) in zip(files, batches, strict=True)
            ]
            batches_x.append([x for x, _ in batches])
    classes = len(names) if names else (limit if labels == "fine" else 20)
    arrays, task, outputs = targets(ys, limit=classes)
    label = iter(arrays)
    joined = [(np.concatenate(xs), np.concatenate([next(label) for _ in xs])) for xs in batches_x]
    pairs = zip(joined[::2], joined[1::2], strict=True)
    return ReadResult([{"train": a, "test": b} for a, b in pairs], task, outputs, names)


def _batch(path: Path, key: str) -> tuple[Array, Array]:
    """Images [n, 3, 32, 32] and labels of one file."""
    content = _unpickle(path)
    data, labels = content.get(b"data"), content.get(key.encode())
    if not isinstance(data, _Placeholder) or not isinstance(labels, list):
        has = ", ".join(repr(_text(k)) for k in content) or "nothing"
        raise DataError(f"{path}: not a CIFAR batch: needed are 'data' and {key!r}, it has {has}")
    x = data.array(f"{path}: data")
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
        content = _RestrictedUnpickler(path, data).load()
    if not isinstance(content, dict):
        raise DataError(f"{path}: not a CIFAR batch but a {type(content).__name__}")
    return {k.encode() if isinstance(k, str) else k: v for k, v in content.items()}


class _Placeholder:
    """A placeholder for an array or a dtype, so that numpy never sees unchecked values."""

    def __init__(self, *args: Any) -> None:
        self.args, self.state = args, ()

    def __setstate__(self, state: Any) -> None:
        self.state = state if isinstance(state, tuple) else ()

    def array(self, where: str) -> Array:
        """The uint8 array; ``where`` is its location, for messages."""
        match self.state or self.args:
            case (
                _,
                tuple(shape),
                _Placeholder(args=(kind, *_)),
                fortran,
                bytes(raw),
            ):  # __reduce__
                order = "F" if fortran else "C"
            case (
                bytes(raw) | bytearray(raw),
                _Placeholder(args=(kind, *_)),
                tuple(shape),
                order,
            ):
                pass  # _frombuffer, of pickle protocol 5
            case _:
                raise DataError(f"{where} is not an array of bytes")
        if _text(kind) not in ("u1", "|u1", "uint8"):
            raise DataError(f"{where} has type {_text(kind)[:20]}; CIFAR's images are uint8 ('u1')")
        if not all(isinstance(n, int) and n >= 0 for n in shape) or len(raw) != math.prod(shape):
            raise DataError(f"{where} announces shape {shape} but holds {len(raw)} bytes")
        return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if order == "F" else "C")


def _encode(text: str = "", codec: str = "latin1") -> bytes:
    return text.encode("latin1")  # as Python 3 pickles bytes for Python 2


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Placeholder,
    ("numpy", "dtype"): _Placeholder,
}
_ALLOWED |= {
    (f"numpy.{core}.multiarray", "_reconstruct"): _Placeholder for core in ("core", "_core")
}
_ALLOWED |= {(f"numpy.{core}.numeric", "_frombuffer"): _Placeholder for core in ("core", "_core")}
_ALLOWED |= {("_codecs", "encode"): _encode, ("__builtin__", "bytes"): _encode}


class _RestrictedUnpickler(pickle.Unpickler):
    def __init__(self, path: Path, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise DataError(
                f"{self.path}: refused: this pickle asks for {module}.{name}, which no CIFAR file "
                "needs and which could run code; nothing was run. Get it from a source you trust"
            )
        return _ALLOWED[module, name]
