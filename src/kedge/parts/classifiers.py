"""Methods that fix the classifier in advance, or set it right after training.

CCVR (Luo et al. 2021), SphereFed (Dong et al. 2022), FedETF (Li et al. 2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.core import rng, tree
from kedge.core.part import Doc, Out, Part, Range, Sum, register
from kedge.core.round import Round
from kedge.core.task import Batch
from kedge.core.tree import Params, Tree, Weights
from kedge.core.view import Spec, View
from kedge.errors import IncompatibleError

_ABSENT = -1e30  # stands for the log of 0; times a soft label of 0 it is 0, where -inf is not


@register
@dataclass(frozen=True)
class CCVR(Part):
    r"""After training, train the head once more on features drawn from one normal per class.

    :math:`\mu_c = \frac{1}{n_c}\sum_k n_{k,c}\mu_{k,c}`, :math:`\Sigma_c = \frac{1}{n_c - 1}
    [\sum_k (n_{k,c} - 1)\Sigma_{k,c} + \sum_k n_{k,c}\mu_{k,c}\mu_{k,c}^T - n_c\mu_c\mu_c^T]`
    of the final model's features; then the head learns from features :math:`\sim N(\mu_c,
    \Sigma_c)` by cross-entropy (algorithm 1).

    Luo et al., No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID
    Data, NeurIPS 2021, arXiv:2106.05001.

    Deviations: clients send sums of features and of their outer products, which give the same
    Sigma_c, so that the server needs no single client's; batches are drawn independently from the
    virtual features, and numbers of features and steps are choices of this library. A class
    without samples is left out. Neutral at: steps = 0. Uploads: C (1 + F + F^2) numbers of every
    client, once, after the last round.
    """

    samples: Annotated[int, Doc("virtual features of each class, M_c"), Range(1)] = 500
    steps: Annotated[int, Doc("the head's steps (SGD)"), Range(0)] = 500
    batch: Annotated[int, Doc("virtual features in a step"), Range(1)] = 128
    lr: Annotated[float, Doc("step size"), Range(0)] = 0.01
    momentum: Annotated[float, Doc("of the head's steps"), Range(0, 1)] = 0.9
    labels: Annotated[
        Literal["equal", "proportional"],
        Doc("a batch holds all classes alike, or as the clients' data do"),
    ] = "equal"
    jitter: Annotated[float, Doc("added to Sigma_c's diagonal, relative to its mean"), Range(0)] = (
        1e-6
    )

    side = "server"
    neutral = {"steps": 0}
    tiny = {"samples": 5, "steps": 2, "batch": 4}
    needs_features = True
    needs_shared_head = True
    needs_sweep = True
    tasks = ("classification",)
    compute = "one pass at the end"

    def survey(self, v: View) -> Tree:
        def piece(batch: Batch, mask: Tensor) -> Tree:
            own = _one_hot(batch.y, v.task.outputs, mask.dtype) * mask[:, None]  # [B, C]
            z = v.forward(v.anchor, batch.x, train=False).features.flatten(1)  # [B, F]
            outer = torch.einsum("bc,bf,bg->cfg", own, z, z)
            return {"count": own.sum(0), "sum": own.T @ z, "outer": outer}

        return {name: Sum(total) for name, total in v.sweep(piece).items()}

    def surveys(self) -> Literal["first", "every", "last"]:
        return "last"

    def absorb(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        count, mean, covariance = self._pooled(r.uploads)
        key_features, key_batches = rng.split(r.key, 2)
        features = self._draw(key_features, mean, covariance)  # [C, M, F]
        start = {n: weights.params[n] for n in r.model.head_names() if n in r.spec.params}
        if not start:  # it stays on the clients
            return weights, r.server

        def loss(own: Params, z: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(r.model.head(weights.params | own, z), y)

        head, velocity = start, tree.zeros_like(start)
        for key in rng.split(key_batches, self.steps):
            y, row = self._rows(key, count)
            z = features[y, row].reshape(-1, *r.spec.shapes["features"])
            velocity = tree.axpy(self.momentum, velocity, torch.func.grad(loss)(head, z, y))
            head = tree.map(lambda w, u: w - self.lr * u, head, velocity)
        return weights._replace(params=weights.params | head), r.server

    def _pooled(self, sums: Tree) -> tuple[Tensor, Tensor, Tensor]:
        """Number, mean and covariance of all clients' features, class by class."""
        n = sums["count"][:, None]  # [C, 1]
        mean = sums["sum"] / n.clamp_min(1)
        # sum_k (n_kc - 1) Sigma_kc + n_kc mu_kc mu_kc' is the sum of the outer products
        inner = sums["outer"] - torch.einsum("cf,cg->cfg", sums["sum"], mean)
        return sums["count"], mean, inner / (n - 1).clamp_min(1)[..., None]

    def _draw(self, key: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
        """Virtual features ``[C, M, F]``, through the symmetric root of the covariance, which
        exists for a singular one, too."""
        value, vector = torch.linalg.eigh((covariance + covariance.mT) / 2)
        value = value.clamp_min(0)
        root = torch.sqrt(value + self.jitter * value.mean(-1, keepdim=True))
        eps = rng.normal(key, (len(mean), self.samples, mean.shape[1]), mean.dtype)
        return mean[:, None] + ((eps @ vector) * root[:, None]) @ vector.mT

    def _rows(self, key: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Labels of a batch, none of an absent class, and which of its features each gets."""
        key_y, key_row = rng.split(key, 2)
        parts = count.round().to(torch.int64)
        parts = parts if self.labels == "proportional" else (parts > 0).to(torch.int64)
        at = rng.integers(key_y, (self.batch,), parts.sum())
        y = torch.searchsorted(parts.cumsum(0), at, right=True)
        return y, rng.integers(key_row, (self.batch,), self.samples)


@register
@dataclass(frozen=True)
class SphereFed(Part):
    r"""Learn features on the unit sphere for a fixed classifier with orthonormal rows.

    :math:`\min_\theta \frac{1}{C}\|Wz - e_y\|^2` with :math:`z = f_\theta(x)/\|f_\theta(x)\|`,
    :math:`WW^T = I`, W fixed. After training :math:`W^T \leftarrow \big(\frac{1}{n}\sum zz^T + \rho
    I\big)^{-1}\frac{1}{n}\sum z e_y^T`, from sums over all clients' samples.

    Dong et al., SphereFed: Hyperspherical Federated Learning, ECCV 2022, arXiv:2207.09413.

    W is drawn from the run's key, the same on server and clients: rows of a cosine transform with
    random signs. The model's head is not trained; the server writes W into it after every round,
    with a bias of 0, so that predictions, for which the length of f is of no matter, are the
    method's; their reported loss is not. Write the part last, so that nobody moves the head again.
    Deviations: the head travels with the model, though it is known beforehand; rho > 0 keeps the
    last step well-posed. The task's own loss is replaced, so parts that change it have no effect.
    Uploads: F^2 + FC numbers of every client, once, after the last round.
    """

    class_mean: Annotated[bool, Doc("divide the squared error by C")] = True
    calibrate: Annotated[bool, Doc("solve for W after the last round")] = True
    ridge: Annotated[float, Doc("rho of that solution"), Range(0)] = 1e-4

    needs_features = True
    needs_shared_head = True
    needs_sweep = True
    tasks = ("classification",)
    compute = "one pass at the end"

    def server_init(self, spec: Spec) -> Tree:
        shapes = {
            n.removeprefix(f"{spec.model.head_name}."): tuple(spec.model.weights().params[n].shape)
            for n in spec.model.head_names()
        }
        classes = spec.task.outputs
        fits = {"weight": (classes, spec.features), "bias": (classes,)}
        if "weight" not in shapes or any(fits.get(n) != shape for n, shape in shapes.items()):
            raise IncompatibleError(f"{self.name} needs a head that is one linear layer")
        if classes > spec.features:
            raise IncompatibleError(
                f"{self.name} needs as many features as classes, {classes}; the model has "
                f"{spec.features}"
            )
        return {}

    def survey(self, v: View) -> Tree:
        if not self.calibrate:
            return {}

        def piece(batch: Batch, mask: Tensor) -> Tree:
            out = v.forward(v.anchor, batch.x, train=False)
            z = F.normalize(out.features.flatten(1), dim=1) * mask[:, None]
            return {"gram": z.T @ z, "cross": z.T @ _one_hot(batch.y, v.task.outputs, z.dtype)}

        return {name: Sum(total) for name, total in v.sweep(piece).items()}

    def surveys(self) -> Literal["first", "every", "last"]:
        return "last"

    def absorb(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        if not self.calibrate:
            return weights, r.server
        gram, cross = r.uploads["gram"], r.uploads["cross"]
        n = gram.diagonal().sum()  # features have length 1
        ridge = self.ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        solved = torch.linalg.solve(gram / n + ridge, cross / n)  # [F, C]
        return self._with_head(r, weights, solved.T), r.server

    def weigh(self, v: View, batch: Batch) -> Tensor:
        return torch.zeros(len(batch.x), dtype=v.spec.dtype, device=v.spec.device)

    def term(self, v: View, params: Params, batch: Batch, out: Out) -> Tensor:
        z = F.normalize(out.features.flatten(1), dim=1)
        target = batch.target
        if target is None:
            target = _one_hot(batch.y, v.task.outputs, z.dtype)
        error = (z @ self._classifier(v.spec).T - target) ** 2  # [B, C]
        return (error.mean(1) if self.class_mean else error.sum(1)).mean()

    def trainable(self, v: View, params: Params) -> dict[str, Tensor | bool]:
        return dict.fromkeys(v.spec.model.head_names(), False)

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        return self._with_head(r, weights, self._classifier(r.spec)), r.server

    def _with_head(self, r: Round, weights: Weights, classifier: Tensor) -> Weights:
        head = {
            n: classifier if n.endswith(".weight") else torch.zeros_like(weights.params[n])
            for n in r.model.head_names()
        }
        return weights._replace(params=weights.params | head)

    def _classifier(self, spec: Spec) -> Tensor:
        """W ``[C, F]``."""
        size = spec.features
        key_row, key_sign = rng.split(rng.fold(spec.key, self.name), 2)
        row = rng.permutation(key_row, size)[: spec.task.outputs, None]
        at = 2 * torch.arange(size, device=spec.device) + 1
        turn = (row * at) % (4 * size)  # whole numbers, so that the angle is exact
        wave = torch.cos(turn.to(spec.dtype) * (math.pi / (2 * size))) * math.sqrt(2 / size)
        wave = torch.where(row == 0, wave * math.sqrt(0.5), wave)
        return wave * (1 - 2 * rng.integers(key_sign, (size,), 2))


@register
@dataclass(frozen=True)
class FedETF(Part):
    r"""Classify normed projections of the features by a fixed simplex, the equiangular tight frame.

    Logits :math:`s\,M^T z` with :math:`z = \mu/\|\mu\|`, :math:`\mu = Pf(x) + b`, :math:`M =
    \sqrt{\frac{C}{C-1}}\,U(I - 11^T/C)`, s learnt from 1 on; the loss is the balanced softmax,
    cross-entropy of logits + :math:`\log n_{k,c}` with the client's label counts (eq. 6), a class
    that it lacks having no part in it.

    Li et al., No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with
    Synthetic and Fixed Classifier, ICCV 2023, arXiv:2303.10058.

    The model's own head is the projection P, b to C dimensions, and U = I: another U only turns P,
    in which lengths, gradient steps and their mean turn along, and for U = I the largest logit is
    the head's largest output, so that predictions are the method's; their reported loss is not.
    Deviations: no local fine-tuning of classifier and projection for personal models. The task's
    own loss is replaced, so parts that change it have no effect. Sends, uploads: s.
    """

    balanced: Annotated[bool, Doc("balanced softmax; else plain cross-entropy")] = True
    scale: Annotated[float, Doc("first value of s"), Range(0, open=True)] = 1.0

    needs_labels = True
    tasks = ("classification",)
    sends = "E"
    uploads = "E"

    def extend(self, spec: Spec) -> Params:
        return {"scale": torch.zeros(1, dtype=spec.dtype, device=spec.device) + self.scale}

    def weigh(self, v: View, batch: Batch) -> Tensor:
        return torch.zeros(len(batch.x), dtype=v.spec.dtype, device=v.spec.device)

    def term(self, v: View, params: Params, batch: Batch, out: Out) -> Tensor:
        logits = v.own(params)["scale"] * self._frame(F.normalize(out.logits, dim=1))
        if self.balanced:
            n = v.label_counts
            logits = logits + torch.where(n > 0, torch.log(n.clamp_min(1)), _ABSENT)
        return v.task.loss(logits, batch).mean()

    def _frame(self, mu: Tensor) -> Tensor:
        """M' mu: every class's component, from its mean."""
        classes = mu.shape[1]
        return math.sqrt(classes / (classes - 1)) * (mu - mu.mean(1, keepdim=True))


def _one_hot(y: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """By comparison: torch's looks at values, which a gradient under vmap does not allow."""
    return (y[:, None] == torch.arange(classes, device=y.device)).to(dtype)
