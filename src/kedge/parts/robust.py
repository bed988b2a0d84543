"""Byzantine-robust aggregation.

Krum (Blanchard et al. 2017), TrimmedMean and Median (Yin et al. 2018).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.part import Doc, Part, Stack, register
from kedge.core.round import Round
from kedge.core.tree import Params, Tree, Weights
from kedge.core.view import Spec, View
from kedge.errors import FieldError
from kedge.schema import Count, Size


class _Robust(Part):
    """Aggregate parameters and BatchNorm statistics by a robust rule."""

    side = "server"
    needs_clients = True

    def combine(self, r: Round) -> Params:
        rule = self._rule(r)
        return tree.map(
            lambda _, new, old: rule(new - old), r.mean_delta, r.clients.params, r.anchor.params
        )

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        if not r.clients.buffers:
            return weights, {}
        rule = self._rule(r)

        def aggregate(new: Tensor, old: Tensor) -> Tensor:
            anchor = old.to(r.spec.dtype)
            value = anchor + rule(new.to(r.spec.dtype) - anchor)
            return value if old.is_floating_point() else value.round().to(old.dtype)

        buffers = tree.map(aggregate, r.clients.buffers, r.anchor.buffers)
        return weights._replace(buffers=buffers), {}

    def _rule(self, r: Round) -> Callable[[Tensor], Tensor]:
        """A function from stacked updates ``[K, ...]`` to one update."""
        raise NotImplementedError


@register
@dataclass(frozen=True)
class Krum(_Robust):
    r"""Select the update nearest to its neighbours, robust to f arbitrary clients.

    :math:`w \leftarrow w + \Delta_k` for the client with the lowest score :math:`s_k = \sum_j
    \|\Delta_k - \Delta_j\|^2`, the sum over the :math:`n - f - 2` updates that are nearest to
    :math:`\Delta_k`, n clients in the round (section 4); ties go to the lowest client number.
    Multi-Krum is the mean of the ``select`` updates with the lowest scores.

    Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent,
    NeurIPS 2017, arXiv:1703.02757.

    A round needs 2f + 3 clients (any number for f = 0, with at least one neighbour). Client sizes
    do not matter. Deviations: updates of several steps replace gradients. BatchNorm statistics are
    those of the selected clients. Updates that are not finite have the highest scores. Uploads:
    the client's number.
    """

    byzantine: Annotated[Size, Doc("Byzantine clients per round, f")] = 1
    select: Annotated[Count, Doc("updates to average; above 1: Multi-Krum")] = 1

    tiny = {"byzantine": 0}
    strays = 1.0  # it follows one client, here the first
    uploads = "1"
    compute = "distances of all pairs"

    def describe_uploads(self, spec: Spec) -> str:
        return "sends its number, so that ties are broken in the same way"

    def reply(self, v: View, weights: Weights) -> tuple[Tree, Tree]:
        return {}, {"client": Stack(v.info.client)}

    def _rule(self, r: Round) -> Callable[[Tensor], Tensor]:
        n, f = r.cohort, self.byzantine
        if f and n < 2 * f + 3:
            raise FieldError(
                f"{self.name}.byzantine = {f} needs {2 * f + 3} clients in a round, and this one "
                f"has {n}; lower byzantine or sample more clients per round"
            )
        if self.select > n:
            raise FieldError(
                f"{self.name}.select = {self.select} is above the round's {n} clients; lower select"
            )
        order = torch.argsort(r.uploads["client"])
        updates = tree.map(
            lambda _, new, old: new[order] - old, r.mean_delta, r.clients.params, r.anchor.params
        )
        neighbours = min(max(n - f - 2, 1), n - 1)
        distances = _sq_distances(updates, n).sort(1).values[:, 1 : 1 + neighbours]  # 0: itself
        selected = order[torch.argsort(distances.sum(1), stable=True)[: self.select]]
        return lambda x: x[selected].mean(0)


@register
@dataclass(frozen=True)
class TrimmedMean(_Robust):
    r"""Average each coordinate without its smallest and largest values.

    :math:`w \leftarrow w + \frac{1}{n - 2b}\sum_j\Delta_j`, where each coordinate's sum omits the b
    smallest and the b largest of the n updates (definition 2, where :math:`b = \beta n`).

    Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML
    2018, arXiv:1803.01498.

    A round needs more than 2b clients. Client sizes do not matter. BatchNorm statistics are
    trimmed likewise. NaN counts as the largest value. Sends / keeps: nothing.
    """

    byzantine: Annotated[
        Size, Doc("values to trim at each end, b: Byzantine clients per round")
    ] = 1

    tiny = {"byzantine": 0}
    compute = "a sort over clients"

    def _rule(self, r: Round) -> Callable[[Tensor], Tensor]:
        n, b = r.cohort, self.byzantine
        if n <= 2 * b:
            raise FieldError(
                f"{self.name}.byzantine = {b} needs {2 * b + 1} clients in a round, and this one "
                f"has {n}; lower byzantine or sample more clients per round"
            )
        return lambda x: x.sort(0).values[b : n - b].mean(0)


@register
@dataclass(frozen=True)
class Median(_Robust):
    r"""Take the median of each coordinate.

    :math:`w \leftarrow w + med(\Delta_1, \Delta_2, ..., \Delta_n)` (definition 1), for an even
    number of clients the mean of the two middle values.

    Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML
    2018, arXiv:1803.01498.

    Client sizes do not matter. BatchNorm statistics are medians, too. NaN counts as the largest
    value. Sends / keeps: nothing.
    """

    compute = "a sort over clients"

    def _rule(self, r: Round) -> Callable[[Tensor], Tensor]:
        low, high = (r.cohort - 1) // 2, r.cohort // 2
        return lambda x: x.sort(0).values[low : high + 1].mean(0)


def _sq_distances(updates: Params, n: int) -> Tensor:
    """Squared distances ``[n, n]`` between stacked updates."""
    total = torch.zeros(n, n)
    for x in updates.values():
        total = total.to(x) + torch.stack([((x - y) ** 2).flatten(1).sum(1) for y in x])
    return (total + total.T) / 2  # symmetric to the last bit, so that ties are exact
