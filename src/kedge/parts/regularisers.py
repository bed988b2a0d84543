"""Methods that regularise the local objective on logits or features.

FedNTD (Lee et al. 2022), FedDecorr (Shi et al. 2023), FedProto (Tan et al. 2022), FedLC (Zhang et
al. 2022), logit adjustment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.core.part import ClassMeans, Doc, Out, Part, Sum, register
from kedge.core.round import Round
from kedge.core.task import Batch
from kedge.core.tree import Params, Tree, Weights
from kedge.core.view import Spec, View
from kedge.schema import NotNegative, Positive

# -- Class means of features over all clients: FedTR's centroids, FedProto's prototypes ------------


def empty_means(spec: Spec) -> tuple[Tensor, Tensor]:
    """Initial ``(means [C, F], valid [C])``: zeros, none of them valid."""
    means = torch.zeros((spec.task.outputs, spec.features), dtype=spec.dtype, device=spec.device)
    return means, means.new_zeros(spec.task.outputs)


def class_sums(v: View, weights: Weights) -> tuple[Tensor, Tensor]:
    """``(feature sums [C, F], sample counts [C])`` per class over all data of the client.

    The model runs in evaluation mode.
    """

    def batch_sums(batch: Batch, mask: Tensor) -> Tree:
        one_hot = F.one_hot(batch.y, v.task.outputs).to(mask.dtype) * mask[:, None]  # [B, C]
        features = v.forward(weights, batch.x, train=False).features.flatten(1)
        return {"sum": one_hot.T @ features, "count": one_hot.sum(0)}

    totals = v.sweep(batch_sums)
    return totals["sum"], totals["count"]


def describe_class_sums(spec: Spec) -> str:
    """What a client sends with :func:`class_sums`."""
    return (
        f"sends per class the sum of the features before the head and a count: {spec.task.outputs} "
        f"x {spec.features} + {spec.task.outputs} numbers"
    )


def update_means(
    sums: Tensor, counts: Tensor, means: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor]:
    """Next ``(means [C, F], valid [C])`` from a cohort's sums and counts.

    A class without samples in the cohort keeps its mean.
    """
    count = counts[:, None]  # [C, 1]
    cohort_means = sums / count.clamp_min(1)
    return torch.where(count > 0, cohort_means, means), torch.where(count[:, 0] > 0, 1.0, valid)


@register
@dataclass(frozen=True)
class FedNTD(Part):
    r"""Distil the global model's predictions on the classes other than the true one.

    :math:`L_{CE} + \beta\tau^2\,KL(\tilde q^g_\tau \,\|\, \tilde q^l_\tau)`, where :math:`\tilde q`
    is the softmax at temperature :math:`\tau` over the logits without the true class, of the global
    model (a constant) and of the local one (the paper's L_FedNTD).

    Lee et al., Preservation of the Global Knowledge by Not-True Distillation in Federated Learning,
    NeurIPS 2022, arXiv:2106.03097.

    The factor tau^2, which keeps the gradient's scale, is that of the authors' code. There the
    global model runs in evaluation mode, with its BatchNorm statistics; ``eval_mode = false``
    normalises by the batch, like the model in training. Neutral at: beta = 0. Sends / keeps:
    nothing.
    """

    beta: Annotated[NotNegative, Doc("weight of the term (FedBR tries 1 and 0.1)")] = 1.0
    tau: Annotated[Positive, Doc("temperature")] = 1.0
    eval_mode: Annotated[
        bool, Doc("the global model runs in evaluation mode; false: in training mode")
    ] = True

    presets = {"official": {"beta": 1.0, "tau": 1.0}, "fedbr": {"beta": 1.0, "tau": 1.0}}
    neutral = {"beta": 0.0}
    tasks = ("classification",)
    compute = "one forward pass"

    def term(self, v: View, params: Params, batch: Batch, out: Out) -> Tensor:
        anchor_logits = v.forward(v.anchor, batch.x, train=not self.eval_mode).logits.detach()
        teacher, student = _not_true(anchor_logits, batch.y), _not_true(out.logits, batch.y)
        return self.beta * self.tau**2 * v.task.divergence(teacher, student, self.tau).mean()


@register
@dataclass(frozen=True)
class FedDecorr(Part):
    r"""Prevent dimensional collapse by decorrelating the features in the batch.

    :math:`L + \frac{\beta}{B\,F(F - 1)}\sum_{i \ne j}(z^\top z)_{ij}^2`, z the features of the B
    samples, each of the F centred and divided by its standard deviation.

    Shi et al., Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated
    Learning, ICLR 2023, arXiv:2210.00226.

    Deviations: as in the authors' code, the diagonal (a constant) is omitted and the sum divided
    by B, so that the term is about B times the printed :math:`\frac{1}{F^2}\|K\|_F^2`, K the
    correlations. A batch of one sample has no term. Neutral at: beta = 0. Sends / keeps: nothing.
    """

    beta: Annotated[NotNegative, Doc("weight of the term")] = 0.1

    presets = {"fedcog": {"beta": 0.01}, "fedbr": {"beta": 0.1}}
    neutral = {"beta": 0.0}
    needs_features = True
    compute = "correlations of the features"

    def term(self, v: View, params: Params, batch: Batch, out: Out) -> Tensor:
        features = out.features.flatten(1)
        rows, width = features.shape
        if rows == 1:
            return out.logits.new_zeros(())
        z = features - features.mean(0)
        z = z / torch.sqrt(z.square().sum(0) / (rows - 1) + 1e-8)
        off_diagonal = (z.T @ z) * (1 - torch.eye(width, dtype=z.dtype, device=z.device))
        return self.beta * off_diagonal.square().sum() / (rows * max(1, width * (width - 1)))


@register
@dataclass(frozen=True)
class FedProto(Part):
    r"""Pull every sample's features towards the global prototype of its class.

    :math:`L + \frac{\lambda}{BF}\sum_b\|f(x_b) - \bar C_{y_b}\|^2` (eqs. 7-8), B samples, F
    features. After training, :math:`C_{ij}` is the mean feature of class j on client i (eq. 3), and
    :math:`\bar C_j \leftarrow \sum_i n_{ij} C_{ij}/\sum_i n_{ij}` over the clients that have the
    class (eq. 6).

    Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022,
    arXiv:2105.00243.

    Deviations: the model is averaged as in FedAvg; the paper exchanges prototypes alone
    (``fedproto+local`` does that). The head classifies, not the nearest prototype. The distance is
    that of single samples, its square averaged over batch and features, as in the authors' code.
    The printed factor 1/clients in eq. 6, which shrinks prototypes, is omitted. A class that is
    absent from the cohort keeps its prototype. Neutral at: lam = 0. Sends: prototypes and their
    validity. Uploads: their sums and weights.
    """

    lam: Annotated[NotNegative, Doc("weight of the prototype term")] = 1.0
    pool: Annotated[
        Literal["samples", "clients"],
        Doc("average prototypes over samples, or equally over clients (the authors' code)"),
    ] = "samples"

    presets = {
        "official": {"pool": "clients"},
        "mnist": {"lam": 1.0},
        "femnist": {"lam": 1.0},
        "cifar10": {"lam": 0.1},
    }
    neutral = {"lam": 0.0}
    needs_features = True
    counted = ("sum", "weight")
    tells_labels = ("weight",)
    needs_sweep = True
    tasks = ("classification",)
    sends = "C*F + C"
    uploads = "C*F + C"
    compute = "one pass a round"

    def describe_uploads(self, spec: Spec) -> str:
        return describe_class_sums(spec)

    def class_means(self, spec: Spec, uploads: Tree, sent: Tree) -> ClassMeans:
        return ClassMeans.of_sums(uploads["sum"], uploads["weight"])

    def server_init(self, spec: Spec) -> Tree:
        prototypes, valid = empty_means(spec)
        return {"prototypes": prototypes, "valid": valid}

    def send(self, server: Tree) -> Tree:
        return server

    def term(self, v: View, params: Params, batch: Batch, out: Out) -> Tensor:
        diff = out.features.flatten(1) - v.sent["prototypes"][batch.y]  # [B, F]
        return self.lam * (diff.square().mean(1) * v.sent["valid"][batch.y]).mean()

    def reply(self, v: View, weights: Weights) -> tuple[Tree, Tree]:
        sums, weight = class_sums(v, weights)
        if self.pool == "clients":
            count = weight.clamp_min(1)
            sums, weight = sums / count[:, None], weight / count
        return {}, {"sum": Sum(sums), "weight": Sum(weight)}

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        sums, weight = r.uploads["sum"], r.uploads["weight"]
        prototypes, valid = update_means(sums, weight, r.server["prototypes"], r.server["valid"])
        return weights, {"prototypes": prototypes, "valid": valid}


def _not_true(logits: Tensor, y: Tensor) -> Tensor:
    """Logits without the true class, ``[B, C - 1]``."""
    other = torch.arange(logits.shape[1] - 1, device=logits.device)
    return logits.gather(1, other + (other >= y[:, None]).to(other.dtype))


# -- Methods that adjust the logits by the client's label distribution -----------------------------


ABSENT = 1e-12  # stand-in for a count or share of 0, which would make the adjustment infinite


@register
@dataclass(frozen=True)
class FedLC(Part):
    r"""Calibrate logits by margins that are larger for classes with fewer samples on the client.

    :math:`-\log\frac{e^{f_y(x) - \tau n_y^{-1/4}}}{\sum_c e^{f_c(x) - \tau n_c^{-1/4}}}` (eq. 7),
    :math:`n_c` the client's samples of class c.

    Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022,
    arXiv:2209.00189.

    Deviations: the sum runs over all classes, as in any cross-entropy; the printed sum omits the
    true class. An absent class, whose margin would be infinite, counts as n = 1e-12: it drops out
    of the sum and its logit gets no gradient. Neutral at: tau = 0. Sends / keeps: nothing.
    """

    tau: Annotated[NotNegative, Doc("scale of the margins (not given in the paper)")] = 1.0

    presets = {"feddecorr": {"tau": 0.1}}
    neutral = {"tau": 0.0}
    needs_labels = True
    tasks = ("classification",)

    def logits(self, v: View, batch: Batch, logits: Tensor) -> Tensor:
        return logits - self.tau * v.label_counts.clamp_min(ABSENT) ** -0.25


@register
@dataclass(frozen=True)
class LogitAdjust(Part):
    r"""Add the log-prior of the client's labels to the logits in the training loss.

    :math:`-\log\frac{e^{f_y(x) + \tau\log\pi_y}}{\sum_c e^{f_c(x) + \tau\log\pi_c}}` (eq. 10),
    :math:`\pi_c` the share of class c among the client's samples; tau = 1 is the balanced softmax.

    Menon et al., Long-Tail Learning via Logit Adjustment, ICLR 2021, arXiv:2007.07314.

    Deviations: each client has its own prior; the paper has one. An absent class, whose log-prior
    would be infinite, counts with a share of 1e-12. Neutral at: tau = 0. Sends / keeps: nothing.
    """

    tau: Annotated[NotNegative, Doc("strength of the adjustment")] = 1.0

    neutral = {"tau": 0.0}
    needs_labels = True
    tasks = ("classification",)

    def logits(self, v: View, batch: Batch, logits: Tensor) -> Tensor:
        prior = v.label_counts / v.label_counts.sum()
        return logits + self.tau * torch.log(prior.clamp_min(ABSENT))
