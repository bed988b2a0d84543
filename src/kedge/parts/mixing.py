"""Methods that train on mixtures of samples. Mixup (Zhang et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kedge.core import rng
from kedge.core.part import Doc, Part, Range, register
from kedge.core.task import Batch
from kedge.core.view import View


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

    alpha: Annotated[
        float, Doc("parameter of the Beta distribution of the mixing weight"), Range(0, open=True)
    ] = 0.2

    side = "data"
    presets = {"fedbr": {"alpha": 0.2}}

    def makes_inputs(self) -> bool:
        return True

    def transform(self, v: View, batch: Batch) -> Batch:
        key_order, key_weight = rng.split(v.key, 2)
        partner = rng.permutation(key_order, len(batch.x))
        lam = rng.beta(key_weight, self.alpha, self.alpha, batch.x.dtype)
        target = v.task.soft(batch.y, batch.x.dtype) if batch.target is None else batch.target
        x = lam * batch.x + (1 - lam) * batch.x[partner]
        return Batch(x, batch.y, lam * target + (1 - lam) * target[partner])
