r"""The worst-case margin of a model, and what a client contributes to it, by a gradient attack.

FedImpro (Tang et al. 2024), Definition 3.1: :math:`W_d(\rho, D) = E_{(x, y) \sim D}
\inf_{\arg\max \rho(x') \ne y} d(x', x)`, the mean distance to the nearest input that is classified
wrongly; 0 for samples that are wrong already. Equation 2 takes it for a client's model on the data
of the others, :math:`W_d(\rho(\theta + \Delta_m), D \setminus D_m)`.

The distance is Euclidean, between inputs as the model sees them. The infimum is approached from
above by projected gradient descent (Madry et al., ICLR 2018) on a sphere whose radius shrinks as
long as the attack succeeds and grows otherwise (Rony et al., Decoupling Direction and Norm, CVPR
2019), once for each of the most likely other classes; then by bisection between the sample and the
nearest input that was found. For a linear model the result is exact. With 200 steps to all classes
it is 0.3 percent lower for an MLP on digits, and 1.8 percent for ``fedcog_cnn`` on Fashion-MNIST
(64 samples each).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

STEPS = 12  # of the attack
HALVINGS = 12  # of the interval in which the boundary lies
GAMMA = 0.2  # relative change of the radius in a step
MAX_TARGETS = 3  # other classes that are tried for a sample

Logits = Callable[[Tensor], Tensor]  # inputs [n, ...] to [n, C]


def worst_case_margins(
    logits: Logits, x: Tensor, y: Tensor, targets: int = MAX_TARGETS, steps: int = STEPS
) -> Tensor:
    """Distance of every sample to the nearest input found that is classified wrongly, ``[n]``.

    Infinite where no attack succeeds.

    Args:
        logits: the model.
        x: inputs ``[n, ...]``.
        y: classes ``[n]``.
        targets: the number of other classes to try, the most likely first.
        steps: of the attack on each of them.
    """
    with torch.no_grad():
        first = logits(x)
    count = min(targets, first.shape[1] - 1)
    others = first.scatter(1, y[:, None], float("-inf"))
    wrong = others.max(1).values >= first.gather(1, y[:, None])[:, 0]
    margins = torch.where(wrong, 0.0, float("inf")).to(first)
    if count < 1 or bool(wrong.all()):
        return margins
    aims = others[~wrong].topk(count).indices.reshape(-1)  # [correct * targets]
    start, label = (v[~wrong].repeat_interleave(count, 0) for v in (x, y))
    distances = _attack(logits, start, label, aims, steps).reshape(-1, count)
    margins[~wrong] = distances.min(1).values.to(margins)
    return margins


def _attack(logits: Logits, x: Tensor, y: Tensor, aims: Tensor, steps: int) -> Tensor:
    """Distance of each sample to the nearest input found that is of its target class."""
    axes = tuple(range(1, x.ndim))
    shape = (len(x), *(1,) * len(axes))

    def lead(inputs: Tensor) -> Tensor:
        """By how much the label's logit exceeds the target's, ``[n]``."""
        out = logits(inputs)
        return (out.gather(1, y[:, None]) - out.gather(1, aims[:, None]))[:, 0]

    offset = torch.zeros_like(x)
    radius: Tensor | None = None
    best = torch.full((len(x),), float("inf"), dtype=x.dtype, device=x.device)
    nearest = torch.zeros_like(x)
    for _ in range(steps):
        with torch.enable_grad():
            inputs = (x + offset).requires_grad_()
            value = lead(inputs)
            [gradient] = torch.autograd.grad(value.sum(), inputs)
        norm = gradient.flatten(1).norm(dim=1).clamp_min(1e-30)
        value = value.detach()
        if radius is None:  # where the linear model of the first gradient crosses
            radius = value.clamp_min(0) / norm
        else:
            size = offset.flatten(1).norm(dim=1)
            closer = (value < 0) & (size < best)
            best = torch.where(closer, size, best)
            nearest = torch.where(closer.reshape(shape), offset, nearest)
            radius = radius * torch.where(value < 0, 1 - GAMMA, 1 + GAMMA)
        moved = offset - gradient * (radius / norm).reshape(shape)
        size = moved.flatten(1).norm(dim=1).clamp_min(1e-30)
        offset = (moved * (radius / size).reshape(shape)).detach()
    low, high = torch.zeros_like(best), torch.ones_like(best)
    with torch.no_grad():
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            crossed = lead(x + nearest * middle.reshape(shape)) < 0
            low, high = torch.where(crossed, low, middle), torch.where(crossed, middle, high)
    return torch.where(best.isfinite(), best * high, best)
