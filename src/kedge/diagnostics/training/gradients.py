r"""The variance of the clients' gradients at the global model, split at a cut of the model.

FedImpro (Tang et al. 2024), Definition 4.2 and equation 3: :math:`CGV(F, \theta) = E_m \|\nabla
F_m(\theta) - \nabla F(\theta)\|^2`, the sum of a low part (layers up to the cut) and a high part.
Theorem 4.2: if every client also trains the high part on :math:`\hat n_m` features of one shared
distribution, with :math:`\hat n_m / (n_m + \hat n_m) = \hat N / (N + \hat N)`, the high part
shrinks to :math:`N^2 / (N + \hat N)^2` of it.

*Deviations*: a client's gradient is that of its mean loss. The definition can also be read as one
of single samples; the noise of samples within a client would then be counted as difference between
clients. Passes are in evaluation mode, so that nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kedge.core.bound import Bound
from kedge.core.model import Model
from kedge.core.task import Batch
from kedge.core.tree import Params, Weights


class Variance(NamedTuple):
    """Variance of the clients' gradients below and above the cut, and the squared mean."""

    low: float
    high: float
    squared_mean: float  # |grad F|^2

    @property
    def total(self) -> float:
        return self.low + self.high

    @property
    def high_share(self) -> float:
        """The share of the variance that is above the cut."""
        return self.high / self.total if self.total else 0.0

    def with_shared_features(self, per_sample: float = 1.0) -> float:
        """The variance left by Theorem 4.2 for ``per_sample`` shared features for each sample."""
        return self.low + shared_factor(per_sample) * self.high


def shared_factor(per_sample: float) -> float:
    r"""The factor :math:`N^2 / (N + \hat N)^2` of Theorem 4.2, for :math:`\hat N / N`.

    >>> shared_factor(1.0)
    0.25
    """
    return 1.0 / (1.0 + per_sample) ** 2


def gradient_variance(gradients: Sequence[Params], shares: Tensor, high: set[str]) -> Variance:
    """The variance of gradients of K clients with the client weights ``shares`` ``[K]``.

    Args:
        gradients: of each client.
        shares: client weights with the sum 1.
        high: names of the leaves above the cut.
    """
    p = shares.double().cpu()
    low_part = high_part = squared = 0.0
    for name in gradients[0]:
        stacked = torch.stack([g[name].detach().double().cpu().reshape(-1) for g in gradients])
        mean = p @ stacked
        spread = float(p @ (stacked - mean).square().sum(1))
        squared += float(mean.square().sum())
        if name in high:
            high_part += spread
        else:
            low_part += spread
    return Variance(low_part, high_part, squared)


def client_gradient(bound: Bound, weights: Weights, batch: Batch, leaves: Sequence[str]) -> Params:
    """The gradient of the task's mean loss over a batch with respect to some leaves."""
    params = {n: p.detach() for n, p in weights.params.items()}
    wanted = {n: params[n].clone().requires_grad_() for n in leaves}
    if not wanted:
        return {}
    with torch.enable_grad():
        moved = Weights(params | wanted, weights.buffers)
        logits = bound.model.forward(moved, batch.x, "eval").logits
        loss = bound.task.mean_loss(logits, batch)
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    pairs = zip(wanted, found, strict=True)
    return {n: torch.zeros_like(params[n]) if g is None else g for n, g in pairs}


def leaves_above(model: Model, cut: str | None) -> tuple[str, set[str]]:
    """What the high part begins after, and its leaves: the head's for None or a model's last cut.

    Leaves are in the order of the module's definition; those after the last one of ``cut`` are
    high. Without a cut and a head, the last layer is high.
    """
    names = model.names
    if cut is not None:
        inside = [i for i, n in enumerate(names) if n.startswith(f"{cut}.")]
        # a cut without parameters, such as a pool: those of the cuts before it
        order = model.cuts
        for earlier in reversed(order[: order.index(cut)] if cut in order else ()):
            if inside:
                break
            inside = [i for i, n in enumerate(names) if n.startswith(f"{earlier}.")]
        last = inside[-1] if inside else -1
        return f"after {cut}", set(names[last + 1 :])
    if model.has_head:
        return "in the head", set(model.head_names())
    return "in the last layer", {n for n in names if n.rpartition(".")[0] == _last(names)}


def _last(names: Sequence[str]) -> str:
    return names[-1].rpartition(".")[0]
