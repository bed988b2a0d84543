"""CIFAR-10 and CIFAR-100 as their authors publish them: pickled batches, read without running them.

A pickle is a program. These may only build dictionaries, lists, numbers and bytes; where one asks
for a numpy array it gets a stand-in that takes down shape and bytes, and anything else it asks for
is refused before it is even imported.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from kedge.data.datasets.checks import check_lengths, inputs, reading, targets
from kedge.data.datasets.dataset import Array, Found
from kedge.data.datasets.find import cifar_folder
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
) -> Found:
    """CIFAR-10 and CIFAR-100 as their authors publish them for Python."""
    parts, ys, names = [], [], None
    for path in paths:
        folder = cifar_folder(path)
        if folder is None:
            raise DataError(
                f"{path}: neither data_batch_1 (CIFAR-10) nor train, test, meta (CIFAR-100)"
            )
        ten = (folder / BATCHES[0]).is_file()
        if ten and labels == "coarse":
            raise FieldError("labels=coarse is for CIFAR-100; CIFAR-10 has one set of labels")
        key = "labels" if ten else f"{labels}_labels"
        train, test = (BATCHES, ("test_batch",)) if ten else (("train",), ("test",))
        names = _names(folder, ten, labels) or names
        for files in (train, test):
            batches = [_batch(folder / file, key) for file in files]
            ys += [
                (f"{folder / file}: {key}", y) for file, (_, y) in zip(files, batches, strict=True)
            ]
            parts.append([x for x, _ in batches])
    known = len(names) if names else (limit if labels == "fine" else 20)
    found, task, outputs = targets(ys, limit=known)
    label = iter(found)
    joined = [(np.concatenate(xs), np.concatenate([next(label) for _ in xs])) for xs in parts]
    pairs = zip(joined[::2], joined[1::2], strict=True)
    return Found([{"train": a, "test": b} for a, b in pairs], task, outputs, names)


def _batch(path: Path, key: str) -> tuple[Array, Array]:
    """Images [n, 3, 32, 32] and labels of one file."""
    content = _unpickle(path)
    data, labels = content.get(b"data"), content.get(key.encode())
    if not isinstance(data, _Stand) or not isinstance(labels, list):
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


def _names(folder: Path, ten: bool, labels: str) -> tuple[str, ...] | None:
    path = folder / ("batches.meta" if ten else "meta")
    if not path.is_file():
        return None
    found = _unpickle(path).get(b"label_names" if ten else f"{labels}_label_names".encode())
    good = isinstance(found, list) and all(isinstance(n, (bytes, str)) for n in found)
    return tuple(map(_text, found)) if good and found else None


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _unpickle(path: Path) -> dict[Any, Any]:
    """The dictionary in a CIFAR file; its keys as bytes whichever Python wrote it."""
    if not path.is_file():
        raise DataError(f"{path}: missing; unpack all of the CIFAR archive")
    with reading(path, "a CIFAR batch"):
        data = path.read_bytes()
        if not data:
            raise DataError(f"{path}: the file is empty (0 bytes)")
        content = _Restricted(path, data).load()
    if not isinstance(content, dict):
        raise DataError(f"{path}: not a CIFAR batch but a {type(content).__name__}")
    return {k.encode() if isinstance(k, str) else k: v for k, v in content.items()}


class _Stand:
    """Stands for an array or a dtype while unpickling; numpy never sees unchecked values."""

    def __init__(self, *given: Any) -> None:
        self.given, self.state = given, ()

    def __setstate__(self, state: Any) -> None:
        self.state = state if isinstance(state, tuple) else ()

    def array(self, where: str) -> Array:
        match self.state or self.given:
            case (_, tuple(shape), _Stand(given=(kind, *_)), fortran, bytes(raw)):  # __reduce__
                order = "F" if fortran else "C"
            case (bytes(raw) | bytearray(raw), _Stand(given=(kind, *_)), tuple(shape), order):
                pass  # _frombuffer, of pickle protocol 5
            case _:
                raise DataError(f"{where} is not an array of bytes")
        if _text(kind) not in ("u1", "|u1", "uint8"):
            raise DataError(f"{where} has type {_text(kind)[:20]}; CIFAR's images are uint8 ('u1')")
        if not all(isinstance(n, int) and n >= 0 for n in shape) or len(raw) != math.prod(shape):
            raise DataError(f"{where} announces shape {shape} but holds {len(raw)} bytes")
        return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if order == "F" else "C")


def _encode(text: str = "", codec: str = "latin1") -> bytes:
    return text.encode("latin1")  # how Python 3 writes bytes for Python 2


_ALLOWED: dict[tuple[str, str], Any] = {("numpy", "ndarray"): _Stand, ("numpy", "dtype"): _Stand}
_ALLOWED |= {(f"numpy.{core}.multiarray", "_reconstruct"): _Stand for core in ("core", "_core")}
_ALLOWED |= {(f"numpy.{core}.numeric", "_frombuffer"): _Stand for core in ("core", "_core")}
_ALLOWED |= {("_codecs", "encode"): _encode, ("__builtin__", "bytes"): _encode}


class _Restricted(pickle.Unpickler):
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
