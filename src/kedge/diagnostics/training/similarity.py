r"""Similarity of features: local against global ones, and across classes.

Linear CKA (Kornblith et al., Similarity of Neural Network Representations Revisited, ICML 2019,
equation 5) of features X ``[n, p]`` and Y ``[n, q]`` of the same n samples, with centred columns:
:math:`\|Y^T X\|_F^2 / (\|X^T X\|_F \|Y^T Y\|_F)`. It does not change under translations, rotations
and scaling of either.

FedBR (Guo et al. 2023, Proposition 3.1 and Figure 2) finds local features far from global ones on
the same samples, and alike for samples of different classes.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
