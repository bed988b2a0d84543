"""Methods that correct the local gradient by control variates.

SCAFFOLD (Karimireddy et al. 2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kedge.core import tree
from kedge.core.part import Doc, Part, Sum, register
from kedge.core.round import Round
from kedge.core.tree import Params, Tree, Weights
from kedge.core.view import Spec, View
from kedge.schema import Positive


@register
@dataclass(frozen=True)
class SCAFFOLD(Part):
    r"""Correct client drift with control variates (algorithm 1, option II).

    Client: :math:`y \leftarrow y - \eta_l(g_k(y) - c_k + c)`, then :math:`c_k^+ = c_k - c +
    \frac{1}{K\eta_l}(x - y)`. Server: :math:`x \leftarrow x + \frac{\eta_g}{|S|}\sum_{k \in S}(y_k
    - x)`, :math:`c \leftarrow c + \frac{1}{N}\sum_{k \in S} r_k(c_k^+ - c_k)`, where :math:`r_k = N
    n_k/\sum_j n_j` is the client's share of the data.

    Karimireddy et al., SCAFFOLD, ICML 2020, arXiv:1910.06378.

    Deviations: updates and control variates are averaged with the run's client weights (by size by
    default), so that the fixed point minimises the run's objective :math:`\sum_k p_k f_k`. The
    paper's plain means are ``weighting = "uniform"``, where all r_k are 1. With momentum, K is the
    effective number of steps. Sends: c. Uploads: r_k times the change of c_k. Keeps: c_k.
    """

    eta_g: Annotated[Positive, Doc("server learning rate")] = 1.0

    solves = {}
    needs_plain_sgd = True
    made_for = {"labels": "moderate", "features": "moderate"}
    sends = "P"
    uploads = "P"
    keeps = "P"

    def describe_uploads(self, spec: Spec) -> str:
        return (
            "sends the change of its control variate, one number per parameter, a function of the "
            "client's gradients"
        )

    def server_init(self, spec: Spec) -> Tree:
        return tree.zeros_like(spec.params)  # c

    def client_init(self, spec: Spec) -> Tree:
        return tree.zeros_like(spec.params)  # c_k

    def send(self, server: Tree) -> Tree:
        return server

    def correct(self, v: View, params: Params, grads: Params) -> Params:
        return tree.sub(v.sent, v.client)  # + c - c_k

    def reply(self, v: View, weights: Weights) -> tuple[Tree, Tree]:
        k_eta = v.info.effective_steps * v.info.lr
        new = tree.map(
            lambda ck, c, x, y: ck - c + (x - y) / k_eta,
            v.client,
            v.sent,
            v.anchor.params,
            weights.params,
        )
        return new, Sum(tree.scale(tree.sub(new, v.client), v.info.share))

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        c = tree.map(lambda c, change: c + change / r.num_clients, r.server, r.uploads)
        params = tree.map(
            lambda new, x: x + self.eta_g * (new - x), weights.params, r.anchor.params
        )
        return weights._replace(params=params), c
