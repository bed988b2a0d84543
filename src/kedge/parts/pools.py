"""Methods that mix samples: with each other, or with means of other clients' samples.

Mixup (Zhang et al. 2018), FedMix and NaiveMix (Yoon et al. 2021).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from kedge.core import rng, tree
from kedge.core.part import Doc, Drawn, Out, Part, Present, Stack, register
from kedge.core.round import Round
from kedge.core.task import Batch
from kedge.core.tree import Params, Tree, Weights
from kedge.core.view import Spec, View
from kedge.schema import Count, Positive, Share


def drawn_sums(v: View, count: int, samples: int) -> Tree:
    """``count`` sums of ``samples`` of the client's inputs ``x`` and labels ``y`` each, drawn with
    replacement."""
    offset = 0
    draws = rng.integers(v.key, (count, samples), v.info.num_examples.to(torch.int64))  # [G, M]

    def batch_sums(batch: Batch, mask: Tensor) -> Tree:
        nonlocal offset
        index = offset + torch.arange(len(mask), device=mask.device)
        offset += len(mask)
        hits = (draws[:, :, None] == index).sum(1) * mask  # [G, B]
        labels = v.task.soft(batch.y, mask.dtype)
        return {"x": torch.einsum("gr,r...->g...", hits, batch.x), "y": hits @ labels}

    return v.sweep(batch_sums)


@dataclass(frozen=True)
class _Pooled(Part):
    """Build a pool of sample means, send it to the clients and pair it with their samples."""

    lam: Annotated[Share, Doc("weight of the pool's mean in a mixture")] = 0.1
    samples: Annotated[Count, Doc("samples averaged into each mean, M")] = 10
    rows: Annotated[Count, Doc("means in the pool, equally many from each client")] = 256
    refresh: Annotated[
        Literal["once", "round"], Doc("make the pool once from all clients, or renew it each round")
    ] = "once"

    side = "data"
    neutral = {"lam": 0.0}
    tiny = {"samples": 3, "rows": 4}
    needs_sweep = True
    needs_clients = True
    sends = "rows*X + rows*C"
    tells_labels = ("y",)

    def makes_inputs(self) -> bool:
        return True

    def describe_uploads(self, spec: Spec) -> str:
        when = "once, before round 1" if self.refresh == "once" else "in every round"
        return (
            f"asks {when} for means of {self.samples} samples and of their labels; the server "
            f"knows whose they are and sends {self.rows} of them to every client"
        )

    def draw_samples(self, present: Present) -> Drawn:
        where = "the server sees whose they are and sends them to every client"
        what = f"means of {self.samples} samples of one client"
        return Drawn(present.server["x"], None, what, where)

    def server_init(self, spec: Spec) -> Tree:
        x = torch.zeros((self.rows, *spec.input_shape), dtype=spec.dtype, device=spec.device)
        return {"x": x, "y": x.new_zeros(self.rows, spec.task.outputs)}

    def survey(self, v: View) -> Tree:
        count = math.ceil(self.rows / v.spec.num_clients)
        means = tree.scale(drawn_sums(v, count, self.samples), 1 / self.samples)
        stacks = {name: Stack(value) for name, value in means.items()}
        return stacks | {"client": Stack(v.info.client)}

    def surveys(self) -> Literal["first", "every", "last"]:
        return "every" if self.refresh == "round" else "first"

    def absorb(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        by_client = torch.argsort(r.uploads["client"])
        means = {n: r.uploads[n][by_client].flatten(0, 1) for n in ("x", "y")}  # [K*G, ...]
        count = len(means["y"])
        row = torch.arange(self.rows, device=means["y"].device) % count
        return weights, tree.take(means, rng.permutation(r.key, count)[row])

    def send(self, server: Tree) -> Tree:
        return server

    def prepare(self, v: View) -> Tree:
        return {"order": rng.permutation(v.key, self.rows)}

    def _partners(self, v: View, size: int) -> Tree:
        """One mean per sample of the batch: the pool in this round's order, cyclically."""
        row = v.step * size + torch.arange(size, device=v.step.device)
        return tree.take(v.sent, v.local["order"][row % self.rows])

    def _mixed(self, v: View, batch: Batch, x: Tensor, y: Tensor) -> Batch:
        """The batch with inputs ``x`` and targets (1 - lam) y_i + lam y."""
        target = v.task.targets(batch, batch.x.dtype)
        return Batch(x, batch.y, (1 - self.lam) * target + self.lam * y)


@register
@dataclass(frozen=True)
class FedMix(_Pooled):
    r"""Mixup with other clients' means, approximated to first order in the mixing weight.

    :math:`(1-\lambda)\,\ell(f(x'_i), y_i) + \lambda\,\ell(f(x'_i), \bar y_j) + \lambda\,\langle
    \nabla_{x'}\ell(f(x'_i), y_i), \bar x_j\rangle`, :math:`x'_i = (1-\lambda)x_i` (proposition 1),
    :math:`(\bar x_j, \bar y_j)` the mean of M samples of one client and of their labels. The
    gradient by :math:`x'` is differentiated once more (algorithm 2).

    Yoon et al., FedMix: Approximation of Mixup under Mean Augmented Federated Learning, ICLR 2021,
    arXiv:2107.00233.

    Deviations: M samples are drawn with replacement, so that clients with fewer than M samples
    take part. The first two terms are one loss with the mixed label (for squared errors up to a
    constant). BatchNorm's running statistics are updated by x' alone. Neutral at: lam = 0. Sends:
    the pool, counted every round, although it never changes with ``once``. In a survey, a client
    uploads its means, and the server sees which client they are from.
    """

    presets = {
        "fedbr": {"lam": 0.1, "samples": 10},
        "cifar10": {"lam": 0.05},
        "cifar100": {"lam": 0.1},
        "femnist": {"lam": 0.2},
    }
    compute = "a second-order gradient"
    strays = 0.01  # random partners move it about

    def transform(self, v: View, batch: Batch) -> Batch:
        y = self._partners(v, len(batch.x))["y"]
        return self._mixed(v, batch, (1 - self.lam) * batch.x, y)

    def term(self, v: View, params: Params, batch: Batch, out: Out) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            return v.task.loss(v.forward(params, x).logits, Batch(x, batch.y)).sum()

        grads = torch.func.grad(loss)(batch.x)
        partners = self._partners(v, len(batch.x))["x"]
        return self.lam * (grads * partners).sum() / len(batch.x)


@register
@dataclass(frozen=True)
class NaiveMix(_Pooled):
    r"""Mixup with other clients' means, used as if they were samples.

    :math:`(1-\lambda)\,\ell(f(\tilde x), y_i) + \lambda\,\ell(f(\tilde x), \bar y_j)`,
    :math:`\tilde x = (1-\lambda)x_i + \lambda\bar x_j`, with a fixed :math:`\lambda` and
    :math:`(\bar x_j, \bar y_j)` the mean of M samples of one client and of their labels (the
    paper's baseline NaiveMix).

    Yoon et al., FedMix: Approximation of Mixup under Mean Augmented Federated Learning, ICLR 2021,
    arXiv:2107.00233.

    Deviations: M samples are drawn with replacement, so that clients with fewer than M samples
    take part. Neutral at: lam = 0. Sends: the pool, counted every round, although it never changes
    with ``once``. In a survey, a client uploads its means, and the server sees which client they
    are from.
    """

    presets = {
        "fedbr": {"lam": 0.1, "samples": 10},
        "cifar10": {"lam": 0.1},
        "cifar100": {"lam": 0.1},
        "femnist": {"lam": 0.2},
    }
    strays = 0.01  # random partners move it about

    def transform(self, v: View, batch: Batch) -> Batch:
        partners = self._partners(v, len(batch.x))
        x = (1 - self.lam) * batch.x + self.lam * partners["x"]
        return self._mixed(v, batch, x, partners["y"])


# -- Methods that train on mixtures of samples. Mixup (Zhang et al. 2018) --------------------------


@register
@dataclass(frozen=True)
class Mixup(Part):
    r"""Train on convex combinations of pairs of samples from the batch.

    :math:`\tilde x = \lambda x_i + (1-\lambda) x_j`, :math:`\tilde y = \lambda y_i + (1-\lambda)
    y_j`, :math:`\lambda \sim Beta(\alpha, \alpha)`, one :math:`\lambda` per batch, j from a
    permutation of the batch.

    Zhang et al., mixup: Beyond Empirical Risk Minimization, ICLR 2018, arXiv:1710.09412.

    For classification, cross-entropy with the mixed label equals the mixture of the two losses.
    """

    alpha: Annotated[Positive, Doc("parameter of the Beta distribution of the mixing weight")] = 0.2

    side = "data"
    presets = {"fedbr": {"alpha": 0.2}}

    def makes_inputs(self) -> bool:
        return True

    def transform(self, v: View, batch: Batch) -> Batch:
        key_order, key_weight = rng.split(v.key, 2)
        partner = rng.permutation(key_order, len(batch.x))
        lam = rng.beta(key_weight, self.alpha, self.alpha, batch.x.dtype)
        target = v.task.targets(batch, batch.x.dtype)
        x = lam * batch.x + (1 - lam) * batch.x[partner]
        return Batch(x, batch.y, lam * target + (1 - lam) * target[partner])
