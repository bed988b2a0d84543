"""Methods that correct client drift.

FedDC (Gao et al. 2022), FedSpeed (Sun et al. 2023), FedPVR (Li et al. 2023), FedCM (Xu et al.
2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.part import Doc, Mean, Out, Part, Sum, register
from kedge.core.round import Round
from kedge.core.task import Batch
from kedge.core.tree import Params, Tree, Weights
from kedge.core.view import Spec, View
from kedge.errors import FieldError, UnknownName
from kedge.parts.proximal import ByShare
from kedge.parts.variates import SCAFFOLD
from kedge.schema import NotNegative, Positive, Share


@register
@dataclass(frozen=True)
class FedDC(ByShare):
    r"""Decouple local drift by a drift variable, and correct the gradient by control variates.

    Client: :math:`\min_\theta L_k(\theta) + \frac{\alpha}{2}\|\theta + h_k - w\|^2 + \langle\theta,
    s - s_k\rangle`, then :math:`h_k \leftarrow h_k + \theta_k - w`, :math:`s_k^+ = s_k - s +
    \frac{1}{K\eta}(w - \theta_k)`. Server: :math:`w \leftarrow \frac{1}{|S|}\sum_{k \in S}\theta_k
    + \frac{1}{N}\sum_{k=1}^N r_k h_k`, :math:`s \leftarrow s + \frac{1}{N}\sum_{k \in S} r_k(s_k^+
    - s_k)` (algorithm 1), where :math:`r_k = N n_k/\sum_j n_j` is the client's share of the data.

    Gao et al., FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and
    Correction, CVPR 2022, arXiv:2203.11751.

    Deviations: the linear term follows the released code, with a control variate over all rounds;
    the paper uses the last update alone. h is averaged over all clients, also under partial
    participation. Models, h and s are averaged with the run's client weights, so that the fixed
    point minimises the run's objective :math:`\sum_k p_k L_k`; the paper's plain means are
    ``weighting = "uniform"``, where all r_k are 1. ``official`` has the same fixed point in the
    way of the released code: alpha / r_k and s / r_k on client k, stiffer for small clients, and a
    plain mean of h. Sends: s. Uploads: r_k times the change of s_k. Keeps: h_k, s_k.
    """

    alpha: Annotated[NotNegative, Doc("weight of the drift term")] = 0.01
    by_share: Annotated[
        bool, Doc("client k has alpha / r_k and s / r_k, r_k its share of the data")
    ] = False

    presets = {"official": {"by_share": True}}
    solves = {"alpha": 1.0}
    needs_plain_sgd = True
    sends = "P"
    uploads = "P"
    keeps = "2*P"

    def describe_uploads(self, spec: Spec) -> str:
        return (
            "sends the change of its estimate of the gradient, one number per parameter, a "
            "function of the client's gradients"
        )

    def server_init(self, spec: Spec) -> Tree:
        zero = tree.zeros_like(spec.params)
        return {"slope": zero, "drift": zero}  # s, mean of h_k

    def client_init(self, spec: Spec) -> Tree:
        zero = tree.zeros_like(spec.params)
        return {"slope": zero, "drift": zero}  # s_k, h_k

    def send(self, server: Tree) -> Tree:
        return server["slope"]

    def term(self, v: View, params: Params, batch: Batch, out: Out) -> Tensor:
        scale = 1 / v.info.share if self.by_share else 1.0
        drifted = _drifted_delta(v.client["drift"], v, params)
        proximal = 0.5 * scale * self.alpha * tree.sq_norm(drifted)
        return proximal + tree.dot(tree.sub(self._slope(v), v.client["slope"]), params)

    def reply(self, v: View, weights: Weights) -> tuple[Tree, Tree]:
        k_eta = v.info.effective_steps * v.info.lr
        slope = tree.map(
            lambda sk, s, w, p: sk - s + (w - p) / k_eta,
            v.client["slope"],
            self._slope(v),
            v.anchor.params,
            weights.params,
        )
        change = tree.scale(tree.sub(slope, v.client["slope"]), v.info.share)
        drift = _drifted_delta(v.client["drift"], v, weights.params)
        return {"slope": slope, "drift": drift}, Sum(change)

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        slope = tree.map(lambda s, c: s + c / r.num_clients, r.server["slope"], r.uploads)
        total = r.sum_delta if self.by_share else r.share_delta
        weights, drift = release_drift(r, weights, r.server["drift"], total)
        return weights, {"slope": slope, "drift": drift}

    def _slope(self, v: View) -> Params:
        """s as client k takes it."""
        return tree.scale(v.sent, 1 / v.info.share) if self.by_share else v.sent


@register
@dataclass(frozen=True)
class FedSpeed(Part):
    r"""Seek flat minima near the global model, and correct the bias of the proximal term.

    Client: :math:`v \leftarrow v - \eta\big[(1 - a) g + a g' + \lambda(v - w + h_k)\big]`,
    :math:`g' = \nabla F_k(v + \rho\,g/\|g\|)` on the same batch, then :math:`h_k \leftarrow h_k +
    v - w`. Server: :math:`w \leftarrow \frac{1}{|S|}\sum_{k \in S} w_k + \frac{1}{N}\sum_{k=1}^N
    r_k h_k` (algorithm 1, which stores :math:`-\lambda h_k`), :math:`r_k = N n_k/\sum_j n_j`.

    Sun et al., FedSpeed: Larger Local Interval, Less Communication Round, and Higher
    Generalization Accuracy, ICLR 2023, arXiv:2302.10429.

    Deviations: lambda multiplies the proximal term, the paper's divides it; h is averaged over all
    clients, as in the released code. Models and h are averaged with the run's client weights, so
    that at rho = 0 the fixed point minimises the run's objective :math:`\sum_k p_k F_k` (with the
    ascent step it does not); the paper's plain means are ``weighting = "uniform"``, where all r_k
    are 1. BatchNorm's running statistics are updated in the first pass only. Keeps: h_k.
    """

    lam: Annotated[NotNegative, Doc("weight of the proximal term and of its correction")] = 0.1
    rho: Annotated[NotNegative, Doc("norm of the ascent step")] = 0.1
    merge: Annotated[Share, Doc("share of the gradient after the ascent step")] = 1.0

    solves = {"lam": 8.0, "rho": 0.0}
    needs_share_sum = True
    keeps = "P"
    compute = "a second gradient"

    def anchor_pull(self) -> None:
        return None

    def server_init(self, spec: Spec) -> Tree:
        return tree.zeros_like(spec.params)  # mean of h_k

    def client_init(self, spec: Spec) -> Tree:
        return tree.zeros_like(spec.params)  # h_k

    def correct(self, v: View, params: Params, grads: Params) -> Params:
        scale = self.rho / (torch.sqrt(tree.sq_norm(grads)) + 1e-12)
        ascent_grads = v.grad(tree.map(lambda w, g: w + scale * g, params, grads))
        sharpness = tree.map(lambda a, g: self.merge * (a - g), ascent_grads, grads)
        drifted = _drifted_delta(v.client, v, params)
        return sharpness | tree.map(lambda u, s: s + self.lam * u, drifted, sharpness)

    def reply(self, v: View, weights: Weights) -> tuple[Tree, Tree]:
        return _drifted_delta(v.client, v, weights.params), {}

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        return release_drift(r, weights, r.server, r.share_delta)


@register
@dataclass(frozen=True)
class FedPVR(SCAFFOLD):
    r"""Correct client drift with control variates in the last layers only.

    SCAFFOLD's rules, :math:`y \leftarrow y - \eta_l(g_k(y) - c_k + c)`, :math:`c_k^+ = c_k - c +
    \frac{1}{K\eta_l}(x - y)`, :math:`c \leftarrow c + \frac{1}{N}\sum_{k \in S} r_k(c_k^+ - c_k)`,
    for the parameters from a given layer on; FedAvg for the layers before it (algorithm 1). So only
    the corrected layers have the run's objective as their own; the others are biased as in FedAvg.

    Li et al., On the Effectiveness of Partial Variance Reduction in Federated Learning with
    Heterogeneous Data, CVPR 2023, arXiv:2212.02191.

    Deviations: those of SCAFFOLD. Layers are ordered as the module defines them. Sends: c.
    Uploads: r_k times the change of c_k. Keeps: c_k. Each has the size of the corrected layers: H
    for the head, at most P otherwise.
    """

    from_stage: Annotated[
        str, Doc("first corrected layer, a child of the model; empty: the head")
    ] = ""

    made_for = {}
    solves_for = "head"
    sends = "P if from_stage else H"
    uploads = "P if from_stage else H"
    keeps = "P if from_stage else H"

    def describe_uploads(self, spec: Spec) -> str:
        return (
            "sends the change of its control variate for the upper layers, a function of the "
            "client's gradients"
        )

    def server_init(self, spec: Spec) -> Tree:
        return self._corrected(spec)  # c

    def client_init(self, spec: Spec) -> Tree:
        return self._corrected(spec)  # c_k

    def _corrected(self, spec: Spec) -> Params:
        """Zeros for every shared parameter that is corrected."""
        model, stage = spec.model, self.from_stage
        if not stage:
            model.require_head(self.name)
            names = model.head_names()
        else:
            known = [*model.cuts, *([model.head_name] if model.head_name else [])]
            if stage not in known:
                raise UnknownName("layer", stage, known)
            inside = [n.startswith(f"{stage}.") for n in model.names]
            if not any(inside):
                raise FieldError(
                    f"{self.name}.from_stage = {stage!r} has no parameters; name the next layer"
                )
            names = model.names[inside.index(True) :]
        return tree.zeros_like({n: spec.params[n] for n in names if n in spec.params})


@register
@dataclass(frozen=True)
class FedCM(Part):
    r"""Add the last round's global direction to every local step as momentum.

    Client: :math:`v \leftarrow v - \eta[\alpha g + (1 - \alpha) m]`. Server: :math:`m \leftarrow
    -\frac{1}{\eta K}\sum_k p_k\Delta_k`, :math:`w \leftarrow w + \eta_g\sum_k p_k\Delta_k`, so that
    m is a running mean of gradients. It starts at 0, as in the paper and the released code, so the
    first round's steps are :math:`\alpha\eta g`; with ``start = gradient`` they are :math:`\eta g`.

    Xu et al., FedCM: Federated Learning with Client-level Momentum, 2021, arXiv:2106.10874.

    Deviations: eta_g = 1 is the plain mean of the models; the paper's server step also has the
    factor :math:`\eta K`. K is the mean over clients that take different numbers of steps, and with
    momentum the effective number of steps. Weight decay is not part of the mixture. With full
    participation the fixed point is FedAvg's at the learning rate alpha eta. Neutral at:
    alpha = 1, eta_g = 1. Sends: m. Uploads: the number of steps.
    """

    alpha: Annotated[Share, Doc("share of the local gradient")] = 0.1
    eta_g: Annotated[Positive, Doc("server learning rate")] = 1.0
    start: Annotated[
        Literal["zero", "gradient"],
        Doc("first round: m = 0 (paper and released code), or the local gradient alone"),
    ] = "zero"

    presets = {"fedbr": {"alpha": 0.1}}
    neutral = {"alpha": 1.0, "eta_g": 1.0}
    needs_plain_sgd = True
    sends = "P"
    uploads = "1"

    def server_init(self, spec: Spec) -> Tree:
        return tree.zeros_like(spec.params)  # m

    def phase(self, round: int) -> str:
        return "first" if round == 0 and self.start == "gradient" else "later"

    def send(self, server: Tree) -> Tree:
        return server

    def correct(self, v: View, params: Params, grads: Params) -> Params:
        if v.phase == "first":  # m does not count yet
            return {}
        return tree.map(lambda m, g: (1 - self.alpha) * (m - g), v.sent, grads)

    def reply(self, v: View, weights: Weights) -> tuple[Tree, Tree]:
        return {}, {"steps": Mean(v.info.effective_steps)}

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        k_eta = r.lr * r.uploads["steps"]
        m = tree.map(lambda d: -d / k_eta, r.mean_delta)
        # written as an addition to the plain step, so that eta_g = 1 is bit-identical
        params = tree.map(
            lambda _, new, x: new + (self.eta_g - 1) * (new - x), m, weights.params, r.anchor.params
        )
        return weights._replace(params=weights.params | params), m


def _drifted_delta(drift: Params, v: View, params: Params) -> Params:
    """h_k + (local - anchor) over the shared parameters."""
    return tree.map(lambda h, p, w: h + (p - w), drift, params, v.anchor.params)


def release_drift(
    r: Round, weights: Weights, drift: Params, total: Params
) -> tuple[Weights, Params]:
    """Update the mean of all clients' h_k and add it to the model.

    The mean changes by ``total``, the sum of the cohort's updates, over N. Returns ``(weights,
    mean)``.
    """
    drift = tree.map(lambda h, change: h + change / r.num_clients, drift, total)
    params = tree.map(torch.add, drift, weights.params)
    return weights._replace(params=weights.params | params), drift
