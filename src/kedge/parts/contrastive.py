"""Methods that contrast the features of several models on the same batch.

MOON (Li et al. 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.core import rng, tree
from kedge.core.part import Doc, Out, Part, register
from kedge.core.task import Batch
from kedge.core.tree import Params, Tree, Weights
from kedge.core.view import Spec, View
from kedge.schema import NotNegative, Positive, Size


@register
@dataclass(frozen=True)
class MOON(Part):
    r"""Pull features towards the global model's and away from the client's previous model's.

    :math:`\ell = \ell_{sup} + \mu\,\ell_{con}`, :math:`\ell_{con} = -\log \frac{e^{sim(z,
    z_{glob})/\tau}}{e^{sim(z, z_{glob})/\tau} + e^{sim(z, z_{prev})/\tau}}` (eqs. 3-4), sim the
    cosine, :math:`z_{glob}` and :math:`z_{prev}` constants.

    Li, He and Song, Model-Contrastive Federated Learning, CVPR 2021, arXiv:2103.16257.

    Deviations: the projection (two layers, as in the paper) is a branch on the features; in the
    paper the classifier sits on top of it. ``projection=0`` compares the features themselves. A
    client without a previous model uses the global one: the term is log 2 with zero gradient. As in
    the authors' code, the two constant models run in evaluation mode, each with its own BatchNorm
    statistics; ``eval_mode = false`` normalises them by the batch, like the model in training.
    Neutral at: mu = 0. Keeps: the previous local model (with its B buffers in evaluation mode).
    """

    mu: Annotated[
        NotNegative, Doc("weight of the contrastive term (5 on CIFAR-10, 1 on CIFAR-100)")
    ] = 5.0
    tau: Annotated[Positive, Doc("temperature")] = 0.5
    projection: Annotated[Size, Doc("output size of the projection; 0: none")] = 256
    width: Annotated[Size, Doc("hidden size of the projection; 0: that of the features")] = 0
    eval_mode: Annotated[
        bool, Doc("global and previous model run in evaluation mode; false: in training mode")
    ] = True

    presets = {
        "fedcog": {"mu": 0.01, "tau": 0.5, "projection": 0},
        "fedbr": {"mu": 0.01, "tau": 0.5, "projection": 128, "width": 256},
        "flboost": {"mu": 1e-4, "tau": 1.0, "projection": 0},
    }
    neutral = {"mu": 0.0}
    tiny = {"projection": 4}
    needs_features = True
    sends = "E"
    uploads = "E"
    keeps = "P + 1 + (B if eval_mode else 0)"
    compute = "two forward passes"

    def extend(self, spec: Spec) -> Params:
        if not self.projection:
            return {}
        sizes = (spec.features, self.width or spec.features, self.projection)
        keys = rng.split(spec.key, 2)
        leaves: Params = {}
        for i, key in enumerate(keys):
            bound = sizes[i] ** -0.5  # torch's default initialisation of a linear layer
            noise = rng.uniform(key, (sizes[i + 1], sizes[i] + 1), spec.dtype) * 2 - 1
            leaves[f"weight{i}"], leaves[f"bias{i}"] = bound * noise[:, :-1], bound * noise[:, -1]
        return leaves

    def client_init(self, spec: Spec) -> Tree:
        seen = torch.zeros((), dtype=spec.dtype, device=spec.device)
        buffers = spec.buffers if self.eval_mode else {}
        return tree.map(torch.clone, {"previous": spec.params, "buffers": buffers}) | {"seen": seen}

    def term(self, v: View, params: Params, batch: Batch, out: Out) -> Tensor:
        z = self._project(v, params, out.features)
        z_global, z_previous = (
            self._project(
                v, model.params, v.forward(model, batch.x, train=not self.eval_mode).features
            )
            for model in (v.anchor, self._previous(v))
        )
        positive = F.cosine_similarity(z, z_global.detach(), dim=-1) / self.tau
        negative = F.cosine_similarity(z, z_previous.detach(), dim=-1) / self.tau
        return self.mu * F.softplus(negative - positive).mean()  # -log(e^p / (e^p + e^n))

    def reply(self, v: View, weights: Weights) -> tuple[Tree, Tree]:
        buffers = weights.buffers if self.eval_mode else {}
        seen = torch.ones_like(v.client["seen"])
        return {"previous": v.public(weights.params), "buffers": buffers, "seen": seen}, {}

    def _previous(self, v: View) -> Weights:
        """The client's model after its last round; the global model if there is none."""
        seen = v.client["seen"] > 0
        params, buffers = (
            shared | tree.map(lambda own, w: torch.where(seen, own, w), v.client[kind], shared)
            for kind, shared in (("previous", v.anchor.params), ("buffers", v.anchor.buffers))
        )
        return Weights(params, buffers)

    def _project(self, v: View, params: Params, features: Tensor) -> Tensor:
        own, features = v.own(params), features.flatten(1)
        if not own:
            return features
        hidden = F.relu(F.linear(features, own["weight0"], own["bias0"]))
        return F.linear(hidden, own["weight1"], own["bias1"])
