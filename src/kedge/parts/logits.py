"""Methods that adjust the logits by the client's label distribution.

FedLC (Zhang et al. 2022), LogitAdjust (Menon et al. 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from kedge.core.part import Doc, Part, Range, register
from kedge.core.task import Batch
from kedge.core.view import View

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

    tau: Annotated[float, Doc("scale of the margins (not given in the paper)"), Range(0)] = 1.0

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

    tau: Annotated[float, Doc("strength of the adjustment"), Range(0)] = 1.0

    neutral = {"tau": 0.0}
    needs_labels = True
    tasks = ("classification",)

    def logits(self, v: View, batch: Batch, logits: Tensor) -> Tensor:
        prior = v.label_counts / v.label_counts.sum()
        return logits + self.tau * torch.log(prior.clamp_min(ABSENT))
