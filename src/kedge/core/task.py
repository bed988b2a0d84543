"""The built-in tasks: one class of several, several labels at once, real targets.

The interface of a task is in :mod:`kedge.core.task_base`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.core.eager import is_eager
from kedge.core.labels import Array, check_rows
from kedge.core.metrics import (
    CLASSIFICATION,
    MULTILABEL,
    REGRESSION,
    calibration_sums,
    histogram,
    log_odds,
    residual_sums,
)
from kedge.core.task_base import (
    Batch,
    Labels,
    Metric,
    Sums,
    Task,
    check_finite,
    register_task,
    tasks,
)
from kedge.errors import DataError, FieldError

__all__ = [
    "Batch",
    "Classification",
    "Metric",
    "MultiLabel",
    "Regression",
    "Task",
    "guess_task",
    "make_task",
    "register_task",
    "tasks",
]


def make_task(name: str, outputs: int) -> Task:
    """Make a task by name; a FieldError for an unknown name.

    >>> make_task("classification", 10)
    Classification(outputs=10)
    """
    if name not in tasks:
        raise FieldError(f"task = {name!r} is not one of: {', '.join(tasks)}")
    return tasks[name](outputs)


def guess_task(y: Array) -> str:
    """Guess the task from labels, ``[n]`` or ``[n, outputs]``.

    >>> guess_task(np.array([0, 1, 2])), guess_task(np.array([0.5, 2.0]))
    ('classification', 'regression')
    """
    ordered = sorted((tasks[name].auto_order, name) for name in tasks)
    return next(name for _, name in ordered if tasks[name].suits(y))


@register_task
@dataclass(frozen=True)
class Classification(Task):
    """One of C classes: cross-entropy, accuracy in percent."""

    name = "classification"
    metrics = CLASSIFICATION
    like = "classification"
    has_classes = True
    one_class = True
    outputs_are = "classes"
    auto_order = 2.0

    @classmethod
    def suits(cls, y: Array) -> bool:
        return np.issubdtype(y.dtype, np.integer) or y.dtype == bool

    @classmethod
    def read(cls, ys: Sequence[tuple[str, Array]], limit: int | None) -> tuple[list[Array], int]:
        where, first = ys[0]
        if first.ndim == 2:
            if not all(MultiLabel.one_hot(y, at) for at, y in ys):
                raise DataError(f"{where}: rows with several labels; write task=multilabel")
            return [y.argmax(1).astype(np.int64) for _, y in ys], first.shape[1]
        for at, y in ys:
            check_rows(y != np.floor(y), y, at, "is not a whole number, as classes must be")
            check_rows(y < 0, y, at, "is negative; classes count from 0")
            if limit is not None:
                text = f"is out of range: there are {limit} classes, 0 to {limit - 1}"
                check_rows(y >= limit, y, at, text)
        outputs = limit or 1 + max(int(y.max()) for _, y in ys)
        used = len(np.unique(np.concatenate([np.unique(y) for _, y in ys])))
        if limit is None and outputs > 2 * used + 1:
            at, y = max(ys, key=lambda entry: entry[1].max())
            raise DataError(
                f"{at}, row {int(y.argmax())}: label {y.max()} is out of range, as only "
                f"{used} different labels occur; number classes from 0 "
                "(numpy.unique(y, return_inverse=True)[1])"
            )
        return [y.astype(np.int64) for _, y in ys], outputs

    def labels(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        bad = (y.round() != y).nonzero() if y.is_floating_point() else y.new_zeros((0, 1))
        if len(bad):
            raise DataError(
                f"class labels must be whole numbers, unlike {y[tuple(bad[0])].item():g} in row "
                f"{int(bad[0, 0])}; for real ones use regression"
            )
        return y.to(torch.int64)

    def check_labels(self, y: Tensor, kind: str = "") -> None:
        if y.ndim != 1:
            raise DataError(f"{kind}labels have the shape {tuple(y.shape)}, expected [n]")
        bad = ((y < 0) | (y >= self.outputs)).nonzero()
        if len(bad):
            i = int(bad[0])
            raise DataError(f"{kind}label {int(y[i])} in row {i} is not in 0..{self.outputs - 1}")

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        if batch.target is not None:
            return -(batch.target * F.log_softmax(logits, -1)).sum(-1)
        if not is_eager(
            logits
        ):  # the same values; under vmap F.cross_entropy is decomposed in Python
            return -F.log_softmax(logits, -1).gather(-1, batch.y[:, None]).squeeze(-1)
        return F.cross_entropy(logits, batch.y, reduction="none")

    def mean_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        own = type(self).loss is Classification.loss and batch.target is None
        if own and is_eager(logits):  # a tenth of the time of a small step
            return F.cross_entropy(logits, batch.y)
        return super().mean_loss(logits, batch)

    def soft(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        # not F.one_hot, which reads values and so fails under vmap
        return (y[:, None] == torch.arange(self.outputs, device=y.device)).to(dtype)

    def probs(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        return F.softmax(logits / temperature, -1)

    def divergence(self, p: Tensor, q: Tensor, temperature: float = 1.0) -> Tensor:
        """KL(softmax(p/T) || softmax(q/T)) of two batches of logits, sample by sample."""
        log_p, log_q = F.log_softmax(p / temperature, -1), F.log_softmax(q / temperature, -1)
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    def sums(self, logits: Tensor, batch: Batch, mask: Tensor) -> Sums:
        one_hot = self.soft(batch.y, logits.dtype) * mask[:, None]  # [B, C]
        predicted = logits.argmax(-1)
        right = (predicted == batch.y).to(logits.dtype)
        return {
            "loss": (self.loss(logits, batch) * mask).sum(),
            "count": one_hot.sum(0),  # [C]
            "right": (one_hot * right[:, None]).sum(0),  # [C]
            "predicted": (self.soft(predicted, logits.dtype) * mask[:, None]).sum(0),  # [C]
        }

    def details(self, logits: Tensor, batch: Batch, mask: Tensor) -> Sums:
        log_p = F.log_softmax(logits, -1)
        right = (logits.argmax(-1) == batch.y).to(logits.dtype)
        likelihood = log_p.gather(-1, batch.y[:, None]).squeeze(-1)
        return {
            "histogram": histogram(log_odds(logits), self.soft(batch.y, logits.dtype), mask),
            "calibration": calibration_sums(log_p.exp(), right, mask),
            "nll": -(likelihood * mask).sum(),
        }

    def per_class(self, sums: Sums) -> list[float | None]:
        pairs = zip(sums["right"].tolist(), sums["count"].tolist(), strict=True)
        return [100.0 * right / count if count else None for right, count in pairs]


@register_task
@dataclass(frozen=True)
class MultiLabel(Task):
    """Any subset of L labels: binary cross-entropy (mean over labels), F1 over all decisions."""

    name = "multilabel"
    metrics = MULTILABEL
    like = "multilabel"
    has_classes = True
    outputs_are = "labels"
    auto_order = 1.0

    @classmethod
    def suits(cls, y: Array) -> bool:
        return y.ndim == 2 and y.shape[1] > 1 and bool(np.isin(y, (0, 1)).all())

    @classmethod
    def faults(cls, y: Labels) -> Iterator[tuple[Labels, str]]:
        yield (y != 0) & (y != 1), "is neither 0 nor 1; write task=regression for numbers"

    @classmethod
    def read(cls, ys: Sequence[tuple[str, Array]], limit: int | None) -> tuple[list[Array], int]:
        where, first = ys[0]
        if first.ndim != 2:
            raise DataError(
                f"{where} has shape {first.shape}; task=multilabel needs [rows, labels]"
            )
        return super().read(ys, limit)

    @classmethod
    def one_hot(cls, y: Array, where: str) -> bool:
        """Whether every row of 0 and 1 has exactly one 1; other values raise DataError."""
        for wrong, text in cls.faults(y):
            check_rows(wrong, y, where, text)
        return bool((y.sum(1) == 1).all())

    def check_labels(self, y: Tensor, kind: str = "") -> None:
        shape = tuple(y.shape)
        if shape[1:] != (self.outputs,):
            raise DataError(f"{kind}labels have the shape {shape}, expected [n, {self.outputs}]")
        check_finite(y, kind)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        target = self.targets(batch, logits.dtype)
        return F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(-1)

    def soft(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        return y.to(dtype)

    def probs(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        return torch.sigmoid(logits / temperature)

    def divergence(self, p: Tensor, q: Tensor, temperature: float = 1.0) -> Tensor:
        """Sum over labels of the Bernoulli divergence KL(sigmoid(p/T) || sigmoid(q/T))."""
        p, q = p / temperature, q / temperature
        on = torch.sigmoid(p) * (F.logsigmoid(p) - F.logsigmoid(q))
        off = torch.sigmoid(-p) * (F.logsigmoid(-p) - F.logsigmoid(-q))
        return (on + off).sum(-1)

    def sums(self, logits: Tensor, batch: Batch, mask: Tensor) -> Sums:
        predicted = (logits > 0).to(logits.dtype) * mask[:, None]
        labels = batch.y.to(logits.dtype) * mask[:, None]
        return {
            "loss": (self.loss(logits, batch) * mask).sum(),
            "samples": mask.sum(),
            "hits": (predicted * labels).sum(0),  # [L]
            "said": predicted.sum(0),
            "count": labels.sum(0),
        }

    def details(self, logits: Tensor, batch: Batch, mask: Tensor) -> Sums:
        return {"histogram": histogram(logits, batch.y.to(logits.dtype), mask)}

    def per_class(self, sums: Sums) -> list[float | None]:
        rows = zip(*(sums[k].tolist() for k in ("hits", "said", "count")), strict=True)
        return [200.0 * hits / (p + n) if p + n else None for hits, p, n in rows]


@register_task
@dataclass(frozen=True)
class Regression(Task):
    """Real targets: squared error (mean over outputs), root mean squared error reported."""

    outputs: int = 1

    name = "regression"
    metrics = REGRESSION
    auto_order = 3.0

    @classmethod
    def suits(cls, y: Array) -> bool:
        return True

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        target = batch.y if batch.target is None else batch.target
        predicted = logits.reshape(len(batch.y), -1)
        expected = target.to(logits.dtype).reshape(len(batch.y), -1)
        return ((predicted - expected) ** 2).mean(-1)

    def sums(self, logits: Tensor, batch: Batch, mask: Tensor) -> Sums:
        predicted, y = (t.reshape(len(batch.y), -1) for t in (logits, batch.y))
        return super().sums(logits, batch, mask) | residual_sums(predicted, y, mask)
