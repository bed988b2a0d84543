"""Methods with a fixed classifier, or with a calibration of the classifier after training.

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
from kedge.core.part import ClassMeans, Doc, Out, Part, Sum, register
from kedge.core.round import Round
from kedge.core.task import Batch
from kedge.core.tree import Params, Tree, Weights
from kedge.core.view import Spec, View
from kedge.errors import IncompatibleError
from kedge.schema import Count, NotNegative, Positive, Share, Size

_LOG_ZERO = -1e30  # finite stand-in for log 0: times a soft label of 0 it is 0, -inf is nan


@register
@dataclass(frozen=True)
class CCVR(Part):
    r"""After training, retrain the head on features drawn from one Gaussian per class.

    :math:`\mu_c = \frac{1}{n_c}\sum_k n_{k,c}\mu_{k,c}`, :math:`\Sigma_c = \frac{1}{n_c - 1}
    [\sum_k (n_{k,c} - 1)\Sigma_{k,c} + \sum_k n_{k,c}\mu_{k,c}\mu_{k,c}^T - n_c\mu_c\mu_c^T]`
    of the final model's features; then the head is trained by cross-entropy on virtual features
    :math:`\sim N(\mu_c, \Sigma_c)` (algorithm 1).

    Luo et al., No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID
    Data, NeurIPS 2021, arXiv:2106.05001.

    Deviations: clients send sums of features and of their outer products, which give the same
    Sigma_c, so that the server needs only sums over clients; batches are drawn independently from
    the virtual features, and the numbers of features and steps are defaults of this library. A
    class without samples is left out. Neutral at: steps = 0. Uploads: C (1 + F + F^2) numbers per
    client, once, after the last round.
    """

    samples: Annotated[Count, Doc("virtual features per class, M_c")] = 500
    steps: Annotated[Size, Doc("SGD steps of the head")] = 500
    batch: Annotated[Count, Doc("virtual features per step")] = 128
    lr: Annotated[NotNegative, Doc("learning rate of the head")] = 0.01
    momentum: Annotated[Share, Doc("momentum of the head")] = 0.9
    labels: Annotated[
        Literal["equal", "proportional"],
        Doc("class balance of a batch: uniform, or as in the clients' data"),
    ] = "equal"
    jitter: Annotated[NotNegative, Doc("added to Sigma_c's diagonal, relative to its mean")] = 1e-6

    side = "server"
    counted = ("count", "sum", "outer")
    tells_labels = ("count",)
    neutral = {"steps": 0}
    tiny = {"samples": 5, "steps": 2, "batch": 4}
    needs_features = True
    needs_shared_head = True
    needs_sweep = True
    tasks = ("classification",)
    compute = "one pass at the end"

    def describe_uploads(self, spec: Spec) -> str:
        f = spec.features
        return (
            "asks once, after the last round for the sum of features and of their outer products "
            f"per class: {spec.task.outputs} x ({f} + {f} x {f} + 1) numbers"
        )

    def class_means(self, spec: Spec, uploads: Tree, sent: Tree) -> ClassMeans:
        return ClassMeans.of_sums(uploads["sum"], uploads["count"])

    def survey(self, v: View) -> Tree:
        def batch_sums(batch: Batch, mask: Tensor) -> Tree:
            one_hot = v.task.soft(batch.y, mask.dtype) * mask[:, None]  # [B, C]
            z = v.forward(v.anchor, batch.x, train=False).features.flatten(1)  # [B, F]
            outer = torch.einsum("bc,bf,bg->cfg", one_hot, z, z)
            return {"count": one_hot.sum(0), "sum": one_hot.T @ z, "outer": outer}

        return {name: Sum(total) for name, total in v.sweep(batch_sums).items()}

    def surveys(self) -> Literal["first", "every", "last"]:
        return "last"

    def absorb(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        count, mean, covariance = self._pooled(r.uploads)
        key_features, key_batches = rng.split(r.key, 2)
        features = self._draw(key_features, mean, covariance)  # [C, M, F]
        start = {n: weights.params[n] for n in r.model.head_names() if n in r.spec.params}
        if not start:  # another part keeps the head on the clients
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
        """``(count [C], mean [C, F], covariance [C, F, F])`` of all clients' features per class."""
        n = sums["count"][:, None]  # [C, 1]
        mean = sums["sum"] / n.clamp_min(1)
        # sum_k (n_kc - 1) Sigma_kc + n_kc mu_kc mu_kc' is the sum of the outer products
        inner = sums["outer"] - torch.einsum("cf,cg->cfg", sums["sum"], mean)
        return sums["count"], mean, inner / (n - 1).clamp_min(1)[..., None]

    def _draw(self, key: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
        """Virtual features ``[C, M, F]``.

        Uses the symmetric square root of the covariance, which also exists if it is singular.
        """
        exact = (covariance + covariance.mT).double() / 2  # LAPACK in float32 may return NaN
        value, vector = (part.to(mean.dtype) for part in torch.linalg.eigh(exact))
        value = value.clamp_min(0)
        root = torch.sqrt(value + self.jitter * value.mean(-1, keepdim=True))
        eps = rng.normal(key, (len(mean), self.samples, mean.shape[1]), mean.dtype)
        return mean[:, None] + ((eps @ vector) * root[:, None]) @ vector.mT

    def _rows(self, key: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Labels of a batch and the index of each one's virtual feature; no absent classes."""
        key_y, key_row = rng.split(key, 2)
        count = count.round().to(torch.int64)
        count = count if self.labels == "proportional" else (count > 0).to(torch.int64)
        index = rng.integers(key_y, (self.batch,), count.sum())
        y = torch.searchsorted(count.cumsum(0), index, right=True)
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
    with a bias of 0. Predictions do not depend on the length of f, so they are the method's; the
    reported loss is not. Write the part last, so that no other part changes the head afterwards.
    Deviations: the head is sent with the model, although clients can derive it; rho > 0 keeps the
    last step well-posed. The task's own loss is replaced, so parts that change it have no effect.
    Uploads: F^2 + FC numbers per client, once, after the last round.
    """

    class_mean: Annotated[bool, Doc("divide the squared error by C")] = True
    calibrate: Annotated[bool, Doc("solve for W after the last round")] = True
    ridge: Annotated[NotNegative, Doc("ridge rho of the calibration")] = 1e-4

    needs_features = True
    needs_shared_head = True
    needs_sweep = True
    tasks = ("classification",)
    compute = "one pass at the end"
    counted = ("gram", "cross")

    def describe_uploads(self, spec: Spec) -> str:
        return (
            "asks once, after the last round for sums of products of features, over all classes "
            "together, and of features with labels"
        )

    def server_init(self, spec: Spec) -> Tree:
        shapes = {
            n.removeprefix(f"{spec.model.head_name}."): tuple(spec.model.weights().params[n].shape)
            for n in spec.model.head_names()
        }
        classes = spec.task.outputs
        linear = {"weight": (classes, spec.features), "bias": (classes,)}
        if "weight" not in shapes or any(linear.get(n) != shape for n, shape in shapes.items()):
            raise IncompatibleError(
                f"{self.name} needs a head that is one linear layer; choose another model"
            )
        if classes > spec.features:
            raise IncompatibleError(
                f"{self.name} needs at least as many features as classes, {classes}; the model has "
                f"{spec.features}; choose a wider --model"
            )
        return {}

    def survey(self, v: View) -> Tree:
        if not self.calibrate:
            return {}

        def batch_sums(batch: Batch, mask: Tensor) -> Tree:
            out = v.forward(v.anchor, batch.x, train=False)
            z = F.normalize(out.features.flatten(1), dim=1) * mask[:, None]
            return {"gram": z.T @ z, "cross": z.T @ v.task.soft(batch.y, z.dtype)}

        return {name: Sum(total) for name, total in v.sweep(batch_sums).items()}

    def surveys(self) -> Literal["first", "every", "last"]:
        return "last"

    def absorb(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        if not self.calibrate:
            return weights, r.server
        gram, cross = r.uploads["gram"], r.uploads["cross"]
        n = gram.diagonal().sum()  # features have length 1
        ridge = self.ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        solution = torch.linalg.solve(gram / n + ridge, cross / n)  # [F, C]
        return self._with_head(r, weights, solution.T), r.server

    def weigh(self, v: View, batch: Batch) -> Tensor:
        return torch.zeros(len(batch.x), dtype=v.spec.dtype, device=v.spec.device)

    def term(self, v: View, params: Params, batch: Batch, out: Out) -> Tensor:
        z = F.normalize(out.features.flatten(1), dim=1)
        error = (z @ self._classifier(v.spec).T - v.task.targets(batch, z.dtype)) ** 2  # [B, C]
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
        column = 2 * torch.arange(size, device=spec.device) + 1
        phase = (row * column) % (4 * size)  # integers, so that the angle is exact
        wave = torch.cos(phase.to(spec.dtype) * (math.pi / (2 * size))) * math.sqrt(2 / size)
        wave = torch.where(row == 0, wave * math.sqrt(0.5), wave)
        return wave * (1 - 2 * rng.integers(key_sign, (size,), 2))


@register
@dataclass(frozen=True)
class FedETF(Part):
    r"""Classify normalised projections of the features by a fixed equiangular tight frame (ETF).

    Logits :math:`s\,M^T z` with :math:`z = \mu/\|\mu\|`, :math:`\mu = Pf(x) + b`, :math:`M =
    \sqrt{\frac{C}{C-1}}\,U(I - 11^T/C)`, s learnt, starting at 1; the loss is the balanced softmax,
    cross-entropy of logits + :math:`\log n_{k,c}` with the client's label counts (eq. 6), over the
    classes that the client has.

    Li et al., No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with
    Synthetic and Fixed Classifier, ICCV 2023, arXiv:2303.10058.

    The model's own head is the projection P, b to C dimensions, and U = I. Another U only rotates
    P: norms are unchanged, and gradient steps and averages rotate with it. For U = I the largest
    logit is the head's largest output, so predictions are the method's; the reported loss is not.
    Deviations: no local fine-tuning of classifier and projection for personal models. The task's
    own loss is replaced, so parts that change it have no effect. Sends, uploads: s.
    """

    balanced: Annotated[bool, Doc("balanced softmax; else plain cross-entropy")] = True
    scale: Annotated[Positive, Doc("initial value of s")] = 1.0

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
            logits = logits + torch.where(n > 0, torch.log(n.clamp_min(1)), _LOG_ZERO)
        return v.task.loss(logits, batch).mean()

    def _frame(self, mu: Tensor) -> Tensor:
        """M' mu for U = I: scaled deviations from the mean over classes, ``[B, C]``."""
        classes = mu.shape[1]
        return math.sqrt(classes / (classes - 1)) * (mu - mu.mean(1, keepdim=True))
