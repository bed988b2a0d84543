"""Methods that keep some layers, or a whole personal model, on every client.

FedPer (Arivazhagan et al. 2019), FedRep (Collins et al. 2021), FedBN (Li et al. 2021), Ditto (Li et
al. 2021), local fine-tuning, local training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.part import Doc, Out, Part, register
from kedge.core.task import Batch
from kedge.core.tree import Params, Tree, Weights
from kedge.core.view import Spec, View
from kedge.schema import NotNegative, Share


class PrivateHead(Part):
    """Keep the head on the client. Base class of FedPer and FedRep."""

    side = "personal"
    personal_model = True
    needs_features = True
    sends = "-H"
    uploads = "-H"
    keeps = "H"

    def private(self, spec: Spec) -> set[str]:
        return set(spec.model.head_names())


@register
@dataclass(frozen=True)
class FedPer(PrivateHead):
    r"""Keep the head on the client; train body and head together.

    :math:`\min_{\phi, h_1, \dots, h_N}\sum_k p_k L_k(\phi, h_k)`; only the body :math:`\phi` is
    averaged (algorithm 1).

    Arivazhagan et al., Federated Learning with Personalization Layers, 2019, arXiv:1912.00818.

    Deviations: the personal layers are the head alone (the paper tries one to four blocks). The
    server's head keeps its initial value. Keeps: the head, which is neither sent nor uploaded.
    """

    made_for = {"features": "moderate"}


@register
@dataclass(frozen=True)
class FedBN(Part):
    r"""Keep BatchNorm's parameters and statistics on the client.

    :math:`w_l \leftarrow \sum_k p_k w_{k,l}` for every layer l but those of BatchNorm, which keep
    :math:`w_{k,l}` (algorithm 1).

    Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR
    2021, arXiv:2102.07623.

    The server's BatchNorm keeps its initial value, so the personal models are the ones to evaluate.
    Neutral at: a model without BatchNorm, which runs refuse. Keeps: BatchNorm's parameters and
    statistics, which are neither sent nor uploaded (all but P of the network's W parameters, and
    its B buffers).
    """

    side = "personal"
    made_for = {"features": "moderate"}
    needs_batchnorm = True
    personal_model = True
    sends = "P - W - B"
    uploads = "P - W"
    keeps = "W - P + B"

    def private(self, spec: Spec) -> set[str]:
        mean = "running_mean"
        layers = {n.removesuffix(mean) for n in spec.buffers if n.split(".")[-1] == mean}
        leaves = ("weight", "bias", mean, "running_var", "num_batches_tracked")
        known = {*spec.params, *spec.buffers}  # a layer may have no weight and bias
        return {layer + name for layer in layers for name in leaves} & known


@register
@dataclass(frozen=True)
class Ditto(Part):
    r"""Train a personal model with a proximal term towards the shared model.

    The shared model w is FedAvg's. In every local step, on the same batch, client k also updates
    its personal model: :math:`u_k \leftarrow u_k - \eta\big(\nabla f_k(u_k) + \lambda(u_k -
    w^t)\big)` (algorithm 1), :math:`w^t` the global model received in this round.

    Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021,
    arXiv:2012.04221.

    Deviations: the step is plain SGD at the run's learning rate, without its momentum, weight decay
    and clipping; f_k is the task's loss, without other parts' terms. u_k starts from the initial
    global model and has its own BatchNorm statistics. Neutral at: any lam, as w does not depend on
    u. Keeps: u_k (W parameters, B buffers).
    """

    lam: Annotated[
        NotNegative, Doc("weight of the personal model's proximal term (paper: 0.1 to 1)")
    ] = 0.1

    side = "personal"
    personal_model = True
    presets = {"fedetf": {"lam": 1e-3}}
    made_for = {"features": "moderate"}
    neutral = {"lam": 0.0}
    keeps = "W + B"
    compute = "a second gradient"

    def client_init(self, spec: Spec) -> Tree:
        params = tree.map(lambda w: w.to(spec.device, spec.dtype), spec.model.weights().params)
        return {"params": params, "buffers": spec.buffers}

    def prepare(self, v: View) -> Tree:
        return v.client

    def observe(self, v: View, params: Params, batch: Batch, out: Out) -> Tree:
        u = v.local["params"]

        def loss(u: Params) -> tuple[Tensor, Params]:
            weights = Weights(u, v.local["buffers"])
            own = v.spec.model.forward(weights, batch.x, "train", key=v.key)
            return v.task.loss(own.logits, batch).mean(), own.buffers

        grads, buffers = torch.func.grad(loss, has_aux=True)(u)
        params = tree.map(
            lambda u, g, w: u - v.info.lr * (g + self.lam * (u - w)), u, grads, v.anchor.params
        )
        return {"params": params, "buffers": buffers}

    def reply(self, v: View, weights: Weights) -> tuple[Tree, Tree]:
        return v.local, {}

    def personal(self, v: View, weights: Weights) -> Weights:
        return Weights(weights.params | v.client["params"], v.client["buffers"])


@register
@dataclass(frozen=True)
class FineTune(Part):
    r"""Use each client's local model after its last local training as its personal model.

    The shared model w is that of the other parts. Client k uses :math:`u_k = w_k^t`, the result of
    the local steps from :math:`w^t`, before aggregation.

    Collins et al., FedAvg with Fine Tuning: Local Updates Lead to Representation Learning, NeurIPS
    2022, arXiv:2205.13692; the +FT rows of FedCOG's table 6 (arXiv:2312.05966).

    A client that has not trained yet uses the shared model; a client that skips rounds keeps its
    last personal model. Always neutral, as w does not depend on it. Keeps: w_k with its BatchNorm
    statistics (B buffers).
    """

    side = "personal"
    personal_model = True
    neutral = {}
    keeps = "P + B + 1"

    def client_init(self, spec: Spec) -> Tree:
        seen = torch.zeros((), dtype=spec.dtype, device=spec.device)
        return {"params": spec.params, "buffers": spec.buffers, "seen": seen}

    def reply(self, v: View, weights: Weights) -> tuple[Tree, Tree]:
        seen = torch.ones_like(v.client["seen"])
        return {"params": v.public(weights.params), "buffers": weights.buffers, "seen": seen}, {}

    def personal(self, v: View, weights: Weights) -> Weights:
        seen = v.client["seen"] > 0
        params, buffers = (
            tree.map(lambda own, w: torch.where(seen, own, w), v.client[kind], shared)
            for kind, shared in (("params", weights.params), ("buffers", weights.buffers))
        )
        return Weights(weights.params | params, weights.buffers | buffers)


@register
@dataclass(frozen=True)
class Local(Part):
    r"""Train every client alone, without communication.

    :math:`\min_{w_k} L_k(w_k)` on each client, from the same initial model, for as many steps as
    federated training takes; the server's model keeps its initial value.

    Guo, Tang and Lin, FedBR, ICML 2023, table 1, arXiv:2205.13462.

    Keeps: the whole model (W parameters, B buffers) and the parameters that other parts add;
    nothing is sent or uploaded.
    """

    side = "personal"
    personal_model = True
    sends = "-W - B"
    uploads = "-W"
    keeps = "W + B"

    def private(self, spec: Spec) -> set[str]:
        return {*spec.params, *spec.buffers}


# -- Methods that train body and head in turn. FedRep (Collins et al. 2021) ------------------------


#: Added to a share, so that 0.29 of 100 steps are 29: more than the rounding of a share in float32,
#: and less than one step for shares of d decimals and up to 10^(7 - d) steps.
GRAIN = 1e-7


@register
@dataclass(frozen=True)
class FedRep(PrivateHead):
    r"""Learn a shared representation and a private head, one after the other in each round.

    Each round a client first trains its own head :math:`h_k` with the body :math:`\phi` fixed,
    then the body with the head fixed; only bodies are averaged (algorithm 1).

    Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML
    2021, arXiv:2102.07078.

    Deviations: the paper counts epochs (10 for the head, 1 for the body); here the head gets a
    share of the local steps, rounded down, so that all methods have the same step budget. Keeps:
    the head, which is neither sent nor uploaded.
    """

    head_share: Annotated[Share, Doc("share of the local steps that train the head")] = 0.5

    made_for = {"features": "moderate"}

    def trainable(self, v: View, params: Params) -> dict[str, Tensor | bool]:
        head_step = v.step < torch.floor((self.head_share + GRAIN) * v.info.num_steps.double())
        head = set(v.spec.model.head_names())
        return {n: head_step if n in head else ~head_step for n in params}
