"""Local learning bias reduction with shared pseudo-data. FedBR (Guo et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.core import rng, tree
from kedge.core.part import Doc, Drawn, Mean, Out, Part, Present, Stack, register
from kedge.core.round import Round
from kedge.core.task import Batch
from kedge.core.tree import Params, Tree, Weights
from kedge.core.view import Spec, View
from kedge.parts.pools import drawn_sums
from kedge.schema import Count, NotNegative, Size

_WIDTH, _OUT = "(width if width else 2*F)", "(out if out else F)"
_PROJECTION = f"F*{_WIDTH} + {_WIDTH}*{_WIDTH} + {_WIDTH}*{_OUT} + 2*{_WIDTH} + {_OUT}"


@register
@dataclass(frozen=True)
class FedBR(Part):
    r"""Regularise classifier and features on pseudo-data that all clients share.

    :math:`\min_{\phi,\omega} L_{cls}(x, y) + \lambda L_{cls}(x_p, \tilde y_p) + \mu L_{con}` (eq.
    3), :math:`L_{con} = -\log\frac{f_1}{f_1 + f_2}`, :math:`f_1 = e^{\tau_1 \cos(P(\phi(x_p)),
    P(\phi_g(x_p)))}`, :math:`f_2 = e^{\tau_2 \cos(P(\phi(x_p)), P(\phi(x)))}` (eqs. 5-7); before
    each step the projection P takes one ascent step on :math:`L_{con}` (eq. 2), features fixed.

    Guo, Tang and Lin, FedBR: Improving Federated Learning on Heterogeneous Data via Local Learning
    Bias Reduction, ICML 2023, arXiv:2205.13462.

    The paper judges by the mean over clients of the accuracy on samples that each holds out of its
    own, rotated and nearly of one class: that is where it gains, rather than on a common test set.

    A pseudo-sample is the mean of M samples of one client, its label 1/C (the released code's
    reading of RSM); with ``across`` it is the mean of several clients' means. There are as many as
    rows in a batch, since with fewer only the first rows would be negatives. ``mixture`` adds
    K local samples at every step (eq. 4). Deviations: cosines are multiplied by tau, as in the code
    (the tables' tau_2 = 0 has no other meaning); Mixture starts from these means, not from a proxy
    set, and recomputes its global features each step (the code keeps the first); P is averaged with
    the run's client weights. Pseudo-data do not update BatchNorm's running statistics. Neutral at:
    lam = mu = 0. Sends: P and the pseudo-data. Uploads: P; in a survey, sample means, which the
    server sees per client.
    """

    lam: Annotated[
        NotNegative, Doc("weight of component 1, pseudo-labels (0.1 on CIFAR-10, PACS)")
    ] = 1.0
    mu: Annotated[NotNegative, Doc("weight of component 2, the contrastive term")] = 0.5
    inv_temperature1: Annotated[float, Doc("tau_1, factor of the cosine to global features")] = 2.0
    inv_temperature2: Annotated[float, Doc("tau_2, factor of the cosine to real features")] = 2.0
    rows: Annotated[
        Size,
        Doc(
            "pseudo-samples, B; 0: as many as rows in a batch; number b is paired with real sample "
            "b mod batch size"
        ),
    ] = 0
    samples: Annotated[Count, Doc("samples averaged into each mean, M")] = 10
    means: Annotated[
        Size,
        Doc(
            "means per client; pseudo-data are drawn from the means of all clients "
            "(algorithm 2); 0: one per row, each row from a random client"
        ),
    ] = 0
    across: Annotated[
        Count, Doc("clients, drawn with replacement, whose means are averaged into each")
    ] = 1
    refresh: Annotated[
        Literal["round", "once"], Doc("renew pseudo-data each round, or make them once")
    ] = "round"
    mixture: Annotated[
        Size, Doc("local samples mixed into each pseudo-sample, K (eq. 4); 0: none")
    ] = 0
    width: Annotated[Size, Doc("hidden size of the projection; 0: twice the features")] = 256
    out: Annotated[Size, Doc("output size of the projection; 0: that of the features")] = 128
    max_step: Annotated[bool, Doc("train the projection (ablated in table 4)")] = True

    presets = {
        "paper": {"lam": 1.0, "mu": 0.5},
        "official": {"lam": 1.0, "refresh": "once", "width": 0, "out": 0},
        "mnist": {"lam": 1.0},
        "cifar10": {"lam": 0.1},
        "cifar100": {"lam": 1.0},
        "pacs": {"lam": 0.1},
        "mixture": {"refresh": "once", "mixture": 1},
    }
    neutral = {"lam": 0.0, "mu": 0.0}
    tiny = {"rows": 4, "samples": 3, "width": 5, "out": 3}
    needs_features = True
    needs_sweep = True
    needs_clients = True
    tasks = ("classification",)
    sends = f"{_PROJECTION} + (rows if rows else R)*X"
    uploads = _PROJECTION
    compute = "two passes of pseudo-data"

    def makes_inputs(self) -> bool:
        return True

    def describe_uploads(self, spec: Spec) -> str:
        when = "once, before round 1" if self.refresh == "once" else "in every round"
        rows = self._rows(spec)
        return (
            f"asks {when} for {self.means or rows} means of {self.samples} samples each; the "
            f"server knows whose they are and sends {rows} of them to every client, beside a small "
            "projection network that clients train"
        )

    def draw_samples(self, present: Present) -> Drawn:
        where = "the server sees whose they are and sends them to every client"
        what = f"means of {self.samples} samples of one client"
        return Drawn(present.server["pseudo"], None, what, where)

    def server_init(self, spec: Spec) -> Tree:
        width, out = self.width or 2 * spec.features, self.out or spec.features
        sizes = (spec.features, width, width, out)
        projection: Params = {}
        for i, key in enumerate(rng.split(spec.key, 3)):
            bound = sizes[i] ** -0.5  # torch's default initialisation of a linear layer
            noise = bound * (rng.uniform(key, (sizes[i + 1], sizes[i] + 1), spec.dtype) * 2 - 1)
            projection |= {f"weight{i}": noise[:, :-1], f"bias{i}": noise[:, -1]}
        shape = (self._rows(spec), *spec.input_shape)
        pseudo = torch.zeros(shape, dtype=spec.dtype, device=spec.device)
        return {"projection": projection, "pseudo": pseudo}

    def survey(self, v: View) -> Tree:
        count = self.means or self._rows(v.spec)
        means = drawn_sums(v, count, self.samples)["x"] / self.samples
        return {"means": Stack(means), "client": Stack(v.info.client)}

    def surveys(self) -> Literal["first", "every", "last"]:
        return "every" if self.refresh == "round" else "first"

    def absorb(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        means = r.uploads["means"][torch.argsort(r.uploads["client"])]  # [K, G, ...]
        drawn = torch.arange(self._rows(r.spec) * self.across, device=means.device)
        drawn = drawn.reshape(-1, self.across)  # of each row
        client = rng.integers(r.key, tuple(drawn.shape), len(means))
        pseudo = means[client, drawn % means.shape[1]]
        if self.means:
            pool = means.flatten(0, 1)
            pseudo = pool[rng.permutation(r.key, len(pool))[drawn % len(pool)]]
        return weights, r.server | {"pseudo": pseudo.mean(1)}

    def send(self, server: Tree) -> Tree:
        return server

    def prepare(self, v: View) -> Tree:
        x, classes = v.sent["pseudo"], v.task.outputs
        target = torch.full((len(x), classes), 1 / classes, dtype=x.dtype, device=x.device)
        pseudo = {"x": x, "target": target, "z_global": self._global(v, x)}
        return {"projection": v.sent["projection"]} | pseudo

    def ascend(self, v: View, params: Params, batch: Batch, out: Out) -> Tree:
        local = v.local | (self._mixed(v, batch) if self.mixture else {})
        if not self.max_step:
            return local
        z_pseudo = v.forward(params, local["x"]).features

        def contrast(projection: Params) -> Tensor:
            return self._contrast(projection, z_pseudo, local["z_global"], out.features)

        grads = torch.func.grad(contrast)(local["projection"])
        return local | {"projection": tree.axpy(v.info.lr, grads, local["projection"])}

    def term(self, v: View, params: Params, batch: Batch, out: Out) -> Tensor:
        x, target, z_global = v.local["x"], v.local["target"], v.local["z_global"]
        pseudo = v.forward(params, x)
        uniform = v.task.loss(pseudo.logits, Batch(x, target, target)).mean()
        projection = tree.detach(v.local["projection"])
        contrast = self._contrast(projection, pseudo.features, z_global, out.features)
        return self.lam * uniform + self.mu * contrast

    def reply(self, v: View, weights: Weights) -> tuple[Tree, Tree]:
        return {}, {"projection": Mean(v.local["projection"])}

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        return weights, r.server | r.uploads

    def _rows(self, spec: Spec) -> int:
        """B, the number of pseudo-samples."""
        return self.rows or spec.batch

    def _global(self, v: View, x: Tensor) -> Tensor:
        """Features of the global model."""
        return v.forward(v.anchor, x).features.detach()

    def _mixed(self, v: View, batch: Batch) -> Tree:
        """Pseudo-samples with K samples of the batch mixed into each (eq. 4)."""
        labels = v.task.targets(batch, batch.x.dtype)  # [B, C]
        pick = rng.integers(v.key, (self._rows(v.spec), self.mixture), len(batch.x))
        x = (v.sent["pseudo"] + batch.x[pick].sum(1)) / (self.mixture + 1)
        target = (1 / v.task.outputs + labels[pick].sum(1)) / (self.mixture + 1)
        return {"x": x, "target": target, "z_global": self._global(v, x)}

    def _contrast(
        self, projection: Params, z_pseudo: Tensor, z_global: Tensor, z_real: Tensor
    ) -> Tensor:
        """L_con, averaged over pairs of a pseudo-sample and a real sample."""
        pair = torch.arange(len(z_pseudo), device=z_real.device) % len(z_real)
        local = _project(projection, z_pseudo)
        positive = F.cosine_similarity(local, _project(projection, z_global), dim=-1)
        negative = F.cosine_similarity(local, _project(projection, z_real)[pair], dim=-1)
        log_f1, log_f2 = self.inv_temperature1 * positive, self.inv_temperature2 * negative
        return F.softplus(log_f2 - log_f1).mean()  # -log(f1 / (f1 + f2))


def _project(projection: Params, features: Tensor) -> Tensor:
    """P: three linear layers with ReLU between."""
    x = F.relu(F.linear(features.flatten(1), projection["weight0"], projection["bias0"]))
    x = F.relu(F.linear(x, projection["weight1"], projection["bias1"]))
    return F.linear(x, projection["weight2"], projection["bias2"])
