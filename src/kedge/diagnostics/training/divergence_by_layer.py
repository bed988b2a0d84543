r"""How far local models are from their mean, layer by layer, and how their updates agree.

Weight divergence is that of FedImpro (Tang et al. 2024, section 5.1, Figures 2b and 3):
:math:`\frac{1}{|S|} \sum_{i \in S} \|\bar\theta - \theta_i\|`, here for every layer by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kedge.core.tree import Params


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
