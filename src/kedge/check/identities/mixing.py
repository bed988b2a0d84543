"""Identities of the methods in parts/mixing.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from kedge.check.oracles import Claim, oracle
from kedge.check.problems import images, step_view
from kedge.core.task import Batch
from kedge.parts.mixing import Mixup


@oracle(Mixup)
def mixed_label_equals_mixed_losses(cls: type[Mixup]) -> Iterator[Claim]:
    """CE(x~, lambda y_i + (1 - lambda) y_j) = lambda CE(x~, y_i) + (1 - lambda) CE(x~, y_j), where
    lambda is read off the mixed inputs."""
    part = cls(alpha=1.0)
    run = images(sizes=(14, 14), batch=7).simulate(part)
    v, batch = step_view(run, 0, part, "transform")
    mixed = part.transform(v, batch)
    logits = run.bound.model.forward(run.weights, mixed.x, "eval").logits
    lam, other = _read_off(batch, mixed)
    pair = [F.cross_entropy(logits, y) for y in (batch.y, batch.y[other])]
    expected = float(lam * pair[0] + (1 - lam) * pair[1])
    yield Claim("loss of the mixture", expected, float(run.bound.task.loss(logits, mixed).mean()))
    yield Claim("changed integer labels", 0.0, float((mixed.y != batch.y).sum()))


def _read_off(batch: Batch, mixed: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Search for the lambda and the partners with x~ = lambda x_i + (1 - lambda) x_j."""
    x, n = batch.x.flatten(1), len(batch.x)
    best = (float("inf"), torch.tensor(0.0), torch.zeros(n, dtype=torch.int64))
    for i in range(n):
        for j in range(n):
            if i == j:
                continue
            direction = x[i] - x[j]
            lam = ((mixed.x.flatten(1)[i] - x[j]) * direction).sum() / (direction * direction).sum()
            distance = torch.cdist(mixed.x.flatten(1) - lam * x, (1 - lam) * x)
            error, other = distance.min(1)
            if float(error.max()) < best[0]:
                best = (float(error.max()), lam, other)
    return best[1], best[2]
