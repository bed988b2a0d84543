"""Methods that train on virtual samples shared by all clients. VHL (Tang et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.core import rng
from kedge.core.part import Doc, Drawn, Out, Part, Present, Range, register
from kedge.core.task import Batch
from kedge.core.tree import Params, Tree
from kedge.core.view import Spec, View
from kedge.schema import Count, NotNegative, Positive, Size


@register
@dataclass(frozen=True)
class VHL(Part):
    r"""Train on virtual data shared by all clients, and align real features with its classes.

    :math:`CE(x, y) + \alpha\,CE(x', C + y') + \lambda\,L(z, z') + \lambda'\,L(z')` as in the
    authors' code, x' virtual, z' a constant in the first L, cross-entropies over 2C outputs. The
    contrast is :math:`L = -\frac{1}{n}\sum_i \frac{1}{|P_i|}\sum_{p \in P_i} \log
    \frac{\exp(z_i z_p/\tau)}{S_i}` of n normed features, :math:`P_i` the others of i's class,
    :math:`S_i` the sum of :math:`\exp(z_i z_a/\tau)` over all others.

    Tang et al., Virtual Homogeneity Learning: Defending against Data Heterogeneity in Federated
    Learning, ICML 2022, arXiv:2206.02465.

    Deviations: virtual samples come not from an untrained StyleGAN but from class-conditional
    Gaussian noise, the authors' other choice and FedCOG's default: a random coarse image per class
    plus noise, upsampled. Each sample is generated from a shared key on demand; every step draws
    independently. Real and virtual rows pass BatchNorm separately, and only real rows update its
    statistics. The C outputs of virtual classes are separate from the head and not used in
    predictions. ``labels = shared`` gives virtual samples the real classes' labels, without extra
    outputs. Neutral at: all weights 0 with shared labels. Sends: the extra outputs and a key.
    Uploads: the extra outputs.
    """

    alpha: Annotated[NotNegative, Doc("weight of the virtual samples' loss")] = 1.0
    lam: Annotated[NotNegative, Doc("weight of the alignment with virtual features")] = 1.0
    lam_virtual: Annotated[
        NotNegative, Doc("weight of the contrastive loss among virtual features")
    ] = 0.1
    tau: Annotated[Positive, Doc("temperature of both contrastive losses")] = 0.07
    rows: Annotated[int, Doc("virtual samples per local step"), Range(2)] = 128
    per_class: Annotated[Count, Doc("virtual samples per class")] = 200
    align_epochs: Annotated[Size, Doc("local epochs with contrastive losses; 0: all")] = 5
    labels: Annotated[
        Literal["extra", "shared"],
        Doc("labels of virtual samples: extra classes, or the real ones"),
    ] = "extra"
    spread: Annotated[
        NotNegative, Doc("standard deviation within a virtual class; 1 between classes")
    ] = 0.5
    grid: Annotated[Count, Doc("side of the coarse images")] = 8

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

    def makes_inputs(self) -> bool:
        return True

    def describe_uploads(self, spec: Spec) -> str:
        return (
            "sends a key from which every client draws the same virtual samples; they are noise "
            "and depend on no data"
        )

    def draw_samples(self, present: Present) -> Drawn:
        spec, total = present.spec, present.spec.task.outputs * self.per_class
        index = rng.permutation(present.key, total)[: present.count].to(spec.device)
        x = self._virtual(spec, present.server["key"], index)
        where = "they are drawn from a shared key and depend on no data"
        return Drawn(x, index % spec.task.outputs, "virtual samples", where)

    def extend(self, spec: Spec) -> Params:
        if self.labels == "shared":
            return {}
        shape, bound = (spec.task.outputs, spec.features + 1), spec.features**-0.5
        # torch's default initialisation of a linear layer
        leaf = bound * (2 * rng.uniform(spec.key, shape, spec.dtype) - 1)
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
            extra = F.linear(virtual_z, own["weight"], own["bias"])
            logits = torch.cat([virtual.logits, extra], 1)  # [rows, 2 C]
            total = self.alpha * F.cross_entropy(logits, classes + y)
            # contribution of the extra outputs to the cross-entropy of real samples
            extra = F.linear(real_z, own["weight"], own["bias"])
            log_ratio = torch.logsumexp(extra, 1) - torch.logsumexp(out.logits, 1)
            total = total + F.softplus(log_ratio).mean()
        both = torch.cat([real_z, virtual_z.detach()])
        contrast = self.lam * _contrast(both, torch.cat([batch.y, y]), self.tau)
        contrast = contrast + self.lam_virtual * _contrast(virtual_z, y, self.tau)
        if self.align_epochs:
            samples_seen = v.step * len(batch.x)
            contrast = contrast * (samples_seen < self.align_epochs * v.info.num_examples)
        return total + contrast

    def _draw(self, v: View) -> tuple[Tensor, Tensor]:
        """Random virtual samples ``[rows, ...]`` and their classes ``[rows]``."""
        index = rng.integers(v.key, (self.rows,), v.task.outputs * self.per_class)
        return self._virtual(v.spec, v.sent["key"], index), index % v.task.outputs

    def _virtual(self, spec: Spec, key: Tensor, index: Tensor) -> Tensor:
        """The virtual samples with the given indices; sample i belongs to class i mod C."""
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
    """Supervised contrastive loss of features ``[n, F]``; rows without a positive count as 0."""
    z = F.normalize(z, dim=1)
    diagonal = torch.eye(len(z), dtype=torch.bool, device=z.device)
    similarity = z @ z.T / tau
    others = similarity.masked_fill(diagonal, -torch.inf)
    log_p = similarity - torch.logsumexp(others, 1, keepdim=True)
    positive = ((y[:, None] == y) & ~diagonal).to(z.dtype)
    return -((positive * log_p).sum(1) / positive.sum(1).clamp_min(1)).mean()
