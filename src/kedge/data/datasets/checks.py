"""Checks of arrays read from files, and their conversion to the shapes and types of a Dataset."""

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
    """Convert any exception of a decoder into a DataError that names the file.

    numpy, zipfile, zlib, Pillow and pickle raise some twenty types of exceptions on damaged files,
    so this catches all of them. Only calls of decoders belong in the block.

    Args:
        path: the file that is read.
        what: its format, such as ``"an IDX file"``.
    """
    try:
        yield
    except KedgeError:
        raise
    except (PermissionError, FileNotFoundError, IsADirectoryError) as error:
        raise DataError(f"{path}: {(error.strerror or 'cannot be opened').lower()}") from error
    except Exception as error:
        message = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(
            f"{path}: cannot be read as {what} ({message}). It is damaged, cut short or of another "
            "kind; copy or download it again"
        ) from error


def check_task(task: str | None) -> None:
    """Raise a FieldError unless ``task`` is None or the name of a task."""
    Option("task", TaskOption).check(task)


def check_lengths(where_x: str, x: Array, where_y: str, y: Array) -> None:
    """Raise a DataError unless there are as many labels as inputs."""
    if x.ndim and y.ndim and len(x) != len(y):
        raise DataError(
            f"{where_x} has {len(x)} rows and {where_y} has {len(y)}; each sample needs a label"
        )


def inputs(x: Array, where: str) -> Array:
    """Convert images to uint8 or float32 ``[n, C, H, W]``, tables to float32 ``[n, F]``."""
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
        x = _to_uint8(x, where)
    else:
        x = finite_float(x, where)
    shape = channels_first(x.shape[1:])
    if shape is None:
        raise DataError(f"{where} has shape {x.shape}, where no axis is 1, 3 or 4 channels")
    if shape != x.shape[1:] and x.ndim == 4:
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return x.reshape(len(x), *shape)


def channels_first(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape ``(C, H, W)`` of samples stored channels-last, channels-first or without channels.

    One-dimensional shapes (tables) are returned unchanged; None means that no axis can be channels.
    """
    if len(shape) == 2:
        return (1, *shape)
    if len(shape) == 1:
        return shape
    for channels in ((1, 3), (4,)):  # [3, 5, 4] is a 5x4 RGB image, not 3x5 with four channels
        if shape[2] in channels:
            return (shape[2], shape[0], shape[1])
        if shape[0] in channels:
            return shape
    return None


def _to_uint8(x: Array, where: str) -> Array:
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
    """Convert all label arrays of a dataset.

    Args:
        ys: pairs of a location, for messages, and a label array ``[n]`` or ``[n, outputs]``.
        task: name of the task. If None, whole numbers are classes, and rows of 0 and 1 are
            multilabel (classes if every row has exactly one 1).
        limit: number of classes, if known.

    Returns:
        The converted arrays, the name of the task, and the number of outputs.

    Raises:
        DataError: the labels do not suit the task, or the task cannot be inferred.
    """
    check_task(task)
    ys = [(where, _check_array(y, where)) for where, y in ys]
    if len({y.shape[1:] for _, y in ys}) > 1:
        shapes = ", ".join(f"{where} {y.shape}" for where, y in ys)
        raise DataError(f"label arrays of different shapes: {shapes}")
    task_type = tasks[task] if task else _infer_task(ys)
    arrays, outputs = task_type.read(ys, limit)
    return arrays, task_type.name, outputs


def _infer_task(ys: Sequence[tuple[str, Array]]) -> type[Task]:
    """The task that the labels suggest."""
    where, first = ys[0]
    if any(y.dtype.kind == "f" for _, y in ys):
        raise DataError(
            f"{where} has type {first.dtype}: classes are whole numbers; save them as int64, or "
            "write task=regression to predict numbers"
        )
    if first.ndim == 2 and not all(MultiLabel.one_hot(y, at) for at, y in ys):
        return MultiLabel
    return Classification


def _check_array(y: Array, where: str) -> Array:
    """The labels, with ``[n, 1]`` flattened to ``[n]``."""
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
