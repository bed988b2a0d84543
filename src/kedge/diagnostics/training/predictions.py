r"""What local models predict, what they unlearn and learn, and how alike features are.

**Bias.** FedBR (Guo et al. 2023), Proposition 3.1, Example 3.3 and Figure 3: after local training a
model classifies all samples into the classes of its own data. Measures of it are functions of
confusion matrices ``[C, C]``, with true classes as rows and predicted ones as columns.

**Accuracy.** *Generalisation* is the accuracy of a local model on the common test data,
*personalisation* that on data distributed as its client's (FedCOG, Ye et al. 2024, section 5.4 and
Figure 2b, c). *Forgetting* is what a local model loses of the accuracy of the model that it started
from, class by class.

**Features.** Linear CKA (Kornblith et al., Similarity of Neural Network Representations Revisited,
ICML 2019, equation 5) of features X ``[n, p]`` and Y ``[n, q]`` of the same n samples, with centred
columns: :math:`\|Y^T X\|_F^2 / (\|X^T X\|_F \|Y^T Y\|_F)`. It does not change under translations,
rotations and scaling of either.

FedBR (Guo et al. 2023, Proposition 3.1 and Figure 2) finds local features far from global ones on
the same samples, and alike for samples of different classes.
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


# -- accuracy -------------------------------------------------------------------------------------


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


# -- similarity of features -----------------------------------------------------------------------


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Linear CKA of two sets of features of the same samples, from 0 to 1; NaN if one is constant.

    Args:
        x: features ``[n, ...]``.
        y: features ``[n, ...]`` of the same samples.
    """
    gram_x, gram_y = _gram(x), _gram(y)
    scale = float(gram_x.norm() * gram_y.norm())
    return float((gram_x * gram_y).sum()) / scale if scale else float("nan")


def pair_cosine(a: Tensor, b: Tensor) -> float:
    """The mean cosine between a sample of ``a`` ``[n, p]`` and one of ``b`` ``[m, p]``."""
    return float(_units(a).mean(0) @ _units(b).mean(0))


def class_cosine(features: Tensor, labels: Tensor) -> float:
    """The mean cosine between two samples of different classes; NaN if there is one class.

    Args:
        features: ``[n, ...]``.
        labels: classes, ``[n]``.
    """
    rows, labels = _units(features), labels.cpu()
    sums = torch.stack([rows[labels == c].sum(0) for c in labels.unique()])
    counts = torch.stack([(labels == c).sum() for c in labels.unique()]).double()
    total, within = sums.sum(0), float(sums.square().sum())
    pairs = float(counts.sum() ** 2 - counts.square().sum())
    return (float(total @ total) - within) / pairs if pairs else float("nan")


def _gram(x: Tensor) -> Tensor:
    """The Gram matrix ``[n, n]`` of centred features."""
    rows = x.detach().reshape(len(x), -1).double().cpu()
    rows = rows - rows.mean(0)
    return rows @ rows.T


def _units(x: Tensor) -> Tensor:
    """Rows of norm 1; a row of zeros stays."""
    rows = x.detach().reshape(len(x), -1).double().cpu()
    return rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-300)
