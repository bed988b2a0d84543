"""Methods with an adaptive server: its step size or the client weights depend on the updates.

FedAdagrad, FedAdam, FedYogi (Reddi et al. 2021), FedExP (Jhunjhunwala et al. 2023), GroupDRO
(Sagawa et al. 2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.part import Doc, Out, Part, register
from kedge.core.round import Round
from kedge.core.task import Batch
from kedge.core.tree import Params, Tree, Weights
from kedge.core.view import Spec, View
from kedge.schema import NotNegative, Positive, Share


@dataclass(frozen=True)
class _FedOpt(Part):
    """Adaptive server optimizer. Subclasses define the second moment."""

    lr: Annotated[Positive, Doc("server learning rate")] = 0.1
    beta1: Annotated[Share, Doc("momentum of the update")] = 0.9
    tau: Annotated[Positive, Doc("degree of adaptivity; the second moment starts at tau^2")] = 1e-3

    side = "server"

    def server_init(self, spec: Spec) -> Tree:
        zero = tree.zeros_like(spec.params)
        return {"m": zero, "v": tree.map(lambda x: x + self.tau * self.tau, zero)}

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        d = tree.map(lambda _, new, x: new - x, r.server["m"], weights.params, r.anchor.params)
        m = tree.map(lambda m, d: self.beta1 * m + (1 - self.beta1) * d, r.server["m"], d)
        v = tree.map(lambda v, d: self._second_moment(v, d * d), r.server["v"], d)
        params = tree.map(
            lambda m, v, x: x + self.lr * m / (torch.sqrt(v) + self.tau), m, v, r.anchor.params
        )
        return weights._replace(params=weights.params | params), {"m": m, "v": v}

    def _second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """Next second moment from the current one and the squared update."""
        raise NotImplementedError


@register
@dataclass(frozen=True)
class FedAdagrad(_FedOpt):
    r"""Adagrad on the server: steps scaled by the sum of squared updates.

    :math:`m \leftarrow \beta_1 m + (1 - \beta_1)\Delta`, :math:`v \leftarrow v + \Delta^2`,
    :math:`w \leftarrow w + \eta\frac{m}{\sqrt v + \tau}`, coordinate by coordinate, :math:`\Delta`
    the aggregated update, v starting at :math:`\tau^2` (algorithm 2).

    Reddi et al., Adaptive Federated Optimization, ICLR 2021, arXiv:2003.00295.

    BatchNorm statistics are averaged. Sends / keeps: nothing.
    """

    beta1: Annotated[Share, Doc("momentum of the update")] = 0.0

    strays = 0.005  # its steps shrink: it is still on the way to FedAvg's fixed point

    def _second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


@register
@dataclass(frozen=True)
class FedAdam(_FedOpt):
    r"""Adam on the server: steps scaled by the running mean of squared updates.

    :math:`m \leftarrow \beta_1 m + (1 - \beta_1)\Delta`, :math:`v \leftarrow \beta_2 v + (1 -
    \beta_2)\Delta^2`, :math:`w \leftarrow w + \eta\frac{m}{\sqrt v + \tau}`, coordinate by
    coordinate, :math:`\Delta` the aggregated update, v starting at :math:`\tau^2` (algorithm 2).

    Reddi et al., Adaptive Federated Optimization, ICLR 2021, arXiv:2003.00295.

    Without bias correction, as in the paper. BatchNorm statistics are averaged. Sends /
    keeps: nothing.
    """

    beta2: Annotated[Share, Doc("momentum of the second moment")] = 0.99

    presets = {"fedcog": {"lr": 1.0}}

    def _second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@register
@dataclass(frozen=True)
class FedYogi(_FedOpt):
    r"""Yogi on the server: Adam whose second moment changes by at most the squared update.

    :math:`m \leftarrow \beta_1 m + (1 - \beta_1)\Delta`, :math:`v \leftarrow v - (1 -
    \beta_2)\Delta^2\,sign(v - \Delta^2)`, :math:`w \leftarrow w + \eta\frac{m}{\sqrt v + \tau}`,
    coordinate by coordinate, :math:`\Delta` the aggregated update, v starting at :math:`\tau^2`
    (algorithm 2).

    Reddi et al., Adaptive Federated Optimization, ICLR 2021, arXiv:2003.00295.

    Without bias correction, as in the paper. BatchNorm statistics are averaged. Sends /
    keeps: nothing.
    """

    beta2: Annotated[Share, Doc("momentum of the second moment")] = 0.99

    strays = 0.002  # it still swings about FedAvg's fixed point

    def _second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * torch.sign(v - square)


@register
@dataclass(frozen=True)
class FedExP(Part):
    r"""Extrapolate along the mean update, further when the clients' updates disagree more.

    :math:`w \leftarrow w + \eta_g\Delta`, :math:`\Delta = \sum_k p_k\Delta_k`, :math:`\eta_g =
    \max\big(1, \frac{\sum_k p_k\|\Delta_k\|^2}{2(\|\Delta\|^2 + S\epsilon)}\big)` (algorithm 1).
    The global model is the mean of the last two iterates; clients start from the last one.

    Jhunjhunwala, Wang and Joshi, FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR
    2023, arXiv:2301.09604.

    Deviations: the client weights p are the run's (the paper's are equal: ``weighting =
    "uniform"``). The factor S, the number of clients in the round, is that of the released code,
    with which the values of epsilon were found; the printed form lacks it (``paper``). Epsilon is
    constant (it decays in the released code). BatchNorm statistics are averaged, also of the two
    iterates. Write ``average = false`` beside a part that changes the model after the last round
    (CCVR). Neutral at: a huge eps, average = false. Uploads: the update a second time, weighted,
    and its squared norm.
    """

    eps: Annotated[NotNegative, Doc("bounds the step when updates cancel out (0.1 on EMNIST)")] = (
        1e-3
    )
    cohort_eps: Annotated[
        bool, Doc("multiply eps by the number of clients in the round, S (the released code)")
    ] = True
    average: Annotated[bool, Doc("the global model is the mean of the last two iterates")] = True

    side = "server"
    presets = {
        "fedcog": {"eps": 1e-3},
        "emnist": {"eps": 0.1},
        "paper": {"cohort_eps": False},
    }
    neutral = {"eps": 1e30, "average": False}
    uploads = "P + 1"

    def describe_uploads(self, spec: Spec) -> str:
        return "sends its update a second time and its squared norm, for the size of the step"

    def server_init(self, spec: Spec) -> Tree:
        if not self.average:
            return {}
        share = torch.zeros((), dtype=spec.dtype, device=spec.device)  # of the last but one
        return {"params": spec.params, "buffers": spec.buffers, "share": share}

    def contribute(self, v: View, delta: Params) -> Tree:
        n = v.info.weight
        return {"d": tree.scale(delta, n), "square": n * tree.sq_norm(delta)}

    def combine(self, r: Round) -> Params:
        mean = tree.map(lambda d: d / r.weight, r.sums["d"])
        spread = r.sums["square"] / r.weight
        eps = self.eps * r.cohort if self.cohort_eps else self.eps
        eta = torch.clamp(spread / (2 * (tree.sq_norm(mean) + eps)), min=1.0)
        return tree.scale(mean, eta)

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        if not self.average:
            return weights, {}
        params = {n: r.anchor.params[n] for n in r.server["params"]}
        # the initial model is no iterate of the method: the first mean is after two rounds
        share = torch.full_like(r.server["share"], 0.5 if r.round else 0.0)
        return weights, {"params": params, "buffers": r.anchor.buffers, "share": share}

    def output(self, server: Tree, weights: Weights) -> Weights:
        if not self.average:
            return weights

        def mean(old: Tensor, new: Tensor) -> Tensor:
            return new + server["share"] * (old - new) if new.is_floating_point() else new

        return Weights(
            weights.params | tree.map(mean, server["params"], weights.params),
            tree.map(mean, server["buffers"], weights.buffers),
        )


@register
@dataclass(frozen=True)
class GroupDRO(Part):
    r"""Increase the weight of clients with a high loss in the average.

    :math:`q_k \leftarrow q_k e^{\eta l_k}`, :math:`w \leftarrow w + \sum_{k \in S}
    \frac{q_k}{\sum_{j \in S} q_j}\Delta_k`, with :math:`l_k` the mean loss of the client's steps
    and q starting at 1 (algorithm 1, with clients as groups).

    Sagawa et al., Distributionally Robust Neural Networks for Group Shifts, ICLR 2020,
    arXiv:1911.08731; for clients as in Guo et al., FedBR, ICML 2023, arXiv:2205.13462.

    Deviations: q is normalised over the cohort in each average but stored unnormalised, so that
    absent clients keep their relative weight. The loss is the task's, without other parts' terms.
    ``official`` uses the loss of the round's first step alone, as FedBR's code does. Client sizes
    do not matter. Sends: one number that keeps q in range. Uploads: the update a second time,
    weighted, and q_k. Keeps: log q_k.
    """

    eta: Annotated[NotNegative, Doc("step size of the client weights q")] = 0.01
    loss: Annotated[
        Literal["mean", "first"], Doc("l_k: mean over the round's steps, or the first step's loss")
    ] = "mean"

    side = "server"
    presets = {"fedbr": {"eta": 0.01}, "official": {"eta": 0.01, "loss": "first"}}
    strays = 0.03  # it minimises the largest loss, not the mean
    sends = "1"
    uploads = "P + 1"
    keeps = "1"

    def describe_uploads(self, spec: Spec) -> str:
        return "sends its update weighted by its loss, and the weight"

    def server_init(self, spec: Spec) -> Tree:
        # log of the last cohort's mean q: cancels in the average, keeps exp from overflowing
        return {"level": torch.zeros((), dtype=spec.dtype, device=spec.device)}

    def client_init(self, spec: Spec) -> Tree:
        return {"log_q": torch.zeros((), dtype=spec.dtype, device=spec.device)}

    def send(self, server: Tree) -> Tree:
        return server

    def prepare(self, v: View) -> Tree:
        return {"loss": torch.zeros((), dtype=v.spec.dtype, device=v.spec.device)}

    def observe(self, v: View, params: Params, batch: Batch, out: Out) -> Tree:
        loss, total = v.task.loss(out.logits, batch).mean(), v.local["loss"]
        if self.loss == "first":
            return {"loss": torch.where(v.step == 0, loss, total)}
        return {"loss": total + loss / v.info.num_steps}

    def reply(self, v: View, weights: Weights) -> tuple[Tree, Tree]:
        return {"log_q": self._log_q(v)}, {}

    def contribute(self, v: View, delta: Params) -> Tree:
        q = torch.exp(self._log_q(v) - v.sent["level"])
        return {"d": tree.scale(delta, q), "q": q}

    def combine(self, r: Round) -> Params:
        return tree.map(lambda d: d / r.sums["q"], r.sums["d"])

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        return weights, {"level": r.server["level"] + torch.log(r.sums["q"] / r.cohort)}

    def _log_q(self, v: View) -> Tensor:
        return v.client["log_q"] + self.eta * v.local["loss"]
