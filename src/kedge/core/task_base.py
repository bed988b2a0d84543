"""The base class of tasks: the loss, the metrics and the divergence of two models' outputs.

A task works on logits and a :class:`Batch`, sample by sample, so that parts can weigh, mask and mix
samples. Metrics are functions of sums, which add up over batches and clients.

A task is one class: it also checks its labels and formats its metrics. The defaults of
:class:`Task` suit real targets; a custom task overrides what differs::

    @register_task
    @dataclass(frozen=True)
    class Count(Task):
        '''Counts: the Poisson loss of a log rate.'''

        name = "count"
        metrics = (Metric("deviance", lambda sums: float(sums["loss"] / sums["samples"])),)

        def loss(self, logits, batch):
            return F.poisson_nll_loss(logits, batch.y, reduction="none").mean(-1)

It is then known as ``task="count"`` to ``kedge.fit`` and to datasets (``counts.csv(task=count)``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from kedge.core.labels import Array, check_rows, finite_float
from kedge.errors import DataError, FieldError
from kedge.registry import Registry

Sums = dict[str, Tensor]
Labels = TypeVar("Labels", Array, Tensor)

tasks: Registry[type[Task]] = Registry("task", module="kedge.core.task", group="kedge.tasks")


class Batch(NamedTuple):
    """B samples. ``y`` stays as it is in the data; ``target`` may be added by a part."""

    x: Tensor  # [B, ...] inputs
    y: Tensor  # [B] classes, or [B, outputs] labels or targets
    target: Tensor | None = None  # [B, C] soft labels in place of y


@dataclass(frozen=True)
class Metric:
    """A function of a task's sums, with a name, a unit and a format.

    >>> Metric("accuracy", lambda sums: 100.0, unit="%", higher_is_better=True).label
    'accuracy %'
    """

    name: str  # its key in the records of a run
    value: Callable[[Sums], float | None]  # None where it has no meaning
    unit: str = ""
    higher_is_better: bool = False
    decimals: int = 2
    needs: tuple[str, ...] = ()  # sums of :meth:`Task.details` that it reads
    doc: str = ""
    function: Callable[[Array, Array], float] | None = None  # of labels and scores, instead of sums
    bound: Callable[[Sums], float | None] | None = None  # on its error; None: it is exact

    def __post_init__(self) -> None:
        if self.doc:
            object.__setattr__(self, "__doc__", self.doc)

    @property
    def label(self) -> str:
        """The head of its column in tables."""
        return f"{self.name} {self.unit}".rstrip()

    def write(self, value: float) -> str:
        """The value with its decimals and unit: ``"97.50 %"``."""
        return f"{value:.{self.decimals}f} {self.unit}".rstrip()


@dataclass(frozen=True)
class Task:
    """Base of all tasks; ``outputs`` is the width of the model's last layer.

    The defaults suit real targets: labels are finite numbers ``[n]`` or ``[n, outputs]``, and the
    divergence is half the squared distance.
    """

    outputs: int

    name: ClassVar[str] = ""
    #: What is reported; the first is the headline that runs are compared by.
    metrics: ClassVar[tuple[Metric, ...]] = ()
    #: A part with a meaning for this built-in task has one for the task, too.
    like: ClassVar[str] = "regression"
    #: The outputs stand for classes or labels, so that counts and metrics of each have a meaning.
    has_classes: ClassVar[bool] = False
    #: Every sample is of exactly one class: labels are int64 ``[n]``, files may give class names,
    #: and partitions may go by class.
    one_class: ClassVar[bool] = False
    #: What the outputs are called.
    outputs_are: ClassVar[str] = "targets"
    #: Place in the order in which ``task="auto"`` asks :meth:`suits`; the first that does is taken.
    auto_order: ClassVar[float] = 0.0

    # -- labels -------------------------------------------------------------------------------

    @classmethod
    def suits(cls, y: Array) -> bool:
        """Whether ``task="auto"`` may choose this task for labels ``y``."""
        return False

    @classmethod
    def faults(cls, y: Labels) -> Iterator[tuple[Labels, str]]:
        """``(mask, text)`` of what may be wrong with single labels, in an array or a tensor."""
        yield from ()

    @classmethod
    def read(cls, ys: Sequence[tuple[str, Array]], limit: int | None) -> tuple[list[Array], int]:
        """All label arrays of a dataset (where each is, itself) in one form, and the outputs.

        ``limit`` is the number of classes where the source names it. Raises DataError with place
        and row.
        """
        numbers = [finite_float(y, at).reshape(len(y), -1) for at, y in ys]
        for (at, _), y in zip(ys, numbers, strict=True):
            for wrong, text in cls.faults(y):
                check_rows(wrong, y, at, text)
        return numbers, numbers[0].shape[1]

    def labels(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Labels in the type that :meth:`loss` takes; raises DataError with the row."""
        return y.to(dtype)

    def check_labels(self, y: Tensor, kind: str = "") -> None:
        """Raise a DataError where labels do not fit; ``kind``, such as ``"test "``, says which."""
        if y[:1].numel() != self.outputs:
            shape = tuple(y.shape)
            raise DataError(f"{kind}targets have the shape {shape}, expected [n, {self.outputs}]")
        check_finite(y, kind)
        for wrong, text in self.faults(y):
            bad = wrong.nonzero()
            if len(bad):
                value = y[tuple(bad[0])].item()
                raise DataError(f"{kind}label {value:g} in row {int(bad[0, 0])} {text}")

    def targets(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        """Labels as numbers, ``[B, outputs]``: those that a part has added, else :meth:`soft`."""
        return self.soft(batch.y, dtype) if batch.target is None else batch.target

    # -- learning -----------------------------------------------------------------------------

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Loss of every sample, ``[B]``."""
        raise NotImplementedError

    def mean_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """The mean of :meth:`loss`, where no part weighs the samples."""
        return self.loss(logits, batch).mean()

    def soft(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Labels as numbers that can be mixed, ``[B, outputs]``."""
        return y.to(dtype).reshape(len(y), self.outputs)

    def probs(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        """Predictions, ``[B, outputs]``."""
        return logits / temperature

    def divergence(self, p: Tensor, q: Tensor, temperature: float = 1.0) -> Tensor:
        """Divergence of two batches of logits, ``[B]``: here half the squared distance, which is
        the KL divergence of two normals of unit variance."""
        return 0.5 * (((p - q) / temperature) ** 2).sum(-1)

    # -- metrics ------------------------------------------------------------------------------

    @property
    def headline(self) -> Metric:
        return self.metrics[0]

    @property
    def metric(self) -> str:
        return self.headline.name

    @property
    def higher_is_better(self) -> bool:
        return self.headline.higher_is_better

    def sums(self, logits: Tensor, batch: Batch, mask: Tensor) -> Sums:
        """The sums that metrics are functions of, over the samples where ``mask`` ``[B]`` is 1."""
        return {"loss": (self.loss(logits, batch) * mask).sum(), "samples": mask.sum()}

    def details(self, logits: Tensor, batch: Batch, mask: Tensor) -> Sums:
        """Further sums, for metrics that are too costly for every test (:attr:`Metric.needs`)."""
        return {}

    def report(self, sums: Sums, names: Collection[str] | None = None) -> dict[str, float]:
        """The metrics by name (all for None), without those that these sums do not give.

        A metric that is not exact has ``NAME_bound`` beside it, the largest possible error.
        """
        wanted = [m for m in self.metrics if names is None or m.name in names]
        known = [m for m in wanted if not m.function and all(n in sums for n in m.needs)]
        values = {metric.name: metric.value(sums) for metric in known}
        values |= {f"{m.name}_bound": m.bound(sums) for m in known if m.bound}
        return {name: value for name, value in values.items() if value is not None}

    def per_class(self, sums: Sums) -> list[float | None]:
        """The headline metric of each class; None for a class without samples."""
        return []


def check_finite(y: Tensor, kind: str = "") -> None:
    """Raise a DataError for the first label that is not a finite number."""
    bad = (~torch.isfinite(y)).nonzero()
    if len(bad):
        row = int(bad[0, 0])
        raise DataError(f"{kind}labels hold NaN or infinite values, first in row {row}")


def register_task(cls: type[Task]) -> type[Task]:
    """Class decorator: make a task known under its ``name``."""
    if not cls.name or not cls.metrics:
        raise FieldError(f"{cls.__name__} needs a name and at least one metric, the headline first")
    return tasks.add(cls.name, cls)
