"""What every reader returns, and how the arrays of one or many files become it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np

from kedge.core.task import tasks
from kedge.errors import DataError
from kedge.schema import Choice, Doc

Array = np.ndarray
Pair = tuple[Array, Array]
TaskName = Annotated[str, Choice(lambda: tuple(tasks))]
TaskOption = Annotated[TaskName | None, Doc("what the labels are; guessed if left out")]
SPLITS = ("train", "test", "val")


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Samples and what they are called, in memory.

    Images are uint8 ``[n, C, H, W]``; everything else is float32, tables ``[n, F]``. Labels are
    int64 ``[n]`` for classification and float32 ``[n, outputs]`` for multilabel and regression. A
    source without a test set has ``x_test = y_test = None``.

    ``mean`` and ``std`` are per channel (per column for tables), of the training data after uint8
    is divided by 255; for CIFAR-10, CIFAR-100, MNIST and Fashion-MNIST they are the published
    constants. Nothing here is normalised yet: whoever trains applies them.

    ``groups`` holds the silo of every training sample, an index into ``group_names``.
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

    @property
    def num_classes(self) -> int:
        """Classes, labels or targets: how many outputs a model needs."""
        return self.outputs

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.x_train.shape[1:])

    @property
    def is_image(self) -> bool:
        return len(self.shape) == 3

    @property
    def sizes(self) -> dict[str, int]:
        """Samples per split that is there."""
        parts = {"train": self.x_train, "val": self.x_val, "test": self.x_test}
        return {split: len(x) for split, x in parts.items() if x is not None}

    def describe(self) -> str:
        """One line: ``digits: 1x8x8 images, 10 classes, 1438 train, 359 test``."""
        shape = "x".join(map(str, self.shape))
        what = f"{shape} images" if self.is_image else f"{shape} columns"
        unit = tasks[self.task].outputs_are
        unit_ = unit[:-1] if self.outputs == 1 else unit
        line = [
            what,
            f"{self.outputs} {unit_}",
            *(f"{n} {split}" for split, n in self.sizes.items()),
        ]
        if self.group_names:
            line.append(f"{len(self.group_names)} silos")
        return f"{self.name}: " + ", ".join(line)

    def __repr__(self) -> str:
        return f"<Dataset {self.describe()}>"


class Found(NamedTuple):
    """What a reader found: one entry of ``parts`` (split to x and y) per path it was given."""

    parts: Sequence[Mapping[str, Pair]]
    task: str
    outputs: int
    classes: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None


def assemble(
    name: str,
    paths: Sequence[object],
    found: Found,
    group_names: tuple[str, ...] | None = None,
    moments: Pair | None = None,
) -> Dataset:
    """Join the parts of one dataset, or of all silos, after checking that they fit together."""
    _check_shapes(paths, found)
    splits = {s: _join(paths, found, s) for s in SPLITS}
    x, y, groups = splits["train"] or (None, None, None)
    if x is None or y is None:
        raise DataError(f"{paths[0]}: there is no training data")
    if tasks[found.task].one_class and len(np.unique(y)) < 2:
        only = found.classes[int(y[0])] if found.classes else int(y[0])
        raise DataError(
            f"{_places(paths)}: all {len(y)} training samples are of one class ({only!r}); "
            "there is nothing to learn. Are the labels right?"
        )
    mean, std = moments or mean_and_std(x)
    x_test, y_test, groups_test = splits["test"] or (None, None, None)
    x_val, y_val, _ = splits["val"] or (None, None, None)
    return Dataset(
        name, x, y, mean, std, found.task, found.outputs, x_test, y_test, x_val, y_val,
        found.classes, found.columns,
        groups if group_names else None, groups_test if group_names else None, group_names,
    )  # fmt: skip


def mean_and_std(x: Array) -> Pair:
    """Per channel or column, in the scale of 0 to 1 for uint8; 1 where nothing varies."""
    axes = (0, *range(2, x.ndim))
    if x.dtype == np.uint8:
        # From counts of the 256 values: exact, and without a float copy of all images.
        channels = (np.ascontiguousarray(x[:, c]).ravel() for c in range(x.shape[1]))
        counts = np.stack([np.bincount(c, minlength=256) for c in channels])  # [C, 256]
        p, value = counts / counts.sum(1, keepdims=True), np.arange(256) / 255
        mean = p @ value
        std = np.sqrt((p * (value - mean[:, None]) ** 2).sum(1))
        varies = (counts > 0).sum(1) > 1
    else:
        mean, std = x.mean(axes, dtype=np.float64), x.std(axes, dtype=np.float64)
        varies = (x.min(axes) < x.max(axes)) & (std > np.finfo(np.float32).tiny)
    std = np.where(varies, std, 1.0)
    return mean.astype(np.float32), std.astype(np.float32)


def _check_shapes(paths: Sequence[object], found: Found) -> None:
    first = None
    for path, part in zip(paths, found.parts, strict=True):
        for split, (x, _) in part.items():
            here = (x.shape[1:], x.dtype, f"{path} ({split})")
            first = first or here
            if here[:2] != first[:2]:
                raise DataError(
                    f"{here[2]} has samples of {_sample(*here[:2])}, but {first[2]} of "
                    f"{_sample(*first[:2])}; all samples of a dataset need the same shape and type"
                )


def _sample(shape: tuple[int, ...], dtype: np.dtype) -> str:
    return f"shape {'x'.join(map(str, shape))} and type {dtype}"


def _join(paths: Sequence[object], found: Found, split: str) -> tuple[Array, Array, Array] | None:
    """x, y and the silo of each sample; every silo has the split, or none has."""
    have = [split in part for part in found.parts]
    if not any(have):
        return None
    if not all(have):
        raise DataError(
            f"{paths[have.index(True)]} has a {split} set and {paths[have.index(False)]} has none; "
            "give every silo one, or none"
        )
    pairs = [part[split] for part in found.parts]
    groups = np.repeat(np.arange(len(pairs)), [len(y) for _, y in pairs])
    if len(pairs) == 1:
        return *pairs[0], groups
    return np.concatenate([x for x, _ in pairs]), np.concatenate([y for _, y in pairs]), groups


def _places(paths: Sequence[object]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
