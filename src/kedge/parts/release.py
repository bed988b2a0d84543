"""Methods that change what leaves a client, or what the server sees of all of them.

Clip and Gauss (McMahan et al. 2018), CentralGauss (the same noise, added once by the server).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.part import Doc, Part, register
from kedge.core.round import Round
from kedge.core.tree import Tree, Weights
from kedge.core.update import Totals, Update
from kedge.core.view import View
from kedge.errors import IncompatibleError
from kedge.schema import NotNegative, Positive


@register
@dataclass(frozen=True)
class Clip(Part):
    r"""Scale all that leaves a client down to a norm of at most S.

    :math:`u_k \leftarrow u_k \min(1, S / \|u_k\|)`, where :math:`u_k` is one vector of the update,
    averaged statistics, the contribution to an aggregation and every upload, in training and in
    surveys (section 3.1, flat clipping). The norm is computed in float64.

    McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018,
    arXiv:1710.06963.

    Deviations: the paper clips the update, the only thing that its clients send. Uploads that count
    samples are measured in units of the client's number of samples, and contributions in units of
    its weight, or they would be most of the norm. Numbers of samples and counters of BatchNorm stay
    as they are. Whole numbers (``krum``; ``fedbr``, ``fedmix`` and ``naivemix`` send that of the
    client) are refused. Neutral at: norm = 1e30.
    """

    norm: Annotated[Positive, Doc("largest norm S of what leaves")] = 1.0
    side = "privacy"
    neutral = {"norm": 1e30}
    tiny = {"norm": 0.5}

    def release(self, v: View, update: Update) -> tuple[Update, Tree]:
        content, units = _content(v, update)
        measured = tree.map(lambda x, unit: x.double() / unit, content, units)
        factor = (self.norm / tree.sq_norm(measured).sqrt()).clamp(max=1.0)
        clipped = tree.map(lambda x: (x.double() * factor).to(x.dtype), content)
        return _with_content(update, clipped), v.client


@register
@dataclass(frozen=True)
class Gauss(Part):
    r"""Add normal noise to all that leaves a client.

    :math:`u_k \leftarrow u_k + \sigma z`, with :math:`z` standard normal, in the units in which
    :class:`Clip` measures; after ``clip(norm=S)``, :math:`\sigma / S` is the noise multiplier.

    McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018,
    arXiv:1710.06963.

    Deviations: in the paper the server adds the noise to the mean (see CentralGauss); here every
    client does, so that the server need not be trusted. In a simulation the noise is drawn from the
    seed, which hides nothing from those who know it; a member of a real federation draws it from a
    secret of its own. A variance of BatchNorm stays at 0 or above. kedge states no epsilon for it.
    Neutral at: std = 0.
    """

    std: Annotated[NotNegative, Doc("standard deviation of the noise")] = 0.01
    side = "privacy"
    neutral = {"std": 0.0}
    tiny = {"std": 0.001}

    def release(self, v: View, update: Update) -> tuple[Update, Tree]:
        content, units = _content(v, update)

        def noisy(x: Tensor, unit: Tensor, z: Tensor) -> Tensor:
            return (x + self.std * unit * z).to(x.dtype)  # a number alone would take the unit's

        changed = tree.map(noisy, content, units, v.noise(content))
        buffers = {
            n: torch.maximum(x, -v.anchor.buffers[n]) if n.endswith("running_var") else x
            for n, x in changed["update"].buffers.items()
        }
        changed["update"] = changed["update"]._replace(buffers=buffers)
        return _with_content(update, changed), v.client


@register
@dataclass(frozen=True)
class CentralGauss(Part):
    r"""Add normal noise to the sums over the clients, on a server that is trusted with them.

    :math:`\Delta \leftarrow \big(\sum_k p_k u_k + \sigma z\big) / W`, with :math:`z` standard
    normal and a constant denominator: :math:`W` is the weight of ``clients`` clients of the round's
    mean weight (section 3.2, the estimator :math:`\tilde f_f`). With 0, and in a survey of all
    clients, it is that of those that came.

    McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018,
    arXiv:1710.06963.

    The sensitivity of the sums is that of ``clip``, to be put before it in the method, with
    ``weighting = uniform``. Sums that are made from the same updates get noise of their own each.
    Losses in records are not covered. The server of a real federation draws the noise from a secret
    of its own. kedge states no epsilon for it. Neutral at: std = 0.
    """

    std: Annotated[NotNegative, Doc("standard deviation of the noise on a sum")] = 0.01
    clients: Annotated[NotNegative, Doc("expected clients of a round; 0: those that came")] = 0.0
    side = "privacy"
    neutral = {"std": 0.0}
    tiny = {"std": 0.001}

    def refuses(self, other: Part) -> str:
        if not other.needs_clients:
            return ""
        return (
            f"centralgauss makes sums noisy, but {other.name} sees single clients; use gauss, or "
            "leave one of them out"
        )

    def receive(self, r: Round, totals: Totals) -> tuple[Totals, Tree]:
        before = totals.summed
        noisy = tree.map(lambda x, z: x + self.std * z, before, r.noise(before))
        of_all = not totals.stacked.losses and r.cohort == r.num_clients  # a survey
        expected = r.cohort if of_all else self.clients or r.cohort
        weight = before.weight * (expected / r.cohort)
        noisy = noisy._replace(weight=weight, sq_norm=before.sq_norm)
        return totals._replace(summed=noisy), r.server


def _content(v: View, update: Update) -> tuple[Tree, Tree]:
    """All that leaves and tells something about the data, and the unit of each of its leaves."""
    integers = {n for n, b in v.anchor.buffers.items() if not b.is_floating_point()}
    buffers = {n: b for n, b in update.delta.buffers.items() if n not in integers}
    one = torch.ones((), dtype=torch.float64, device=v.spec.device)
    units: dict[str, Tree] = {}
    for part, uploads in update.uploads.items():
        if not all(leaf.is_floating_point() for leaf in tree.leaves(uploads)):
            raise IncompatibleError(
                f"{part} uploads whole numbers, which can be neither clipped nor made noisy; "
                "leave one of them out"
            )
        units[part] = tree.map(lambda _: one, uploads)
        for name in v.counted(part):
            if isinstance(uploads, dict) and name in uploads:
                units[part][name] = tree.map(lambda _: v.info.num_examples, uploads[name])
    delta = Weights(update.delta.params, buffers)
    return {"update": delta, "contribution": update.contribution, "uploads": update.uploads}, {
        "update": tree.map(lambda _: one, delta),
        "contribution": tree.map(lambda _: v.info.weight, update.contribution),
        "uploads": units,
    }


def _with_content(update: Update, content: Tree) -> Update:
    """An update with other content."""
    params, buffers = content["update"]
    delta = Weights(params, update.delta.buffers | buffers)
    return update._replace(
        delta=delta, contribution=content["contribution"], uploads=content["uploads"]
    )
