"""Methods that alleviate forgetting by replay of generated data. FedReg (Xu et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.part import Doc, Out, Part, register
from kedge.core.task import Batch
from kedge.core.tree import Params, Tree
from kedge.core.view import View
from kedge.schema import NotNegative, Share, Size


@register
@dataclass(frozen=True)
class FedReg(Part):
    r"""Remove from every step the component that increases the loss on pseudo- and perturbed data.

    Step: :math:`v \leftarrow v - \eta\nabla f(\gamma v + (1-\gamma)w)`. Then, with :math:`D = v -
    w` and the gradients :math:`g_2` on pseudo-data and :math:`g_3` on perturbed data, both at
    :math:`(v + w)/2`: :math:`v \leftarrow v - k_2 g_2 - k_3 g_3`, :math:`k_2 = \max(0, \langle D,
    g_2\rangle/\|g_2\|^2)`, :math:`k_3 = \max(0, \langle D - k_2 g_2, g_3\rangle/\|g_3\|^2)` (as
    the authors' code has it). Pseudo-data are the batch after S steps :math:`x \leftarrow x +
    \eta_s\,sign\nabla_x\ell` at the global model w, labelled by w's predictions; perturbed data are
    made the same way with :math:`\eta_p` and the true labels.

    Xu et al., Acceleration of Federated Learning with Alleviated Forgetting in Local Training,
    ICLR 2022, arXiv:2203.02645.

    Deviations: both data sets are generated per batch, by w in evaluation mode, which equals
    generation at the start of the round unless batches are augmented. They are not clamped to the
    batch's range. Clients are averaged with the run's client weights; the paper's plain mean is
    ``weighting = "uniform"``. BatchNorm's running statistics are updated in the first pass only,
    the one at v. Sends / keeps: nothing.
    """

    gamma: Annotated[Share, Doc("point of the gradient between w (0) and v (1)")] = 0.5
    ascents: Annotated[Size, Doc("ascent steps that generate the data, S")] = 10
    eta_s: Annotated[NotNegative, Doc("step size of the pseudo-data")] = 0.1
    eta_p: Annotated[NotNegative, Doc("step size of the perturbed data")] = 1e-3

    presets = {
        "cifar10": {"gamma": 0.5, "ascents": 10, "eta_s": 0.1, "eta_p": 1e-3},
        # FedCOG gives one step size; the ratio of the two is FedReg's
        "fedcog": {"gamma": 0.5, "ascents": 10, "eta_s": 1e-3, "eta_p": 1e-5},
    }
    tiny = {"ascents": 2}
    tasks = ("classification",)
    compute = "three or four gradients"

    def makes_inputs(self) -> bool:
        return True

    def ascend(self, v: View, params: Params, batch: Batch, out: Out) -> Tree:
        target = v.task.targets(batch, batch.x.dtype)  # [B, C]
        pseudo = self._ascended(v, batch.x, target, self.eta_s)
        probs = v.task.probs(v.spec.model.forward(v.anchor, pseudo, "eval").logits)
        perturbed = self._ascended(v, batch.x, target, self.eta_p)
        return {
            "pseudo": {"x": pseudo, "target": probs},
            "perturbed": {"x": perturbed, "target": target},
        }

    def correct(self, v: View, params: Params, grads: Params) -> Params:
        point = tree.map(
            lambda p, w: self.gamma * p + (1 - self.gamma) * w, params, v.anchor.params
        )
        return tree.sub(v.grad(point), grads)

    def project(self, v: View, params: Params) -> Params:
        delta = tree.sub(params, v.anchor.params)  # D
        midpoint = tree.map(lambda p, w: 0.5 * (p + w), params, v.anchor.params)
        for data in (v.local["pseudo"], v.local["perturbed"]):
            grads = torch.func.grad(self._loss)(midpoint, v, data)
            sq_norm = tree.sq_norm(grads).clamp_min(torch.finfo(v.spec.dtype).tiny)
            k = (tree.dot(delta, grads) / sq_norm).clamp_min(0)
            delta, params = (
                tree.map(lambda x, g, k=k: x - k * g, tensors, grads) for tensors in (delta, params)
            )
        return params

    def _ascended(self, v: View, x: Tensor, target: Tensor, size: float) -> Tensor:
        """Inputs after sign-gradient ascent steps on the loss of the global model."""

        def loss(x: Tensor) -> Tensor:
            logits = v.spec.model.forward(v.anchor, x, "eval").logits
            return v.task.loss(logits, Batch(x, target, target)).sum()

        for _ in range(self.ascents):
            x = x + size * torch.sign(torch.func.grad(loss)(x))
        return x

    def _loss(self, params: Params, v: View, data: Tree) -> Tensor:
        logits = v.forward(params, data["x"]).logits
        return v.task.loss(logits, Batch(data["x"], data["target"], data["target"])).mean()
