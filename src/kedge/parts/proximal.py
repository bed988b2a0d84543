"""Methods that change the local objective near the global model: proximal terms and sharpness.

FedProx (Li et al. 2020), FedDyn (Acar et al. 2021), FedSAM (Qu et al. 2022, Caldarola et al. 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.part import Doc, Out, Part, register
from kedge.core.round import Round
from kedge.core.task import Batch
from kedge.core.tree import Params, Tree, Weights
from kedge.core.view import Spec, View
from kedge.schema import NotNegative, Positive


@register
@dataclass(frozen=True)
class FedProx(Part):
    r"""Keep the local model near the global model by a proximal term.

    :math:`F_k(w) + \frac{\mu}{2}\|w - w^t\|^2` (eq. 2).

    Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, arXiv:1812.06127.

    Neutral at: mu = 0. Sends / keeps: nothing.
    """

    mu: Annotated[NotNegative, Doc("weight of the proximal term")] = 0.01

    presets = {
        "fedimpro": {"mu": 0.1},
        "fedtr": {"mu": 0.01},
        "flboost": {"mu": 1e-4},
        "fedcog": {"mu": 0.01},
        "fedbr": {"mu": 0.1},
    }
    neutral = {"mu": 0.0}
    made_for = {"labels": "mild"}

    def anchor_pull(self) -> float:
        return self.mu

    def term(self, v: View, params: Params, batch: Batch, out: Out) -> Tensor:
        return 0.5 * self.mu * tree.sq_dist(v.public(params), v.anchor.params)


class ByShare(Part):
    """Pulls towards a model that drifts; ``by_share`` is a field. If it is set, clients scale their
    objective by their share of the data, and the server takes the plain sum of updates."""

    by_share: bool

    @property
    def needs_sum(self) -> bool:  # type: ignore[override]
        return self.by_share

    @property
    def needs_share_sum(self) -> bool:  # type: ignore[override]
        return not self.by_share

    def anchor_pull(self) -> None:
        return None


@register
@dataclass(frozen=True)
class FedDyn(ByShare):
    r"""Align local optima with the global optimum by a linear term updated every round.

    Client: :math:`\min_\theta L_k(\theta) - \langle g_k, \theta\rangle + \frac{\alpha}{2}\|\theta
    - \theta^{t-1}\|^2`, then :math:`g_k \leftarrow g_k - \alpha(\theta_k^t - \theta^{t-1})`.
    Server: :math:`h \leftarrow h - \frac{\alpha}{m}\sum_{k \in P_t} r_k(\theta_k^t -
    \theta^{t-1})`, :math:`\theta^t = \frac{1}{|P_t|}\sum_k \theta_k^t - \frac{1}{\alpha} h`
    (algorithm 1), where :math:`r_k = m n_k/\sum_j n_j` is the client's share of the data.

    Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021, arXiv:2111.04263.

    Deviations: models and h are averaged with the run's client weights (by size by default), so
    that the fixed point minimises the run's objective :math:`\sum_k p_k L_k`. The paper's plain
    means are ``weighting = "uniform"``, where all r_k are 1. ``official`` has the same fixed point
    in the way of the released code: alpha / r_k on client k, stiffer for small clients, and a plain
    mean in h. A small alpha needs gradient clipping or many local steps. Keeps: g_k.
    """

    alpha: Annotated[Positive, Doc("weight of the quadratic term")] = 0.01

    by_share: Annotated[bool, Doc("client k has alpha / r_k, r_k its share of the data")] = False

    presets = {
        "flboost": {"alpha": 0.01},
        "fedntd": {"alpha": 0.1},
        "official": {"by_share": True},
    }
    tiny = {"alpha": 1.0}
    solves = {"alpha": 8.0}
    keeps = "P"

    def server_init(self, spec: Spec) -> Tree:
        return tree.zeros_like(spec.params)  # h

    def client_init(self, spec: Spec) -> Tree:
        return tree.zeros_like(spec.params)  # g_k

    def term(self, v: View, params: Params, batch: Batch, out: Out) -> Tensor:
        public = v.public(params)
        proximal = 0.5 * self._alpha(v) * tree.sq_dist(public, v.anchor.params)
        return proximal - tree.dot(v.client, public)

    def reply(self, v: View, weights: Weights) -> tuple[Tree, Tree]:
        alpha = self._alpha(v)
        new = tree.map(
            lambda g, local, anchor: g - alpha * (local - anchor),
            v.client,
            weights.params,
            v.anchor.params,
        )
        return new, {}

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        scale = self.alpha / r.num_clients
        total_delta = r.sum_delta if self.by_share else r.share_delta  # r_k alpha_k Delta_k / alpha
        h = tree.map(lambda h, total: h - scale * total, r.server, total_delta)
        params = tree.map(lambda h, w: w - h / self.alpha, h, weights.params)
        return weights._replace(params=weights.params | params), h

    def _alpha(self, v: View) -> Tensor | float:
        return self.alpha / v.info.share if self.by_share else self.alpha


# -- Methods that seek flat minima. FedSAM (Qu et al. 2022, Caldarola et al. 2022) -----------------


@register
@dataclass(frozen=True)
class FedSAM(Part):
    r"""Descend by the gradient at the worst nearby point: sharpness-aware minimisation (SAM).

    :math:`w \leftarrow w - \eta\nabla F_k\big(w + \rho\,\nabla F_k(w)/\|\nabla F_k(w)\|\big)`,
    both on the same batch (algorithm 1).

    Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022,
    arXiv:2206.02618; Caldarola et al., ECCV 2022, arXiv:2203.11834.

    Written as a correction of the gradient, so that it adds to other corrections. BatchNorm's
    running statistics are updated in the first pass only. Neutral at: rho = 0.
    """

    rho: Annotated[NotNegative, Doc("radius of the neighbourhood")] = 0.1

    presets = {"fedcog": {"rho": 0.5}}
    neutral = {"rho": 0.0}
    compute = "a second gradient"

    def correct(self, v: View, params: Params, grads: Params) -> Params:
        scale = self.rho / (torch.sqrt(tree.sq_norm(grads)) + 1e-12)
        worst = tree.map(lambda w, g: w + scale * g, params, grads)
        return tree.sub(v.grad(worst), grads)
