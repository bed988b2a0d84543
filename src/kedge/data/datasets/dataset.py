"""The Dataset, and how it is assembled from what a reader returns."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, NamedTuple

import numpy as np

from kedge.core.task import tasks
from kedge.data.encoding import Encoding
from kedge.errors import DataError
from kedge.schema import Choice, Doc

Array = np.ndarray
Pair = tuple[Array, Array]
TaskName = Annotated[str, Choice(lambda: tuple(tasks))]
TaskOption = Annotated[TaskName | None, Doc("what the labels are; guessed if left out")]
SPLITS = ("train", "test", "val")


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Samples and labels in memory, not normalised.

    Attributes:
        name: name of the dataset.
        x_train: images, uint8 or float32 ``[n, C, H, W]``; a table, float32 ``[n, F]``; series,
            float32 ``[n, C, T]``; volumes, uint8 or float32 ``[n, C, D, H, W]``; or token ids,
            int64 ``[n, T]``. Images of 16 bits are float32, divided by 65535.
        y_train: int64 ``[n]`` for classification, float32 ``[n, outputs]`` for multilabel and
            regression.
        mean: mean per channel or column, after division of uint8 by 255; the published constants
            for CIFAR-10, CIFAR-100, MNIST and Fashion-MNIST. Token ids are not scaled: ``[0]``.
        std: standard deviation, likewise; ``[1]`` for token ids.
        task: name of the task.
        outputs: number of classes, labels or targets.
        x_test, y_test, x_val, y_val: test and validation set, or None.
        classes: names of the classes.
        columns: names of the columns of a table.
        groups: the silo of each training sample, ``[n]``, an index into ``group_names``.
        groups_test: the same of the test samples.
        group_names: names of the silos.
        encoding: how raw inputs become ``x_train``, or None.
    """

    name: str
    x_train: Array
    y_train: Array
    mean: Array
    std: Array
    task: str
    outputs: int
    x_test: Array | None = None
    y_test: Array | None = None
    x_val: Array | None = None
    y_val: Array | None = None
    classes: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    groups: Array | None = None
    groups_test: Array | None = None
    group_names: tuple[str, ...] | None = None
    encoding: Encoding | None = None

    @property
    def num_classes(self) -> int:
        """Number of classes, labels or targets: the outputs of a model."""
        return self.outputs

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.x_train.shape[1:])

    @property
    def kind(self) -> str:
        """What the inputs are: tokens, table, series, image or volume."""
        return kind_of(self.shape, self.x_train.dtype)

    @property
    def test(self) -> Pair | None:
        """Inputs and labels of the test set."""
        return None if self.x_test is None or self.y_test is None else (self.x_test, self.y_test)

    @property
    def val(self) -> Pair | None:
        """Inputs and labels of the validation set."""
        return None if self.x_val is None or self.y_val is None else (self.x_val, self.y_val)

    @property
    def is_image(self) -> bool:
        """Whether the inputs are images ``[C, H, W]``."""
        return len(self.shape) == 3

    @property
    def sizes(self) -> dict[str, int]:
        """Number of samples per split."""
        splits = {"train": self.x_train, "val": self.x_val, "test": self.x_test}
        return {split: len(x) for split, x in splits.items() if x is not None}

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with any sample, label, silo, class name or column.

        The SHA-256 of type, shape and bytes of all arrays. Mean and standard deviation follow from
        the samples and are left out, since their last bit may depend on the machine.
        """
        names = (self.task, self.outputs, self.classes, self.columns, self.group_names)
        digest = hashlib.sha256(repr(names).encode())
        splits = ("x_train", "y_train", "x_test", "y_test", "x_val", "y_val")
        for name in (*splits, "groups", "groups_test"):
            array = getattr(self, name)
            if array is not None:
                digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]

    def describe(self) -> str:
        """Summary in one line: ``digits: 1x8x8 images, 10 classes, 1438 train, 359 test``."""
        shape = "x".join(map(str, self.shape))
        plural = tasks[self.task].outputs_are
        unit = plural[:-1] if self.outputs == 1 else plural
        line = [f"{shape} {PLURALS[self.kind]}", f"{self.outputs} {unit}"]
        line += [f"{n} {split}" for split, n in self.sizes.items()]
        if self.group_names:
            line.append(f"{len(self.group_names)} silos")
        return f"{self.name}: " + ", ".join(line)

    def __repr__(self) -> str:
        return f"<Dataset {self.describe()}>"


PLURALS = {
    "tokens": "token ids", "table": "columns", "series": "series", "image": "images",
    "volume": "volumes", "array": "arrays",
}  # fmt: skip


def kind_of(shape: tuple[int, ...], dtype: np.dtype) -> str:
    """What inputs of this shape (without rows) and type are, as a :class:`Dataset` stores them."""
    if dtype == np.int64:
        return "tokens"
    return {1: "table", 2: "series", 3: "image", 4: "volume"}.get(len(shape), "array")


class ReadResult(NamedTuple):
    """What a reader returns."""

    sources: Sequence[Mapping[str, Pair]]  # for each path: split to inputs and labels
    task: str
    outputs: int
    classes: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    encoding: Encoding | None = None
    common_test: Pair | None = None  # test set of all paths together, in place of their own


def assemble(
    name: str,
    paths: Sequence[object],
    result: ReadResult,
    group_names: tuple[str, ...] | None = None,
    moments: Pair | None = None,
) -> Dataset:
    """Build a dataset from the result of a reader.

    Args:
        name: name of the dataset.
        paths: what was read; one path, or one per silo.
        result: what the reader returned.
        group_names: names of the silos, if the paths are silos.
        moments: mean and standard deviation; computed from the training data if None.

    Raises:
        DataError: shapes or splits differ between paths, or there is nothing to train on.
    """
    _check_shapes(paths, result)
    splits = {s: _pooled(paths, result, s) for s in SPLITS}
    if splits["train"] is None:
        raise DataError(f"{paths[0]}: there is no training data")
    x, y, groups = splits["train"]
    mean, std = moments or mean_and_std([source["train"][0] for source in result.sources])
    x_test, y_test, groups_test = splits["test"] or (None, None, None)
    if result.common_test is not None:
        x_test, y_test = result.common_test
    x_val, y_val, _ = splits["val"] or (None, None, None)
    dataset = Dataset(
        name, x, y, mean, std, result.task, result.outputs, x_test, y_test, x_val, y_val,
        result.classes, result.columns,
        groups if group_names else None, groups_test if group_names else None, group_names,
        result.encoding,
    )  # fmt: skip
    if tasks[result.task].one_class and len(np.unique(y)) < 2:
        only = result.classes[int(y[0])][:60] if result.classes else int(y[0])
        raise OneClass(
            f"{_describe(paths)}: all {len(y)} training samples are of one class ({only!r}); "
            "there is nothing to learn. Are the labels right?",
            dataset,
        )
    return dataset


class OneClass(DataError):
    """Training samples of one class: nothing to learn alone, but a fair share of a federation.

    ``dataset`` is what was read.
    """

    def __init__(self, message: str, dataset: Dataset) -> None:
        super().__init__(message)
        self.dataset = dataset

    def __reduce__(self) -> tuple[type, tuple[str, Dataset]]:
        return type(self), (str(self), self.dataset)


def mean_and_std(xs: Sequence[Array]) -> Pair:
    """Mean and standard deviation per channel or column; uint8 is scaled to 0..1.

    They are sums over silos; no samples are pooled. Each silo would send two messages: count and
    sum, lowest and highest value; then, once it knows the mean, the sum of squared deviations from
    it. For uint8 it is one message, how often each of the 256 values occurs.

    Args:
        xs: the training inputs of each silo, ``[n_k, C, ...]``.

    Returns:
        Mean and standard deviation, float32 ``[C]``. The standard deviation of a constant channel
        or column is 1. Token ids have mean 0 and standard deviation 1, ``[1]``.
    """
    axes = (0, *range(2, xs[0].ndim))
    if xs[0].dtype == np.int64:
        return np.zeros(1, np.float32), np.ones(1, np.float32)
    if xs[0].dtype == np.uint8:
        counts = np.sum([_pixel_counts(x) for x in xs], axis=0)  # [C, 256]
        p, value = counts / counts.sum(1, keepdims=True), np.arange(256) / 255
        mean = p @ value
        std = np.sqrt((p * (value - mean[:, None]) ** 2).sum(1))
        varies = (counts > 0).sum(1) > 1
    else:
        n = sum(x.size // x.shape[1] for x in xs)
        mean = sum(x.sum(axes, dtype=np.float64) for x in xs) / n
        centre = mean.reshape(-1, *(1,) * (xs[0].ndim - 2))
        std = np.sqrt(sum(np.square(x - centre).sum(axes) for x in xs) / n)
        low, high = np.min([x.min(axes) for x in xs], 0), np.max([x.max(axes) for x in xs], 0)
        varies = (low < high) & (std > np.finfo(np.float32).tiny)
    std = np.where(varies, std, 1.0)
    return mean.astype(np.float32), std.astype(np.float32)


def _pixel_counts(x: Array) -> Array:
    """How often each byte occurs, ``[C, 256]``: exact, without a float copy of the images."""
    channels = (np.ascontiguousarray(x[:, c]).ravel() for c in range(x.shape[1]))
    return np.stack([np.bincount(c, minlength=256) for c in channels])


def _check_shapes(paths: Sequence[object], result: ReadResult) -> None:
    first = None
    for path, source in zip(paths, result.sources, strict=True):
        for split, (x, _) in source.items():
            current = (x.shape[1:], x.dtype, f"{path} ({split})")
            first = first or current
            if current[:2] != first[:2]:
                raise DataError(
                    f"{current[2]} has samples of {_sample(*current[:2])}, but {first[2]} of "
                    f"{_sample(*first[:2])}; all samples of a dataset need the same shape and type"
                )


def _sample(shape: tuple[int, ...], dtype: np.dtype) -> str:
    return f"shape {'x'.join(map(str, shape))} and type {dtype}"


def _pooled(
    paths: Sequence[object], result: ReadResult, split: str
) -> tuple[Array, Array, Array] | None:
    """Inputs, labels and silo of all samples of a split, or None if no path has it."""
    have = [split in source for source in result.sources]
    if not any(have):
        return None
    if not all(have):
        raise DataError(
            f"{paths[have.index(True)]} has a {split} set and {paths[have.index(False)]} has none; "
            "give every silo one, or none"
        )
    pairs = [source[split] for source in result.sources]
    return *join(pairs), np.repeat(np.arange(len(pairs)), [len(y) for _, y in pairs])


def join(pairs: Sequence[Pair]) -> Pair:
    """Inputs and labels one after the other; a single pair unchanged."""
    if len(pairs) == 1:
        return pairs[0]
    return np.concatenate([x for x, _ in pairs]), np.concatenate([y for _, y in pairs])


def _describe(paths: Sequence[object]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
