"""Mean features of every class over all clients: FedTR's centroids, FedProto's prototypes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.core.task import Batch
from kedge.core.tree import Tree, Weights
from kedge.core.view import Spec, View


def no_means(spec: Spec) -> tuple[Tensor, Tensor]:
    """``(means [C, F], which exist [C])`` before there are any."""
    means = torch.zeros((spec.task.outputs, spec.features), dtype=spec.dtype, device=spec.device)
    return means, means.new_zeros(spec.task.outputs)


def class_sums(v: View, weights: Weights) -> tuple[Tensor, Tensor]:
    """``(sums of features [C, F], numbers of samples [C])`` of every class, over the client's whole
    data, by the model in evaluation mode."""

    def piece(batch: Batch, mask: Tensor) -> Tree:
        own = F.one_hot(batch.y, v.task.outputs).to(mask.dtype) * mask[:, None]  # [B, C]
        features = v.forward(weights, batch.x, train=False).features.flatten(1)
        return {"sum": own.T @ features, "count": own.sum(0)}

    found = v.sweep(piece)
    return found["sum"], found["count"]


def next_means(sums: Tensor, counts: Tensor, means: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """``(means, which exist)`` from the sums over a cohort; a class without samples in it keeps
    its mean."""
    count = counts[:, None]  # [C, 1]
    fresh = sums / count.clamp_min(1)
    return torch.where(count > 0, fresh, means), torch.where(count[:, 0] > 0, 1.0, valid)
