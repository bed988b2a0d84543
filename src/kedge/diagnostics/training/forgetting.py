"""What local models unlearn and learn: per-class accuracy, and accuracy on all and on own data.

*Generalisation* is the accuracy of a local model on the common test data, *personalisation* that on
data distributed as its client's (FedCOG, Ye et al. 2024, section 5.4 and Figure 2b, c).
*Forgetting* is what a local model loses of the accuracy of the model that it started from, class by
class.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Change(NamedTuple):
    """Mean change of accuracy in percentage points; NaN without such a class."""

    own: float  # over the classes that the client has
    lacking: float


def per_class_accuracy(matrix: Tensor) -> Tensor:
    """Accuracy of every class in percent, ``[C]``; NaN for a class without samples.

    Args:
        matrix: a confusion matrix, true classes as rows.
    """
    return 100.0 * matrix.diagonal() / matrix.sum(1)


def accuracy(matrix: Tensor) -> float:
    """Accuracy in percent."""
    return float(100.0 * matrix.diagonal().sum() / matrix.sum())


def change(before: Tensor, after: Tensor, counts: Tensor) -> Change:
    """The mean change of per-class accuracy from one confusion matrix to another.

    Args:
        before: of the model that local training starts from.
        after: of the local model.
        counts: the client's number of training samples of each class, ``[C]``.
    """
    points = per_class_accuracy(after) - per_class_accuracy(before)
    known = ~points.isnan()
    has = counts > 0
    return Change(_mean(points[known & has]), _mean(points[known & ~has]))


def forgetting(before: Tensor, after: Tensor) -> float:
    """The mean over classes of the accuracy that is lost, in points; gains count as 0."""
    lost = per_class_accuracy(before) - per_class_accuracy(after)
    return _mean(lost[~lost.isnan()].clamp_min(0.0))


def personal_accuracy(matrix: Tensor, counts: Tensor) -> float:
    """Accuracy in percent on test data with the class proportions of a client.

    It weighs the accuracy of every class by the client's share of the class. This is the expected
    accuracy on data like the client's own if clients differ in their labels alone. Classes
    without test samples are left out.
    """
    values = per_class_accuracy(matrix)
    weight = torch.where(values.isnan(), torch.zeros_like(values), counts.to(values))
    return float((values.nan_to_num() * weight).sum() / weight.sum())


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else float("nan")
