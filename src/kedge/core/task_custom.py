"""A task with an own loss, class weights, or another headline metric.

Each function returns a task like the given one, for both engines; equal arguments give equal tasks,
so that seeds still train together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.core.labels import Array
from kedge.core.task import Classification
from kedge.core.task_base import Batch, Metric, Sums, Task
from kedge.errors import FieldError, UnknownName, nearest
from kedge.registry import Registry

Loss = Callable[[Tensor, Tensor], Tensor]  # (logits [B, C], labels) -> [B]
ScoreFunction = Callable[[Array, Array], float]  # (labels, scores), numpy arrays, as scikit-learn's

#: Metrics of one's own by name, see :func:`register_metric`.
own_metrics = Registry[Metric]("metric", see="kedge list metrics")


def with_loss(task: Task, function: Loss) -> Task:
    """The task with another loss.

    Args:
        task: the task.
        function: ``function(logits, y) -> [B]``, the loss of each sample, in torch and without a
            branch on values. ``y`` are the labels of the batch, or rows of soft labels
            ``[B, outputs]`` where a part mixes samples.

    >>> squared = with_loss(Classification(2), lambda logits, y: (logits[:, 1] - y) ** 2)
    >>> squared.loss(torch.tensor([[0.0, 2.0]]), Batch(torch.zeros(1), torch.tensor([1])))
    tensor([1.])
    """
    if not callable(function):
        raise FieldError(f"loss = {function!r} is no function (logits, y) -> loss of each sample")
    return _loss_class(_class(task), function)(**vars(task))


def with_class_weights(
    task: Task, weights: Sequence[float], device: torch.device | str = "cpu"
) -> Task:
    """The task with a weight for each class: the loss of a sample is w_y times its loss.

    The mean over a batch still divides by the number of samples, not by the sum of their weights,
    so that clients' losses add up to the weighted loss of the federation. Soft labels t weigh the
    terms of the cross-entropy: - sum_c w_c t_c log p_c.

    Raises:
        FieldError: the task has no classes, or the weights do not fit them.
    """
    if not task.one_class:
        raise FieldError(f"class_weights are for classes; the task is {task.name}")
    values = tuple(float(w) for w in weights)
    if len(values) != task.outputs:
        raise FieldError(f"class_weights are {len(values)} numbers for {task.outputs} classes")
    if not all(math.isfinite(w) and w >= 0 for w in values) or not any(values):
        raise FieldError(f"class_weights must be finite, not negative and not all 0: {values}")
    return _weighted_class(_class(task), values, torch.device(device))(**vars(task))


def balanced_weights(counts: Sequence[float]) -> list[float]:
    """n / (C n_c), as scikit-learn's ``balanced``; C counts the classes that have samples.

    >>> balanced_weights([30, 10])
    [0.6666666666666666, 2.0]
    """
    present = sum(n > 0 for n in counts)
    return [sum(counts) / (present * n) if n > 0 else 0.0 for n in counts]


def read_class_weights(
    setting: Any, classes: Sequence[str] | None = None
) -> str | tuple[float, ...]:
    """``none``, ``balanced``, or one number per class.

    Args:
        setting: text such as ``none``, ``balanced``, ``1,5`` or ``well=1,sick=5``; numbers; or a
            dictionary from class names to numbers, in which missing classes have the weight 1.
        classes: the names of the classes.

    Raises:
        FieldError: it is none of these.
        UnknownName: there is no such class.

    >>> read_class_weights("sick=5", ["well", "sick"])
    (1.0, 5.0)
    """
    if setting is None or setting in ("none", "balanced"):
        return setting or "none"
    if isinstance(setting, str):
        words = [word.strip() for word in setting.strip("[]").split(",") if word.strip()]
        if any("=" in word for word in words):
            pairs = (word.rpartition("=") for word in words)
            setting = {name.strip(): number for name, _, number in pairs}
        else:
            setting = words
    if isinstance(setting, Mapping):
        names = [str(name) for name in classes or ()]
        for name in setting:
            if str(name) not in names:
                raise UnknownName("class", str(name), names)
        given = {str(name): number for name, number in setting.items()}
        setting = [given.get(name, 1.0) for name in names]
    try:
        return tuple(float(value) for value in setting)
    except (TypeError, ValueError):
        raise FieldError(
            f"class_weights = {setting!r} is neither none nor balanced nor numbers such as 1,5",
            "class_weights",
        ) from None


def with_metric(task: Task, metric: str | ScoreFunction) -> Task:
    """The task with another headline metric.

    Args:
        task: the task.
        metric: the name of a metric; or ``function(y_true, y_score) -> float`` of all labels and
            scores, as scikit-learn's: scores are probabilities of class 1 ``[n]`` for two classes,
            ``[n, C]`` for more, or predicted values. A function with an attribute
            ``higher_is_better = False`` is to be small.

    Raises:
        UnknownName: the task has no such metric; the message lists those that it has.

    >>> with_metric(Classification(2), "auroc").headline.label
    'auroc'
    """
    found = _named(task, metric) if isinstance(metric, str) else score_metric(metric)
    if found == task.headline:
        return task
    return _metric_class(_class(task), found)(**vars(task))


def register_metric(
    function: ScoreFunction | None = None, *, name: str = "", higher_is_better: bool = True
) -> Any:
    """Decorator: make ``function(y_true, y_score) -> float`` known as ``--metric NAME``.

    >>> @register_metric(higher_is_better=False)
    ... def brier(y_true, y_score):
    ...     return ((y_true - y_score) ** 2).mean()
    >>> own_metrics.remove("brier")
    """

    def add(function: ScoreFunction) -> ScoreFunction:
        metric = score_metric(function, name, higher_is_better)
        own_metrics.add(metric.name, metric)
        return function

    return add if function is None else add(function)


@lru_cache(maxsize=256)
def score_metric(
    function: ScoreFunction, name: str = "", higher_is_better: bool | None = None
) -> Metric:
    """A metric that is a function of all labels and scores."""
    if not callable(function):
        raise FieldError(f"metric = {function!r} is neither a name nor a function")
    found = name or getattr(function, "__name__", "metric").strip("<>")
    if higher_is_better is None:
        higher_is_better = getattr(function, "higher_is_better", True)
    doc = (function.__doc__ or "").strip().split("\n\n")[0]
    return Metric(
        found, _no_sums, "", bool(higher_is_better), decimals=3, doc=doc, function=function
    )


def _named(task: Task, name: str) -> Metric:
    known = {metric.name: metric for metric in task.metrics}
    known |= {key: own_metrics[key] for key in own_metrics}
    if name not in known:
        see = f"kedge list metrics; {task.name} has {', '.join(known)}"
        raise UnknownName("metric", name, known, see if nearest(name, list(known)) else "")
    return known[name]


def _no_sums(sums: Sums) -> float | None:
    return None


def _class(task: Task) -> Any:  # mypy takes no class of dataclasses for a key
    return type(task)


@lru_cache(maxsize=256)
def _metric_class(base: type[Task], metric: Metric) -> type[Task]:
    others = tuple(m for m in base.metrics if m.name != metric.name)
    return _subclass(base, {"metrics": (metric, *others)})


@lru_cache(maxsize=256)
def _loss_class(base: type[Task], function: Loss) -> type[Task]:
    def loss(self: Task, logits: Tensor, batch: Batch) -> Tensor:
        found = function(logits, batch.y if batch.target is None else batch.target)
        if not isinstance(found, Tensor) or found.shape != (len(logits),):
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise FieldError(
                f"the loss must give one number per sample, [{len(logits)}]; it gave {shape}. "
                "Use reduction='none'"
            )
        return found

    return _subclass(base, {"loss": loss, "own_loss": True})


@lru_cache(maxsize=64)
def _weighted_class(
    base: type[Task], weights: tuple[float, ...], device: torch.device
) -> type[Task]:
    tensor = torch.tensor(weights, device=device)  # made once: a captured graph cannot copy it

    def loss(self: Task, logits: Tensor, batch: Batch) -> Tensor:
        factors = tensor.to(logits.dtype)
        if batch.target is None:
            return factors[batch.y] * base.loss(self, logits, batch)
        if getattr(self, "own_loss", False) or not isinstance(self, Classification):
            return (batch.target @ factors) * base.loss(self, logits, batch)
        return -(factors * batch.target * F.log_softmax(logits, -1)).sum(-1)

    return _subclass(base, {"loss": loss})


def _subclass(base: type[Task], attributes: dict[str, object]) -> type[Task]:
    return type(base.__name__, (base,), {"__doc__": base.__doc__} | attributes)
