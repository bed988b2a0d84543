"""What local models predict: on classes they lack, and how far they lean to those they have.

FedBR (Guo et al. 2023), Proposition 3.1, Example 3.3 and Figure 3: after local training a model
classifies all samples into the classes of its own data. All measures here are functions of
confusion matrices ``[C, C]``, with true classes as rows and predicted ones as columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Bias(NamedTuple):
    """What one model predicts on samples of the classes that its client lacks."""

    lacking: int  # number of these classes among the tested ones
    samples: int
    recognised: float  # share of the samples that is predicted correctly
    own: float  # share that is assigned to a class that the client has


def confusion(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Counts of samples by true and predicted class, ``[C, C]`` in float64.

    >>> confusion(torch.tensor([1, 1]), torch.tensor([0, 1]), 2).tolist()
    [[0.0, 1.0], [0.0, 1.0]]
    """
    cells = torch.bincount(labels * classes + predicted, minlength=classes * classes)
    return cells.reshape(classes, classes).double().cpu()


def classifier_bias(matrix: Tensor, counts: Tensor) -> Bias | None:
    """What a model predicts on the classes that its client lacks; None if it lacks none.

    Args:
        matrix: the model's confusion matrix on common test data.
        counts: the client's number of training samples of each class, ``[C]``.
    """
    lacks = counts == 0
    rows = matrix[lacks]
    total = float(rows.sum())
    if not total:
        return None
    correct = float(matrix.diagonal()[lacks].sum())
    tested = int((rows.sum(1) > 0).sum())
    return Bias(tested, round(total), correct / total, float(rows[:, ~lacks].sum()) / total)


def prediction_skew(matrix: Tensor) -> float:
    """Total variation distance of the predicted classes to the true ones, from 0 to 1.

    It is the share of the samples by which a model's predictions favour some classes; it needs no
    class to be absent.
    """
    total = matrix.sum()
    return float(0.5 * (matrix.sum(0) / total - matrix.sum(1) / total).abs().sum())


def predicted_on_lacking(matrix: Tensor, counts: Tensor) -> Tensor:
    """The distribution of predictions over classes on the samples of lacking classes, ``[C]``
    (Figure 3b)."""
    rows = matrix[counts == 0]
    return rows.sum(0) / rows.sum().clamp_min(1)
