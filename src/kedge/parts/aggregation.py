"""Methods that change how the server aggregates updates.

FedNova (Wang et al. 2020), FedAvgM (Hsu et al. 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kedge.core import tree
from kedge.core.part import Doc, Part, register
from kedge.core.round import Round
from kedge.core.tree import Params, Tree, Weights
from kedge.core.view import Spec, View
from kedge.schema import Positive, Share


@register
@dataclass(frozen=True)
class FedNova(Part):
    r"""Average updates normalised by the clients' effective numbers of steps.

    :math:`w \leftarrow w + \big(\sum_k p_k a_k\big)\sum_k p_k \frac{\Delta_k}{a_k}` (eqs. 3 and
    8), with :math:`a_k = \tau_k` for plain SGD, :math:`a_k = [\tau_k - \rho(1 -
    \rho^{\tau_k})/(1 - \rho)]/(1 - \rho)` for momentum :math:`\rho`, and :math:`a_k = [1 - (1 -
    \eta\mu)^{\tau_k}]/(\eta\mu)` beside FedProx; with both, the update of a constant gradient.

    Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated
    Optimization, NeurIPS 2020, arXiv:2007.07481.

    Equal to FedAvg when all clients take the same number of steps. Weight decay counts as part of
    the objective. Refused beside parts that pull towards a drifted model (FedDyn, FedDC, FedSpeed,
    FedTR). Deviations: beside FedProx the released code adds the pull after the momentum, and its
    first factor is :math:`\sum_k p_k\tau_k`. Uploads: the update a second time, weighted, and a_k.
    """

    side = "server"
    made_for = {"sizes": "moderate"}
    needs_pull = True
    uploads = "P + 1"

    def refuses(self, other: Part) -> str:
        if other.anchor_pull() is not None:
            return ""
        return (
            f"fednova cannot tell how {other.name} shrinks a step: its pull is towards a model "
            "that drifts with the sum of the updates as they are. Leave one of them out"
        )

    def describe_uploads(self, spec: Spec) -> str:
        return "sends its update divided by its number of steps"

    def contribute(self, v: View, delta: Params) -> Tree:
        a, n = v.info.pulled_steps, v.info.weight
        return {"d": tree.scale(delta, n / a), "a": n * a}

    def combine(self, r: Round) -> Params:
        mean_a = r.sums["a"] / r.weight
        return tree.map(lambda d: mean_a * (d / r.weight), r.sums["d"])


@register
@dataclass(frozen=True)
class FedAvgM(Part):
    r"""Apply momentum to the aggregated update on the server.

    :math:`u \leftarrow \beta u + \Delta`, :math:`w \leftarrow w + \eta(\Delta + \beta u)` with
    :math:`\Delta` the aggregated update: Nesterov's momentum, which the paper's experiments use
    (section 4.2). ``nesterov = false`` steps by :math:`\eta u`, as the paper's equation does.

    Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification, 2019, arXiv:1909.06335.

    Neutral at: beta = 0, lr = 1. BatchNorm statistics are averaged, without momentum.
    """

    beta: Annotated[Share, Doc("momentum of the server")] = 0.9
    lr: Annotated[Positive, Doc("server learning rate")] = 1.0
    nesterov: Annotated[bool, Doc("Nesterov's momentum; false: heavy ball")] = True

    side = "server"
    presets = {
        "fedcog": {"beta": 0.1, "nesterov": False},
        "fedntd": {"beta": 0.7, "nesterov": False},
    }
    neutral = {"beta": 0.0}

    def server_init(self, spec: Spec) -> Tree:
        return tree.zeros_like(spec.params)  # u

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        delta = tree.map(lambda u, new, old: new - old, r.server, weights.params, r.anchor.params)
        u = tree.axpy(self.beta, r.server, delta)
        # written as an addition to the plain update, so that beta = 0, lr = 1 is bit-identical
        step = tree.axpy(self.beta, u, delta) if self.nesterov else u
        params = tree.map(lambda s, d, w: w + (self.lr * s - d), step, delta, weights.params)
        return weights._replace(params=weights.params | params), u
