"""What a metric is: its title, unit, direction and decimals.

A run says so of its metrics from its start (``run.json``). :data:`KNOWN` is for folders of kedge
0.1, which may lack the file; a test compares it with the metrics of the tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from kedge.schema import Range

if TYPE_CHECKING:
    from kedge.core.task_base import Metric as TaskMetric

TITLES = {
    "rmse": "RMSE", "mae": "MAE", "r2": "R²", "auroc": "AUROC", "f1": "F1", "f1_macro": "macro F1",
    "map": "mAP", "ece": "calibration error", "loss": "test loss", "train_loss": "training loss",
    "divergence": "divergence of clients",
}  # fmt: skip
#: The column of the records that a headline is in: the global model on the test set, the same model
#: client by client, the clients' own models.
COLUMNS = {"global": "", "client": "client_mean", "personal": "personal_mean"}
#: Shown beside the accuracy where classes are imbalanced.
COMPANIONS = ("balanced_accuracy", "auroc")


def title_of(name: str) -> str:
    """The name of a metric for people: ``rmse`` is RMSE."""
    return TITLES.get(name, name.replace("_", " "))


@dataclass(frozen=True)
class MetricInfo:
    """A metric as it is shown; ``higher_is_better`` is None where nobody knows.

    >>> accuracy = MetricInfo("accuracy", "accuracy", "%", True, 2)
    >>> accuracy.label, accuracy.text(97.5), accuracy.gain(90.0, 88.0)
    ('accuracy %', '97.50 %', 2.0)
    """

    name: str
    title: str
    unit: str = ""
    higher_is_better: bool | None = None
    decimals: Annotated[int, Range(0, 12)] = 3

    @classmethod
    def of(cls, metric: TaskMetric) -> MetricInfo:
        """A metric of a task."""
        unit, higher, decimals = metric.unit, metric.higher_is_better, metric.decimals
        return cls(metric.name, title_of(metric.name), unit, higher, decimals)

    @property
    def label(self) -> str:
        """The title and the unit: the head of a column."""
        return f"{self.title} {self.unit}".rstrip()

    def text(self, value: float) -> str:
        """A value with its unit."""
        return f"{value:.{self.decimals}f} {self.unit}".rstrip()

    def gain(self, value: float, base: float) -> float:
        """By how much a value is better than another one."""
        return value - base if self.higher_is_better else base - value


_PERCENT, _SCORE, _ERROR, _FINE = ("%", True, 2), ("", True, 3), ("", False, 2), ("", False, 3)
_KINDS = {
    "accuracy": _PERCENT, "loss": _ERROR, "balanced_accuracy": _PERCENT, "f1_macro": _PERCENT,
    "auroc": _SCORE, "average_precision": _SCORE, "log_loss": _FINE, "ece": _FINE,
    "f1": _PERCENT, "map": _SCORE, "rmse": _ERROR, "mae": _ERROR, "r2": _SCORE,
}  # fmt: skip
KNOWN = {name: MetricInfo(name, title_of(name), *kind) for name, kind in _KINDS.items()}
#: The first metric of every built-in task, which is its headline.
HEADLINES = ("accuracy", "f1", "rmse")
#: Parts whose clients' own models count, for folders that do not say it.
PERSONAL_PARTS = frozenset(("ditto", "fedbn", "fedper", "fedrep", "finetune", "local"))
