"""Arrays from outside: what is wrong with them, in words, and the form that the rest relies on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

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


def finite_float(x: Array, where: str) -> Array:
    """As float32, after checking that every value is a number that float32 can hold."""
    with np.errstate(over="ignore"):
        small = x.astype(np.float32, copy=False)
    good = np.isfinite(small)
    if not good.all():
        at = np.argwhere(~good)[0]
        column = f", column {at[1]}" if x.ndim == 2 else ""
        raise DataError(
            f"{where}, row {at[0]}{column}: {x[tuple(at)]} is not a finite float32 number; "
            "fill it in or delete the row"
        )
    return small


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
    where, first = ys[0]
    if task is None and any(y.dtype.kind == "f" for _, y in ys):
        raise DataError(
            f"{where} has type {first.dtype}: classes are whole numbers; save them as int64, or "
            "write task=regression to predict numbers"
        )
    if first.ndim == 2 and task != "regression":
        for at, y in ys:
            _check(~np.isin(y, (0, 1)), y, at, "is neither 0 nor 1, as labels must be")
        one_hot = all((y.sum(1) == 1).all() for _, y in ys)
        if task == "multilabel" or (task is None and not one_hot):
            return [y.astype(np.float32) for _, y in ys], "multilabel", first.shape[1]
        if not one_hot:
            raise DataError(f"{where}: rows with several labels; write task=multilabel")
        return [y.argmax(1).astype(np.int64) for _, y in ys], "classification", first.shape[1]
    if task == "multilabel":
        raise DataError(f"{where} has shape {first.shape}; task=multilabel needs [rows, labels]")
    if task == "regression":
        numbers = [finite_float(y, at).reshape(len(y), -1) for at, y in ys]
        return numbers, "regression", numbers[0].shape[1]
    return _classes(ys, limit)


def _classes(ys: Sequence[tuple[str, Array]], limit: int | None) -> tuple[list[Array], str, int]:
    for at, y in ys:
        _check(y != np.floor(y), y, at, "is not a whole number, as classes must be")
        _check(y < 0, y, at, "is negative; classes count from 0")
        if limit is not None:
            _check(
                y >= limit, y, at, f"is out of range: there are {limit} classes, 0 to {limit - 1}"
            )
    outputs = limit or 1 + max(int(y.max()) for _, y in ys)
    used = len(np.unique(np.concatenate([np.unique(y) for _, y in ys])))
    if limit is None and outputs > 2 * used + 1:
        at, y = max(ys, key=lambda entry: entry[1].max())
        raise DataError(
            f"{at}, row {int(y.argmax())}: label {y.max()} is out of range, as only "
            f"{used} different labels occur; number classes from 0 "
            "(numpy.unique(y, return_inverse=True)[1])"
        )
    return [y.astype(np.int64) for _, y in ys], "classification", outputs


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
        _check(~np.isfinite(y), y, where, "is not a finite number")
    return y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y


def _check(wrong: Array, y: Array, where: str, what: str) -> None:
    if wrong.any():
        at = np.argwhere(wrong)[0]
        raise DataError(f"{where}, row {at[0]}: label {y[tuple(at)]} {what}")
