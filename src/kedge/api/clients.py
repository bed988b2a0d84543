"""Clients as users have them, as a dataset: arrays, torch datasets or DataFrames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from kedge.core.task import guess_task, tasks
from kedge.data.datasets import Dataset
from kedge.data.encodings import ArrayEncoding
from kedge.errors import DataError, FieldError

Array = np.ndarray[Any, Any]


class Pair(NamedTuple):
    """Inputs and labels of one client, or of the test set."""

    name: str
    x: Array
    y: Array


def read_clients(
    clients: Any, label: Any = None, test: Any = None, task: str = "auto", **columns: Any
) -> Dataset:
    """The samples of all clients as a dataset, whose silos are the clients.

    Args:
        clients: one entry per client, by name or in a sequence: a pair of inputs and labels, a
            ``torch.utils.data.Dataset`` of pairs, or a DataFrame.
        label: the label column of DataFrames, or several.
        test: a test set of the same kinds, or a mapping with one DataFrame per client.
        task: name of the task, or ``auto``.
        **columns: further options for DataFrames, see :func:`dataset_of_frames`.

    Raises:
        DataError: the samples of a client are missing, malformed or not finite.
        FieldError: there is no such task.
    """
    if task != "auto" and task not in tasks:
        raise FieldError(f"task = {task!r} is not one of: {', '.join(tasks)}")
    named = _named(clients)
    frames = [_is_frame(own) for own in named.values()]
    if any(frames):
        if not all(frames):
            wrong = list(named)[frames.index(False)]
            raise DataError(f"{wrong} is no DataFrame, but other clients are; give one kind")
        if label is None:
            columns_there = ", ".join(map(str, next(iter(named.values())).columns))
            raise DataError(f"clients are DataFrames: name the label, one of {columns_there}")
        return _frames(named, label, test, task, columns)
    if label is not None or columns:
        given = "label" if label is not None else next(iter(columns))
        raise DataError(f"{given} is for DataFrames, but {next(iter(named))} is none")
    pairs = [_pair(name, own) for name, own in named.items()]
    tests = [] if test is None else [_pair("the test set", test)]
    return _assemble(pairs, tests, task)


def _frames(
    named: Mapping[str, Any], label: Any, test: Any, task: str, columns: dict[str, Any]
) -> Dataset:
    from kedge.data.datasets.tables.read import dataset_of_frames

    if test is not None and not _is_frame(test) and not isinstance(test, Mapping):
        raise DataError("the test set is no DataFrame, but the clients are; give one kind")
    chosen = None if task == "auto" else task
    return dataset_of_frames(named, label, task=chosen, test=test, **columns)


def _named(clients: Any) -> dict[str, Any]:
    """The clients by name; those of a sequence are numbered."""
    if isinstance(clients, Mapping):
        named = {str(name): own for name, own in clients.items()}
    elif isinstance(clients, (TorchDataset, DataLoader)) or _is_frame(clients):
        raise DataError("clients is one dataset; give one for each client, in a list or by name")
    else:
        if isinstance(clients, (str, bytes)) or not hasattr(clients, "__iter__"):
            raise DataError("clients must be a list of (inputs, labels), one per client")
        named = {f"client {k}": own for k, own in enumerate(clients)}
    if not named:
        raise DataError("there are no clients; give a list of (inputs, labels), one per client")
    return named


def _is_frame(value: Any) -> bool:
    """Whether a value is a DataFrame, without importing pandas."""
    return type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "columns")


# -- pairs ------------------------------------------------------------------------------------


def _pair(name: str, own: Any) -> Pair:
    """The samples of one client as two arrays."""
    if isinstance(own, DataLoader):
        raise DataError(f"{name} is a DataLoader; give its dataset (loader.dataset)")
    if isinstance(own, TorchDataset):
        own = _items(name, own)
    if not isinstance(own, (tuple, list)) or len(own) != 2:
        raise DataError(f"{name} is not a pair of inputs and labels")
    x, y = (_array(v) for v in own)
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        counts = [len(v) if v.ndim else "no" for v in (x, y)]
        raise DataError(f"{name} has {counts[0]} inputs but {counts[1]} labels")
    if len(x) == 0:
        raise DataError(f"{name} has no samples; leave it out")
    if x.dtype.kind not in "biuf":
        raise DataError(
            f"{name} holds {'objects' if x.dtype.kind == 'O' else 'texts'}; give numbers of one "
            "shape, or a DataFrame with label="
        )
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        bad = int(np.flatnonzero(~np.isfinite(x).reshape(len(x), -1).all(1))[0])
        raise DataError(f"{name} has NaN or infinite inputs, first in row {bad}")
    return Pair(name, x, y)


def _array(values: Any) -> Array:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    try:
        return np.asarray(values)
    except ValueError:  # rows of different lengths
        return np.empty(len(values), object)


def _items(name: str, dataset: TorchDataset[Any]) -> tuple[Any, Any]:
    """All items ``(x, y)`` of a map-style dataset, stacked."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(
            f"{name} is an iterable dataset without a length; give one with __getitem__ and "
            "__len__, or two arrays"
        )
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return dataset.tensors
    items = [dataset[i] for i in range(len(dataset))]
    if not items:
        return np.zeros((0, 1)), np.zeros(0)
    wrong = next((i for i in items if not isinstance(i, (tuple, list)) or len(i) != 2), None)
    if wrong is not None:
        raise DataError(f"items of {name} are not pairs (input, label); the first is {wrong!r:.80}")
    xs, ys = ([_array(v) for v in column] for column in zip(*items, strict=True))
    shapes = sorted({v.shape for v in xs})
    if len(shapes) > 1:
        raise DataError(
            f"inputs of {name} have different shapes, such as {shapes[0]} and {shapes[1]}; pad or "
            "resize them to one"
        )
    return np.stack(xs), np.stack(ys)


# -- the dataset ------------------------------------------------------------------------------


def _assemble(pairs: Sequence[Pair], tests: Sequence[Pair], task: str) -> Dataset:
    every, first = [*pairs, *tests], pairs[0]
    for own in every[1:]:
        if own.x.shape[1:] != first.x.shape[1:]:
            raise DataError(
                f"{own.name} has inputs of shape {own.x.shape[1:]}, "
                f"{first.name} of {first.x.shape[1:]}"
            )
        if own.y.shape[1:] != first.y.shape[1:]:
            raise DataError(
                f"{own.name} has labels of shape {own.y.shape[1:]}, "
                f"{first.name} of {first.y.shape[1:]}"
            )
    numbers, classes = _labels(pairs, tests)
    joined = np.concatenate([y for _, y in numbers[: len(pairs)]])
    name = guess_task(joined) if task == "auto" else task
    labels, outputs = _read(name, numbers, classes)
    x = np.concatenate([own.x for own in pairs])
    groups = np.repeat(np.arange(len(pairs)), [len(own.x) for own in pairs])
    kept = np.result_type(*(own.x.dtype for own in every))
    return Dataset(
        name="own",
        x_train=_stored(x, kept),
        y_train=np.concatenate(labels[: len(pairs)]),
        mean=np.zeros(1, np.float32),
        std=np.ones(1, np.float32),
        task=name,
        outputs=outputs,
        x_test=_stored(tests[0].x, kept) if tests else None,
        y_test=labels[-1] if tests else None,
        classes=classes,
        groups=groups,
        group_names=tuple(own.name for own in pairs),
    )


def _stored(x: Array, dtype: Any) -> Array:
    """8-bit values and whole numbers stay what they are; others are float32."""
    if dtype == np.uint8:
        return x
    return x.astype(np.int64 if dtype.kind in "iu" else np.float32, copy=False)


def _labels(
    pairs: Sequence[Pair], tests: Sequence[Pair]
) -> tuple[list[tuple[str, Array]], tuple[str, ...] | None]:
    """Labels of all clients and of the test set, as numbers, and the names of the classes."""
    ys = [(own.name, _plain(own)) for own in [*pairs, *tests]]
    if not any(y.dtype.kind in "US" for _, y in ys):
        return ys, None
    for name, y in ys:
        if y.dtype.kind not in "US":
            raise DataError(f"labels of {name} are numbers, those of other clients are texts")
        if y.ndim != 1:
            raise DataError(f"labels of {name} are texts of shape {y.shape}; give one per sample")
    training = np.concatenate([y for _, y in ys[: len(pairs)]])
    names = np.unique(training)  # sorted
    if len(names) < 2:
        raise DataError(f"all labels are {str(names[0])!r}; there is nothing to learn")
    encoded = []
    for name, y in ys:
        index = np.searchsorted(names, y).clip(0, len(names) - 1)
        unknown = names[index] != y
        if unknown.any():
            row = int(np.flatnonzero(unknown)[0])
            raise DataError(
                f"{name}, row {row}: the label {str(y[row])!r} does not occur in training, where "
                f"labels are {', '.join(map(str, names[:10]))}"
            )
        encoded.append((name, index.astype(np.int64)))
    return encoded, tuple(map(str, names))


def _plain(own: Pair) -> Array:
    """Labels as an array of numbers or texts."""
    y = own.y
    if y.dtype.kind == "O":
        kinds = {type(v) for v in y.flat}
        missing = [i for i, v in enumerate(y.flat) if v is None or v != v]
        if missing:
            raise DataError(f"{own.name}, row {missing[0]}: the label is missing")
        if kinds <= {str, np.str_}:
            return y.astype(str)
        if not all(issubclass(k, (int, float, np.number, np.bool_)) for k in kinds):
            words = ", ".join(sorted(k.__name__ for k in kinds))
            raise DataError(f"labels of {own.name} are of several types: {words}")
        return np.array(y.tolist())
    if y.dtype.kind not in "biufUS":
        raise DataError(f"labels of {own.name} are {y.dtype}; give numbers or texts")
    if y.ndim == 2 and y.shape[1] == 1 and y.dtype.kind in "biu":
        return y[:, 0]
    return y


def _read(
    task: str, labels: list[tuple[str, Array]], classes: tuple[str, ...] | None
) -> tuple[list[Array], int]:
    """Labels in the form of the task, and the number of outputs."""
    if classes is not None and not tasks[task].one_class:
        raise DataError(f"labels are texts, which task = {task} does not take")
    numbers = [(name, y.astype(np.int64) if y.dtype == bool else y) for name, y in labels]
    if tasks[task].one_class and classes is None:
        # the model says how many classes there are
        flat = np.concatenate([y for _, y in numbers])
        limit = None if flat.ndim > 1 else max(2, 1 + int(np.nan_to_num(flat).max()))
        return tasks[task].read(numbers, limit)
    return tasks[task].read(numbers, len(classes) if classes else None)


def check_test_labels(dataset: Dataset) -> None:
    """Raise a DataError for a class of the test set beyond those of the training, in numbers.

    A model with an output for it says that there is such a class, and is not asked here.
    """
    if dataset.y_test is None or dataset.classes or not tasks[dataset.task].one_class:
        return
    last = int(dataset.y_train.max())
    beyond = np.flatnonzero(dataset.y_test > last)
    if len(beyond):
        raise DataError(
            f"the test set, row {beyond[0]}: the label {dataset.y_test[beyond[0]]} does not occur "
            f"in training, where labels go up to {last}"
        )


def with_outputs(dataset: Dataset, outputs: int, tokens: bool) -> Dataset:
    """The dataset for a model with this many outputs, which takes whole numbers or not."""
    arrays: dict[str, Any] = {}
    if dataset.x_train.dtype == np.int64 and not tokens:
        for name in ("x_train", "x_test"):
            x = getattr(dataset, name)
            arrays[name] = None if x is None else x.astype(np.float32)
    dataset = replace(dataset, outputs=outputs, **arrays)
    if dataset.encoding is not None:
        return dataset
    stored = ArrayEncoding(dataset.shape, str(dataset.x_train.dtype), from_files=False)
    return replace(dataset, encoding=stored)
