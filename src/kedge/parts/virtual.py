"""Training on virtual samples that all clients share. VHL (Tang et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.core import rng
from kedge.core.part import Doc, Out, Part, Range, register
from kedge.core.task import Batch
from kedge.core.tree import Params, Tree
from kedge.core.view import Spec, View


@register
@dataclass(frozen=True)
class VHL(Part):
    r"""Learn a virtual data set that all clients share, and pull real features to its classes.

    :math:`CE(x, y) + \alpha\,CE(x', C + y') + \lambda\,L(z, z') + \lambda'\,L(z')` as in the
    authors' code, x' virtual, z' a constant in the first L, cross-entropies over 2C outputs. The
    contrast is :math:`L = -\frac{1}{n}\sum_i \frac{1}{|P_i|}\sum_{p \in P_i} \log
    \frac{\exp(z_i z_p/\tau)}{S_i}` of n normed features, :math:`P_i` the others of i's class,
    :math:`S_i` the sum of :math:`\exp(z_i z_a/\tau)` over all others.

    Tang et al., Virtual Homogeneity Learning: Defending against Data Heterogeneity in Federated
    Learning, ICML 2022, arXiv:2206.02465.

    Deviations: virtual samples are not of an untrained StyleGAN but class-conditional Gaussian
    noise, the authors' other choice and FedCOG's default: a random coarse image per class, noise
    around it, enlarged. Each is made from a shared key when it is needed, and drawn independently
    at each step. Real and virtual rows go through BatchNorm apart, and only the real ones move its
    statistics. The C outputs of virtual classes sit beside the head and are left out of
    predictions. ``labels = shared`` gives virtual samples the real classes' labels, without extra
    outputs. Neutral at: all weights 0 with shared labels. Sends: the extra outputs and a key.
    Uploads: the extra outputs.
    """

    alpha: Annotated[float, Doc("weight of virtual samples' loss"), Range(0)] = 1.0
    lam: Annotated[float, Doc("weight of the pull to virtual features"), Range(0)] = 1.0
    lam_virtual: Annotated[
        float, Doc("weight of the contrast of virtual features among themselves"), Range(0)
    ] = 0.1
    tau: Annotated[float, Doc("temperature of both contrasts"), Range(0, open=True)] = 0.07
    rows: Annotated[int, Doc("virtual samples in a local step"), Range(2)] = 128
    per_class: Annotated[int, Doc("virtual samples of each class"), Range(1)] = 200
    align_epochs: Annotated[
        int, Doc("both contrasts stop after so many local epochs; 0: never"), Range(0)
    ] = 5
    labels: Annotated[
        Literal["extra", "shared"], Doc("virtual classes have outputs of their own, or not")
    ] = "extra"
    spread: Annotated[
        float, Doc("deviation within a virtual class; between classes it is 1"), Range(0)
    ] = 0.5
    grid: Annotated[int, Doc("side of the coarse images"), Range(1)] = 8

    side = "data"
    presets = {
        "official": {"alpha": 0.5},
        "fedcog": {"alpha": 1.0, "lam": 1.0, "rows": 128, "align_epochs": 5},
        "fedbr": {"alpha": 1.0, "rows": 32},
    }
    neutral = {"alpha": 0.0, "lam": 0.0, "lam_virtual": 0.0, "labels": "shared"}
    tiny = {"rows": 6, "per_class": 4}
    needs_features = True
    tasks = ("classification",)
    sends = "E + 2"
    uploads = "E"
    compute = "a pass of virtual data"

    def extend(self, spec: Spec) -> Params:
        if self.labels == "shared":
            return {}
        shape, bound = (spec.task.outputs, spec.features + 1), spec.features**-0.5
        leaf = bound * (2 * rng.uniform(spec.key, shape, spec.dtype) - 1)  # as a linear layer
        return {"weight": leaf[:, :-1], "bias": leaf[:, -1]}

    def server_init(self, spec: Spec) -> Tree:
        return {"key": rng.fold(spec.key, "virtual")}

    def send(self, server: Tree) -> Tree:
        return server

    def term(self, v: View, params: Params, batch: Batch, out: Out) -> Tensor:
        classes, own = v.task.outputs, v.own(params)
        x, y = self._draw(v)
        virtual = v.forward(params, x)
        real_z, virtual_z = out.features.flatten(1), virtual.features.flatten(1)
        if self.labels == "shared":
            total = self.alpha * F.cross_entropy(virtual.logits, y)
        else:
            more = F.linear(virtual_z, own["weight"], own["bias"])
            every = torch.cat([virtual.logits, more], 1)  # [rows, 2 C]
            total = self.alpha * F.cross_entropy(every, classes + y)
            # what the extra outputs add to the cross-entropy of real samples
            more = F.linear(real_z, own["weight"], own["bias"])
            rest = torch.logsumexp(more, 1) - torch.logsumexp(out.logits, 1)
            total = total + F.softplus(rest).mean()
        both = torch.cat([real_z, virtual_z.detach()])
        contrast = self.lam * _contrast(both, torch.cat([batch.y, y]), self.tau)
        contrast = contrast + self.lam_virtual * _contrast(virtual_z, y, self.tau)
        if self.align_epochs:
            seen = v.step * len(batch.x)
            contrast = contrast * (seen < self.align_epochs * v.info.num_examples)
        return total + contrast

    def _draw(self, v: View) -> tuple[Tensor, Tensor]:
        """Some of the virtual samples and their classes."""
        index = rng.integers(v.key, (self.rows,), v.task.outputs * self.per_class)
        return self._virtual(v.spec, v.sent["key"], index), index % v.task.outputs

    def _virtual(self, spec: Spec, key: Tensor, index: Tensor) -> Tensor:
        """The virtual samples of some numbers: number i belongs to class i mod C."""
        shape, dtype = tuple(spec.input_shape), spec.dtype
        coarse = shape
        if len(shape) == 3:
            coarse = (shape[0], min(self.grid, shape[1]), min(self.grid, shape[2]))
        means = rng.normal(rng.fold(key, "means"), (spec.task.outputs, *coarse), dtype)
        keys = rng.fold(rng.fold(key, "samples"), index)  # [rows, 2]
        noise = torch.func.vmap(lambda k: rng.normal(k, coarse, dtype))(keys)
        x = means[index % spec.task.outputs] + self.spread * noise
        if coarse == shape:
            return x
        return F.interpolate(x, size=shape[1:], mode="bilinear", align_corners=False)


def _contrast(z: Tensor, y: Tensor, tau: float) -> Tensor:
    """Supervised contrastive loss of features ``[n, F]``; rows without a partner count as 0."""
    z = F.normalize(z, dim=1)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    near = z @ z.T / tau
    log_p = near - torch.logsumexp(near.masked_fill(itself, -torch.inf), 1, keepdim=True)
    same = ((y[:, None] == y) & ~itself).to(z.dtype)
    return -((same * log_p).sum(1) / same.sum(1).clamp_min(1)).mean()
