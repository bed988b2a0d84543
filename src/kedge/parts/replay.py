"""Methods that replay what the global model knows. FedReg (Xu et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.part import Doc, Out, Part, Range, register
from kedge.core.task import Batch
from kedge.core.tree import Params, Tree
from kedge.core.view import View


@register
@dataclass(frozen=True)
class FedReg(Part):
    r"""Take back from every step what makes the model forget, seen on pseudo- and perturbed data.

    Step: :math:`v \leftarrow v - \eta\nabla f(\gamma v + (1-\gamma)w)`. Then, with :math:`D = v -
    w` and the gradients :math:`g_2` on pseudo-data and :math:`g_3` on perturbed data, both at
    :math:`(v + w)/2`: :math:`v \leftarrow v - k_2 g_2 - k_3 g_3`, :math:`k_2 = \max(0, \langle D,
    g_2\rangle/\|g_2\|^2)`, :math:`k_3 = \max(0, \langle D - k_2 g_2, g_3\rangle/\|g_3\|^2)` (as
    the authors' code has it). Pseudo-data are the batch after S steps :math:`x \leftarrow x +
    \eta_s\,sign\nabla_x\ell` at the global model w, labelled by what w says of them; perturbed data
    the same with :math:`\eta_p` and the true labels.

    Xu et al., Acceleration of Federated Learning with Alleviated Forgetting in Local Training,
    ICLR 2022, arXiv:2203.02645.

    Deviations: both are made from each batch when it comes, by w in evaluation mode, which gives
    the same as at the start of the round unless batches are augmented; they are not clamped to
    the batch's range; clients are averaged as the run says, the paper's plain mean is ``weighting =
    "uniform"``. BatchNorm's running statistics move in the first pass only, the one at v. Sends /
    keeps: nothing.
    """

    gamma: Annotated[float, Doc("where the gradient is taken: 1 at v, 0 at w"), Range(0, 1)] = 0.5
    ascents: Annotated[int, Doc("steps that make the data, S"), Range(0)] = 10
    eta_s: Annotated[float, Doc("size of a step of the pseudo-data"), Range(0)] = 0.1
    eta_p: Annotated[float, Doc("size of a step of the perturbed data"), Range(0)] = 1e-3

    presets = {
        "cifar10": {"gamma": 0.5, "ascents": 10, "eta_s": 0.1, "eta_p": 1e-3},
        # names one size; between the two, FedReg's own ratio is kept
        "fedcog": {"gamma": 0.5, "ascents": 10, "eta_s": 1e-3, "eta_p": 1e-5},
    }
    tiny = {"ascents": 2}
    tasks = ("classification",)
    compute = "three or four gradients"

    def ascend(self, v: View, params: Params, batch: Batch, out: Out) -> Tree:
        classes = torch.arange(v.task.outputs, device=batch.y.device)
        own = batch.target  # [B, C]
        if own is None:  # one-hot by comparison: torch's looks at values, which vmap does not allow
            own = (batch.y[:, None] == classes).to(batch.x.dtype)
        pseudo = self._climbed(v, batch.x, own, self.eta_s)
        said = v.task.probs(v.spec.model.forward(v.anchor, pseudo, "eval").logits)
        perturbed = self._climbed(v, batch.x, own, self.eta_p)
        return {
            "pseudo": {"x": pseudo, "target": said},
            "perturbed": {"x": perturbed, "target": own},
        }

    def correct(self, v: View, params: Params, grads: Params) -> Params:
        point = tree.map(
            lambda p, w: self.gamma * p + (1 - self.gamma) * w, params, v.anchor.params
        )
        return tree.sub(v.grad(point), grads)

    def project(self, v: View, params: Params) -> Params:
        away = tree.sub(params, v.anchor.params)  # D
        middle = tree.map(lambda p, w: 0.5 * (p + w), params, v.anchor.params)
        for data in (v.local["pseudo"], v.local["perturbed"]):
            slope = torch.func.grad(self._loss)(middle, v, data)
            size = tree.sq_norm(slope).clamp_min(torch.finfo(v.spec.dtype).tiny)
            k = (tree.dot(away, slope) / size).clamp_min(0)
            away, params = (
                tree.map(lambda x, g, k=k: x - k * g, held, slope) for held in (away, params)
            )
        return params

    def _climbed(self, v: View, x: Tensor, target: Tensor, size: float) -> Tensor:
        """Inputs after some steps uphill on the loss of the global model."""

        def loss(x: Tensor) -> Tensor:
            logits = v.spec.model.forward(v.anchor, x, "eval").logits
            return v.task.loss(logits, Batch(x, target, target)).sum()

        for _ in range(self.ascents):
            x = x + size * torch.sign(torch.func.grad(loss)(x))
        return x

    def _loss(self, params: Params, v: View, data: Tree) -> Tensor:
        logits = v.forward(params, data["x"]).logits
        return v.task.loss(logits, Batch(data["x"], data["target"], data["target"])).mean()
