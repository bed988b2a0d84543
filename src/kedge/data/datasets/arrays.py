"""Input and label arrays of files, converted to the shapes and types of a Dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import numpy as np

from kedge.core.labels import check_rows, finite_float
from kedge.core.task import Classification, MultiLabel, Task, tasks
from kedge.data.datasets.dataset import Array, Pair, ReadResult, TaskOption, join
from kedge.errors import DataError
from kedge.schema import Doc, Option

InputKind = Literal["auto", "table", "tokens", "series", "image", "volume"]
KindOption = Annotated[InputKind, Doc("what the inputs are, e.g. kind=series; guessed from shape")]
MIN_SERIES_RATIO = 4  # steps per channel from which an array of floats is taken for series
LAYOUTS = {
    "table": "[rows, columns]",
    "tokens": "[rows, tokens]",
    "series": "[rows, channels, time] or [rows, time]",
    "image": "[rows, height, width], with channels first or last if there are several",
    "volume": "[rows, depth, height, width], with channels first or last if there are several",
}
_AXES = {"table": (2,), "tokens": (2,), "series": (2, 3), "image": (3, 4), "volume": (4, 5)}


def inputs(x: Array, where: str, kind: str = "auto") -> Array:
    """Convert an array of inputs.

    ========  ==============================================================================
    kind      result
    ========  ==============================================================================
    table     float32 ``[n, F]``
    tokens    int64 ``[n, T]``, never scaled
    series    float32 ``[n, C, T]``
    image     ``[n, C, H, W]``: uint8, or float32; 16-bit pixels are divided by 65535
    volume    ``[n, C, D, H, W]``, as images
    ========  ==============================================================================

    ``auto`` takes two axes for a table, three or four for images and five for volumes. Three axes
    of floats are series if there are at least four times as many steps as channels, images if they
    are square, and otherwise an error that asks for ``kind``.

    Raises:
        DataError: the array is empty, has no numbers, or does not suit the kind.
    """
    if x.dtype.kind not in "uifb":
        raise DataError(
            f"{where} has type {x.dtype}; samples must be numbers, best uint8 or float32"
        )
    if x.ndim not in (2, 3, 4, 5):
        raise DataError(
            f"{where} has shape {x.shape}; it must be [rows, columns] for a table or "
            "[images, height, width] or [images, height, width, channels] for images"
        )
    if x.size == 0:
        raise DataError(f"{where} is empty (shape {x.shape})")
    if kind == "auto":
        kind = guess_kind(x.shape[1:], x.dtype, where)
    if x.ndim not in _AXES[kind]:
        raise DataError(f"{where} has shape {x.shape}; kind={kind} needs {LAYOUTS[kind]}")
    if kind == "tokens":
        return _tokens(x, where)
    if kind in ("table", "series"):
        x = finite_float(x, where)
        return x[:, None] if kind == "series" and x.ndim == 2 else x
    x = finite_float(x, where) if x.dtype.kind == "f" else _pixels(x, where)
    spatial = 2 if kind == "image" else 3
    shape = channels_first(x.shape[1:], spatial)
    if shape is None:
        other = " For volumes without channels write kind=volume" if kind == "image" else ""
        raise DataError(f"{where} has shape {x.shape}, where no axis is 1, 3 or 4 channels.{other}")
    if shape != x.shape[1:] and x.ndim == spatial + 2:
        return np.ascontiguousarray(np.moveaxis(x, -1, 1))
    return x.reshape(len(x), *shape)


def guess_kind(shape: tuple[int, ...], dtype: np.dtype, where: str) -> InputKind:
    """The kind of inputs of a shape, without rows, as :func:`inputs` says.

    >>> guess_kind((3, 100), np.dtype("f4"), ""), guess_kind((28, 28), np.dtype("u1"), "")
    ('series', 'image')
    """
    if len(shape) != 2:
        return "table" if len(shape) == 1 else "image" if len(shape) == 3 else "volume"
    channels, steps = shape
    if dtype.kind != "f" or channels == steps:
        return "image"
    if steps >= MIN_SERIES_RATIO * channels:
        return "series"
    raise DataError(
        f"{where} has samples of shape {channels}x{steps}, which could be a series or an image; "
        f"write kind=series for {LAYOUTS['series']}, or kind=image"
    )


def channels_first(shape: tuple[int, ...], spatial: int = 2) -> tuple[int, ...] | None:
    """The shape ``(C, H, W)`` of samples stored channels-last, channels-first or without channels.

    One-dimensional shapes (tables) are returned unchanged; None means that no axis can be channels.
    ``spatial`` is 2 for images and 3 for volumes.
    """
    if len(shape) == spatial:
        return (1, *shape)
    if len(shape) == 1:
        return shape
    for channels in ((1, 3), (4,)):  # [3, 5, 4] is a 5x4 RGB image, not 3x5 with four channels
        if shape[-1] in channels:
            return (shape[-1], *shape[:-1])
        if shape[0] in channels:
            return shape
    return None


def _tokens(x: Array, where: str) -> Array:
    wrong = (x < 0) | (x != np.floor(x)) if x.dtype.kind == "f" else x < 0
    if x.dtype.kind == "f":
        wrong |= ~np.isfinite(x)
    if wrong.any():
        at = np.argwhere(wrong)[0]
        raise DataError(
            f"{where}, row {at[0]}, column {at[1]}: {x[tuple(at)]} is no token id; these are whole "
            "numbers from 0"
        )
    return x.astype(np.int64)


def _pixels(x: Array, where: str) -> Array:
    """Whole numbers as uint8; 16-bit ones as float32 from 0 to 1, whatever their range."""
    if x.dtype.kind == "b":
        return x.astype(np.uint8) * 255
    if x.dtype == np.uint16:
        return deep_pixels(x)
    wrong = (x < 0) | (x > 255) if x.dtype != np.uint8 else None
    if wrong is not None and wrong.any():
        at = np.argwhere(wrong)[0]
        raise DataError(
            f"{where}, row {at[0]}: pixel value {x[tuple(at)]} of type {x.dtype}; "
            "images must be uint8 (0 to 255), uint16 or float; for series write kind=series"
        )
    return x.astype(np.uint8, copy=False)


def deep_pixels(x: Array) -> Array:
    """16-bit pixels as float32 from 0 to 1."""
    return np.divide(x, np.float32(65535), dtype=np.float32)


# -- labels ----------------------------------------------------------------------------------------


def check_task(task: str | None) -> None:
    """Raise a FieldError unless ``task`` is None or the name of a task."""
    Option("task", TaskOption).check(task)


def check_lengths(where_x: str, x: Array, where_y: str, y: Array) -> None:
    """Raise a DataError unless there are as many labels as inputs."""
    if x.ndim and y.ndim and len(x) != len(y):
        raise DataError(
            f"{where_x} has {len(x)} rows and {where_y} has {len(y)}; each sample needs a label"
        )


class LabelledArray(NamedTuple):
    """Inputs and labels of one split of one path, or a piece of it, as they stand in the file."""

    path: int  # its number
    split: str
    x: Array
    where: str  # the labels, for messages
    y: Array


def assemble_labels(
    arrays: Sequence[LabelledArray],
    paths: int,
    task: str | None = None,
    limit: int | None = None,
    names: tuple[str, ...] | None = None,
) -> ReadResult:
    """What a reader returns, with labels ``[n]`` or ``[n, outputs]`` converted for the task.

    Args:
        arrays: all arrays of a dataset; pieces of one split follow each other.
        paths: number of paths.
        task: name of the task. If None, whole numbers are classes, and rows of 0 and 1 are
            multilabel (classes if every row has exactly one 1).
        limit: number of classes, if known; otherwise every class must occur in a training row.
        names: names of the classes, dropped if they are not as many as the outputs.

    Raises:
        DataError: the labels do not suit the task, or the task cannot be inferred.
    """
    check_task(task)
    ys = [(a.where, _check_array(a.y, a.where)) for a in arrays]
    if len({y.shape[1:] for _, y in ys}) > 1:
        shapes = ", ".join(f"{where} {y.shape}" for where, y in ys)
        raise DataError(f"label arrays of different shapes: {shapes}")
    task_type = tasks[task] if task else _infer_task(ys)
    labels, outputs = task_type.read(ys, limit)
    if task_type.one_class and limit is None and ys[0][1].ndim == 1:
        trained = [y for a, y in zip(arrays, labels, strict=True) if a.split == "train"]
        seen = np.unique(np.concatenate(trained))
        what = f"occurs in no training row; those have {_listed(seen)}"
        for a, y in zip(arrays, labels, strict=True) if len(seen) > 1 else ():
            check_rows(~np.isin(y, seen), y, a.where, what)
    pieces: list[dict[str, list[Pair]]] = [{} for _ in range(paths)]
    for a, y in zip(arrays, labels, strict=True):
        pieces[a.path].setdefault(a.split, []).append((a.x, y))
    sources = [{split: join(own) for split, own in source.items()} for source in pieces]
    known = names if names and len(names) == outputs else None
    return ReadResult(sources, task_type.name, outputs, known)


def _listed(labels: Array) -> str:
    shown = ", ".join(map(str, labels[:10].tolist()))
    return f"{shown}, ..." if len(labels) > 10 else shown


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
