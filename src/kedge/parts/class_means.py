"""Class means of features over all clients: FedTR's centroids, FedProto's prototypes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.core.task import Batch
from kedge.core.tree import Tree, Weights
from kedge.core.view import Spec, View


def empty_means(spec: Spec) -> tuple[Tensor, Tensor]:
    """Initial ``(means [C, F], valid [C])``: zeros, none of them valid."""
    means = torch.zeros((spec.task.outputs, spec.features), dtype=spec.dtype, device=spec.device)
    return means, means.new_zeros(spec.task.outputs)


def class_sums(v: View, weights: Weights) -> tuple[Tensor, Tensor]:
    """``(feature sums [C, F], sample counts [C])`` per class over all data of the client.

    The model runs in evaluation mode.
    """

    def batch_sums(batch: Batch, mask: Tensor) -> Tree:
        one_hot = F.one_hot(batch.y, v.task.outputs).to(mask.dtype) * mask[:, None]  # [B, C]
        features = v.forward(weights, batch.x, train=False).features.flatten(1)
        return {"sum": one_hot.T @ features, "count": one_hot.sum(0)}

    totals = v.sweep(batch_sums)
    return totals["sum"], totals["count"]


def update_means(
    sums: Tensor, counts: Tensor, means: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor]:
    """Next ``(means [C, F], valid [C])`` from a cohort's sums and counts.

    A class without samples in the cohort keeps its mean.
    """
    count = counts[:, None]  # [C, 1]
    cohort_means = sums / count.clamp_min(1)
    return torch.where(count > 0, cohort_means, means), torch.where(count[:, 0] > 0, 1.0, valid)
