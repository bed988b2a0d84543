"""Arrays from outside: what is wrong with them, in words, and the form that the rest relies on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kedge.core.labels import check_rows, finite_float
from kedge.core.task import Classification, MultiLabel, Task, tasks
from kedge.data.datasets.dataset import Array, TaskOption
from kedge.errors import DataError, KedgeError
from kedge.schema import Option


@contextmanager
def reading(path: object, what: str) -> Iterator[None]:
    """Turn whatever a decoder raises on damaged bytes into one DataError that names the file.

    numpy, zipfile, zlib, Pillow and pickle raise some twenty kinds of exceptions between them, so
    this catches all; only calls into them belong inside.
    """
    try:
        yield
    except KedgeError:
        raise
    except (PermissionError, FileNotFoundError, IsADirectoryError) as error:
        raise DataError(f"{path}: {(error.strerror or 'cannot be opened').lower()}") from error
    except Exception as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(
            f"{path}: cannot be read as {what} ({said}). It is damaged, cut short or of another "
            "kind; copy or download it again"
        ) from error


def check_task(task: str | None) -> None:
    Option("task", TaskOption).check(task)


def check_lengths(where_x: str, x: Array, where_y: str, y: Array) -> None:
    if x.ndim and y.ndim and len(x) != len(y):
        raise DataError(
            f"{where_x} has {len(x)} rows and {where_y} has {len(y)}; each sample needs a label"
        )


def inputs(x: Array, where: str) -> Array:
    """Images as uint8 or float32 ``[n, C, H, W]``, tables as float32 ``[n, F]``."""
    if x.dtype.kind not in "uifb":
        raise DataError(
            f"{where} has type {x.dtype}; samples must be numbers, best uint8 or float32"
        )
    if x.ndim not in (2, 3, 4):
        raise DataError(
            f"{where} has shape {x.shape}; it must be [rows, columns] for a table or "
            "[images, height, width] or [images, height, width, channels] for images"
        )
    if x.size == 0:
        raise DataError(f"{where} is empty (shape {x.shape})")
    if x.ndim > 2 and x.dtype.kind != "f":
        x = _bytes(x, where)
    else:
        x = finite_float(x, where)
    shape = channels_first(x.shape[1:])
    if shape is None:
        raise DataError(f"{where} has shape {x.shape}, where no axis is 1, 3 or 4 channels")
    if shape != x.shape[1:] and x.ndim == 4:
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return x.reshape(len(x), *shape)


def channels_first(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """What samples stored in this shape become; channels may come last, first or not at all."""
    if len(shape) == 2:
        return (1, *shape)
    if len(shape) == 1:
        return shape
    for channels in ((1, 3), (4,)):  # [3, 5, 4] is colour of 5x4, not four channels of 3x5
        if shape[2] in channels:
            return (shape[2], shape[0], shape[1])
        if shape[0] in channels:
            return shape
    return None


def _bytes(x: Array, where: str) -> Array:
    if x.dtype.kind == "b":
        return x.astype(np.uint8) * 255
    wrong = (x < 0) | (x > 255) if x.dtype != np.uint8 else None
    if wrong is not None and wrong.any():
        at = np.argwhere(wrong)[0]
        raise DataError(
            f"{where}, row {at[0]}: pixel value {x[tuple(at)]} of type {x.dtype}; "
            "images must be uint8 (0 to 255), or float"
        )
    return x.astype(np.uint8, copy=False)


def targets(
    ys: Sequence[tuple[str, Array]], task: str | None = None, limit: int | None = None
) -> tuple[list[Array], str, int]:
    """All label arrays of a dataset (where each is, itself) in one form; the task; the outputs.

    Without a task: whole numbers are classes, rows of 0 and 1 are labels (classes where every row
    has exactly one 1), and anything else must be asked for. ``limit`` is the number of classes.
    """
    check_task(task)
    ys = [(where, _flat(y, where)) for where, y in ys]
    if len({y.shape[1:] for _, y in ys}) > 1:
        shapes = ", ".join(f"{where} {y.shape}" for where, y in ys)
        raise DataError(f"label arrays of different shapes: {shapes}")
    wanted = tasks[task] if task else _meant(ys)
    arrays, outputs = wanted.read(ys, limit)
    return arrays, wanted.name, outputs


def _meant(ys: Sequence[tuple[str, Array]]) -> type[Task]:
    """The task of labels of which nothing is said."""
    where, first = ys[0]
    if any(y.dtype.kind == "f" for _, y in ys):
        raise DataError(
            f"{where} has type {first.dtype}: classes are whole numbers; save them as int64, or "
            "write task=regression to predict numbers"
        )
    if first.ndim == 2 and not all(MultiLabel.one_hot(y, at) for at, y in ys):
        return MultiLabel
    return Classification


def _flat(y: Array, where: str) -> Array:
    if y.dtype.kind not in "uifb":
        raise DataError(
            f"{where} has type {y.dtype}; labels must be whole numbers from 0 "
            "(numpy.unique(y, return_inverse=True)[1] makes them); names may go into 'classes'"
        )
    if y.ndim not in (1, 2):
        raise DataError(f"{where} has shape {y.shape}; labels must be [rows] or [rows, labels]")
    if y.size == 0:
        raise DataError(f"{where} is empty (shape {y.shape})")
    if y.dtype.kind == "f":
        check_rows(~np.isfinite(y), y, where, "is not a finite number")
    return y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
