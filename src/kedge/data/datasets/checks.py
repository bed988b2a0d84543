"""Checks of files and of label arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kedge.core.labels import check_rows
from kedge.core.task import Classification, MultiLabel, Task, tasks
from kedge.data.datasets.dataset import Array, TaskOption
from kedge.errors import DataError, KedgeError
from kedge.limits import host_available
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


def check_memory(where: object, size: int) -> None:
    """Raise a DataError if ``size`` bytes, as headers announce them, are more than is free."""
    free = host_available()
    if size > free:
        raise DataError(
            f"{where}: {size / 1e9:.1f} GB of memory are needed, and {free / 1e9:.1f} GB are free; "
            "use less data, or a machine with more memory"
        )


def check_task(task: str | None) -> None:
    """Raise a FieldError unless ``task`` is None or the name of a task."""
    Option("task", TaskOption).check(task)


def check_lengths(where_x: str, x: Array, where_y: str, y: Array) -> None:
    """Raise a DataError unless there are as many labels as inputs."""
    if x.ndim and y.ndim and len(x) != len(y):
        raise DataError(
            f"{where_x} has {len(x)} rows and {where_y} has {len(y)}; each sample needs a label"
        )


def targets(
    ys: Sequence[tuple[str, Array]],
    task: str | None = None,
    limit: int | None = None,
    trains: Sequence[bool] | None = None,
) -> tuple[list[Array], str, int]:
    """Convert all label arrays of a dataset.

    Args:
        ys: pairs of a location, for messages, and a label array ``[n]`` or ``[n, outputs]``.
        task: name of the task. If None, whole numbers are classes, and rows of 0 and 1 are
            multilabel (classes if every row has exactly one 1).
        limit: number of classes, if known.
        trains: for each array, whether it holds labels of training rows; all do if None. Without
            ``limit``, every class must occur in one of them.

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
    if task_type.one_class and limit is None and trains is not None and ys[0][1].ndim == 1:
        seen = np.unique(np.concatenate([y for y, t in zip(arrays, trains, strict=True) if t]))
        what = f"occurs in no training row; those have {_listed(seen)}"
        for (where, _), y in zip(ys, arrays, strict=True) if len(seen) > 1 else ():
            check_rows(~np.isin(y, seen), y, where, what)
    return arrays, task_type.name, outputs


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
