r"""How far local models are from their mean, layer by layer, how their updates agree, and the
variance of their gradients at the global model, split at a cut of the model.

Weight divergence is that of FedImpro (Tang et al. 2024, section 5.1, Figures 2b and 3):
:math:`\frac{1}{|S|} \sum_{i \in S} \|\bar\theta - \theta_i\|`, here for every layer by itself.

FedImpro, Definition 4.2 and equation 3: :math:`CGV(F, \theta) = E_m \|\nabla
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


class Layer(NamedTuple):
    """The divergence of one layer."""

    name: str
    parameters: int
    divergence: float  # mean distance of local weights to their mean
    size: float  # norm of the mean's weights

    @property
    def relative(self) -> float:
        """The divergence as a share of the layer's own norm; infinite for weights of 0."""
        if self.size:
            return self.divergence / self.size
        return float("inf") if self.divergence else 0.0


def layer_of(name: str) -> str:
    """The layer of a parameter: its module. A parameter of the root is a layer by itself.

    >>> layer_of("stage1.conv.weight"), layer_of("scale")
    ('stage1.conv', 'scale')
    """
    return name.rpartition(".")[0] or name


def weight_divergence(ends: Sequence[Params], mean: Params) -> float:
    """The mean distance of local weights to ``mean``, over its leaves."""
    distances = [_distance(end, mean, list(mean)) for end in ends]
    return sum(distances) / len(distances)


def by_layer(ends: Sequence[Params], mean: Params, leaves: Sequence[str]) -> list[Layer]:
    """The divergence of every layer, in the order of ``leaves``.

    Args:
        ends: the local weights of K clients.
        mean: their mean.
        leaves: names of the parameters to group by layer.
    """
    groups: dict[str, list[str]] = {}
    for name in leaves:
        groups.setdefault(layer_of(name), []).append(name)
    found = []
    for layer, names in groups.items():
        part = {n: mean[n] for n in names}
        count = sum(mean[n].numel() for n in names)
        size = _norm([mean[n] for n in names])
        found.append(Layer(layer, count, weight_divergence(ends, part), size))
    return found


def cosines(deltas: Sequence[Params]) -> Tensor:
    """Cosines between the updates of K clients, ``[K, K]`` in float64; 0 for an update of 0."""
    rows = [_flat(delta) for delta in deltas]
    rows = [row / norm if (norm := float(row.norm())) else row for row in rows]
    stacked = torch.stack(rows)
    return (stacked @ stacked.T).cpu()


def mean_cosine(matrix: Tensor) -> float:
    """The mean over pairs of different clients; NaN for one client."""
    count = len(matrix)
    if count < 2:
        return float("nan")
    return float((matrix.sum() - matrix.diagonal().sum()) / (count * (count - 1)))


def cancelled(deltas: Sequence[Params], shares: Tensor) -> float:
    r"""The share of the clients' movement that cancels in their mean.

    :math:`1 - \|\sum_k p_k \Delta_k\|^2 / \sum_k p_k \|\Delta_k\|^2`: 0 for equal updates,
    1 - 1/K for K orthogonal ones of equal norm and weight, 1 if the mean does not move.
    """
    p = shares.double() / shares.double().sum()
    rows = [_flat(delta) for delta in deltas]
    mean = sum((share * row for share, row in zip(p, rows, strict=True)), torch.zeros_like(rows[0]))
    total = sum(float(share * row.square().sum()) for share, row in zip(p, rows, strict=True))
    return max(0.0, 1.0 - float(mean.square().sum()) / total) if total else 0.0


def _flat(params: Params) -> Tensor:
    """All leaves in a row; none for a method in which nothing travels."""
    rows = [x.detach().double().reshape(-1) for x in params.values()]
    return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.float64)


def _norm(values: Sequence[Tensor]) -> float:
    return float(sum(float(x.detach().double().square().sum()) for x in values)) ** 0.5


def _distance(a: Params, b: Params, names: Sequence[str]) -> float:
    return _norm([a[n].double() - b[n].double() for n in names])


# -- gradients ------------------------------------------------------------------------------------


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
