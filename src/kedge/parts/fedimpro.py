"""Train the upper layers on shared feature distributions. FedImpro (Tang et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.core import rng, tree
from kedge.core.model import Model
from kedge.core.part import ClassMeans, Doc, Out, Part, Range, Sum, register
from kedge.core.round import Round
from kedge.core.task import Batch
from kedge.core.tree import Params, Tree, Weights
from kedge.core.view import Spec, View
from kedge.errors import IncompatibleError
from kedge.schema import NotNegative, Share, Size

FIRST_SCALE = 0.1  # initial standard deviation
FULL_DIMENSION = 5000  # activations from which on the released code has no momentum


@register
@dataclass(frozen=True)
class FedImpro(Part):
    r"""Train the upper layers also on features drawn from shared Gaussians, one per class.

    :math:`\min_\theta f(\theta; x, y) + \lambda_t f(\theta_{high}; h', y')` (eq. 5) with drawn
    features :math:`h' \sim N(\mu_{y'}, \sigma_{y'})`, constants that are appended to the batch's
    own features h at the cut. Client m, per step and class: :math:`\mu_m \leftarrow \beta_m\mu_m +
    (1 - \beta_m)\,mean(h)`, :math:`\sigma_m` likewise (eq. 6). Server: :math:`\mu \leftarrow
    \beta_g\mu + (1 - \beta_g)\frac{1}{|S|}\sum_{m \in S}(\mu_m + \epsilon_m)`, :math:`\sigma`
    likewise (eq. 7).

    Tang et al., FedImpro: Measuring and Improving Client Update in Federated Learning, ICLR 2024,
    arXiv:2402.07011.

    Deviations: the default is the authors' released code with the ramp of the weight capped at 1,
    and beta_m = 0. Balanced labels include classes that a client lacks; the ramp protects the first
    rounds from the random initial statistics. The default cut is ``stage2``, as for the paper's
    ResNet-18; a sequential model without it is cut in the middle of its layers before the head,
    of which those before the first parameter do not count. ``official`` does not cap the ramp (it
    counts epochs: ramp = 500/E), and has the code's beta_m: max(0, 1 - D/5000) for D activations at
    the cut, where a number of samples was meant; it is 0 from D = 5000 on. ``paper`` is as printed:
    the batch's labels, draws from the received statistics, no ramp, variances, no cap. Clients add
    the noise, and the scale stays >= 0. Neutral at: weight = 0. Sends, uploads: 2CD statistics (for
    ``stat_axes = channel``, D counts the channels); ``count_weighted`` adds C label counts. Keeps:
    nothing.
    """

    cut: Annotated[
        str, Doc("last of the lower layers; empty: stage2, else the middle one of the model")
    ] = ""
    weight: Annotated[NotNegative, Doc("final weight of the drawn features' loss")] = 1.0
    ramp: Annotated[Size, Doc("rounds over which the weight grows from 0; 0: none")] = 500
    cap: Annotated[bool, Doc("end the ramp at the final weight")] = True
    mix: Annotated[
        Literal["sum", "share"],
        Doc("sum: real samples have weight 1; share: 1 - the weight of the drawn features"),
    ] = "sum"
    labels: Annotated[
        Literal["balanced", "batch"], Doc("labels of drawn features: balanced, or the batch's")
    ] = "balanced"
    draws_from: Annotated[
        Literal["local", "shared"],
        Doc("statistics to draw from: the client's running ones, or the received ones"),
    ] = "local"
    stat_axes: Annotated[
        Literal["element", "channel"],
        Doc("one mean and scale per activation, or per channel (the first axis)"),
    ] = "element"
    spread: Annotated[
        Literal["std", "variance"], Doc("the scale to average over steps and clients")
    ] = "std"
    s_max: Annotated[NotNegative, Doc("largest standard deviation; 0: no bound")] = 0.1
    beta_m: Annotated[
        float | Literal["by_dimension"],
        Doc(
            "momentum of a client's statistics; by_dimension: max(0, 1 - D/5000) for D activations "
            "at the cut, as in the released code"
        ),
        Range(0, 1),
    ] = 0.0
    beta_g: Annotated[Share, Doc("momentum of the server's statistics")] = 0.0
    noise: Annotated[NotNegative, Doc("standard deviation of the noise on uploads")] = 0.0
    count_weighted: Annotated[
        bool, Doc("weight statistics by label counts, and include the variance between clients")
    ] = False

    presets = {
        "official": {"cap": False, "beta_m": "by_dimension"},
        "paper": {
            "ramp": 0,
            "labels": "batch",
            "draws_from": "shared",
            "spread": "variance",
            "s_max": 0.0,
            "beta_m": 0.9,
        },
    }
    neutral = {"weight": 0.0}
    tiny = {"cut": "stage1", "ramp": 1}
    needs_labels = True
    counted = ("first", "second", "count")
    tells_labels = ("count",)
    made_for = {"labels": "strong"}
    tasks = ("classification",)
    sends = "2*C*D"
    uploads = "2*C*D + (C if count_weighted else 0)"
    compute = "generated rows through the upper layers"

    def for_model(self, model: Model) -> Part:
        return self if self.cut else replace(self, cut=_default_cut(model))

    def advice(self, rounds: int) -> str:
        if not self.weight or rounds >= self.ramp:
            return ""
        last = self.weight * (rounds - 1) / self.ramp
        return (
            f"the weight of fedimpro's drawn features grows over {self.ramp} rounds, but the run "
            f"has only {rounds}, so it ends at {last:.2g} of {self.weight:g}; the authors' ramp "
            f"is half of their run, here ramp={rounds // 2}"
        )

    def describe_uploads(self, spec: Spec) -> str:
        spread = "variance" if self.spread == "variance" else "standard deviation"
        per = "of each channel " if self.stat_axes == "channel" else ""
        noise = f", with noise of {self.noise:g}" if self.noise else ""
        also = ", and how many samples of each class the client has" * self.count_weighted
        return (
            f"sends per class a mean and a {spread} {per}of features at {self.cut}, as every "
            f"client also receives them: 2 x {spec.task.outputs} x {self._sizes(spec)[0]} numbers"
            f"{noise}{also}"
        )

    def class_means(self, spec: Spec, uploads: Tree, sent: Tree) -> ClassMeans:
        if self.count_weighted:
            means = sent["mean"] + uploads["first"] / uploads["count"][:, None].clamp_min(1)
        else:
            means = uploads["mean"]
        momentum = self._momentum(spec)
        why = "" if momentum else "at beta_m = 0, a mean is that of the last batch with the class"
        channels = self.stat_axes == "channel"
        return ClassMeans(means, self.cut, channels, sent["mean"], momentum, self.noise, why)

    def server_init(self, spec: Spec) -> Tree:
        size, _ = self._sizes(spec)
        mean = rng.uniform(spec.key, (spec.task.outputs, size), spec.dtype)
        first = torch.full_like(mean, FIRST_SCALE)
        return {"mean": mean, "scale": self._capped(self._as_spread(first * first))}

    def send(self, server: Tree) -> Tree:
        return server

    def prepare(self, v: View) -> Tree:
        return v.sent  # H_m

    def inject(self, v: View, batch: Batch) -> tuple[str, Tensor]:
        stats, labels = v.local if self.draws_from == "local" else v.sent, self._labels(v, batch)
        eps = rng.normal(v.key, (len(labels), *self._sizes(v.spec)), v.spec.dtype)
        std = torch.sqrt(stats["scale"]) if self.spread == "variance" else stats["scale"]
        return self.cut, stats["mean"][labels][..., None] + std[labels][..., None] * eps

    def cuts(self) -> tuple[str, ...]:
        return (self.cut,)

    def weigh(self, v: View, batch: Batch) -> Tensor:
        real = torch.ones_like(batch.y, dtype=v.spec.dtype)
        return real if self.mix == "sum" else real * (1 - self._weight(v))

    def term(self, v: View, params: Params, batch: Batch, out: Out) -> Tensor:
        return self._weight(v) * F.cross_entropy(out.mine.logits, self._labels(v, batch))

    def observe(self, v: View, params: Params, batch: Batch, out: Out) -> Tree:
        size, positions = self._sizes(v.spec)
        h = out.at[self.cut].reshape(len(batch.y), size, positions)
        one_hot = F.one_hot(batch.y, v.task.outputs).to(h.dtype)  # [B, C]
        count = one_hot.sum(0)[:, None] * positions  # [C, 1]
        mean = one_hot.T @ h.sum(-1) / count.clamp_min(1)  # [C, size]
        square = one_hot.T @ ((h - mean[batch.y][..., None]) ** 2).sum(-1)
        spread = self._as_spread(square / (count - 1).clamp_min(1))
        b, old = self._momentum(v.spec), v.local
        scale = self._capped(b * old["scale"] + (1 - b) * spread)
        return {
            "mean": torch.where(count > 0, b * old["mean"] + (1 - b) * mean, old["mean"]),
            "scale": torch.where(count > 1, scale, old["scale"]),
        }

    def reply(self, v: View, weights: Weights) -> tuple[Tree, Tree]:
        keys, shape = rng.split(v.key, 2), tuple(v.local["mean"].shape)
        eps = [self.noise * rng.normal(key, shape, v.spec.dtype) for key in keys]
        mean, scale = v.local["mean"] + eps[0], (v.local["scale"] + eps[1]).clamp_min(0)
        if not self.count_weighted:
            return {}, {"mean": Sum(mean), "scale": Sum(scale)}
        # first and second moments about the received mean, to avoid cancellation
        n, shift = v.label_counts[:, None], mean - v.sent["mean"]
        variance = scale if self.spread == "variance" else scale * scale
        moments = {"first": Sum(n * shift), "second": Sum(n * (variance + shift * shift))}
        return {}, moments | {"count": Sum(v.label_counts)}

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        new = self._pooled(r) if self.count_weighted else tree.scale(r.uploads, 1 / r.cohort)
        b = self.beta_g
        return weights, tree.map(lambda old, x: b * old + (1 - b) * x, r.server, new)

    def count(self, formula: str, symbols: dict[str, int]) -> int:
        """Add the symbol D, the number of statistics per class at the part's cut."""
        kind = "K" if self.stat_axes == "channel" else "D"
        return super().count(formula, symbols | {"D": symbols[f"{kind}_{self.cut}"]})

    def _sizes(self, spec: Spec) -> tuple[int, int]:
        """``(statistics per class, activations per statistic)``."""
        shape = torch.Size(spec.shapes[self.cut])
        size = shape[0] if self.stat_axes == "channel" else shape.numel()
        return size, shape.numel() // size

    def _momentum(self, spec: Spec) -> float:
        """beta_m."""
        if isinstance(self.beta_m, str):
            return max(0.0, 1 - torch.Size(spec.shapes[self.cut]).numel() / FULL_DIMENSION)
        return self.beta_m

    def _labels(self, v: View, batch: Batch) -> Tensor:
        """Labels of the drawn features; balanced: every class floor(B/C) + 1 times."""
        if self.labels == "batch":
            return batch.y
        classes = torch.arange(v.task.outputs, device=v.spec.device)
        return classes.repeat(len(batch.y) // v.task.outputs + 1)

    def _weight(self, v: View) -> Tensor:
        """Weight of the drawn features' loss in this round."""
        ramp = v.round.to(v.spec.dtype) / self.ramp if self.ramp else torch.ones_like(v.info.lr)
        return self.weight * (ramp.clamp(max=1.0) if self.cap else ramp)

    def _as_spread(self, variance: Tensor) -> Tensor:
        return variance if self.spread == "variance" else torch.sqrt(variance)

    def _capped(self, spread: Tensor) -> Tensor:
        limit = torch.zeros_like(spread) + self.s_max
        limit = limit * limit if self.spread == "variance" else limit
        return torch.where(limit > 0, torch.minimum(spread, limit), spread)

    def _pooled(self, r: Round) -> Tree:
        """Mean and scale of all samples of each class; an absent class keeps its statistics."""
        count = r.uploads["count"][:, None]
        shift = r.uploads["first"] / count.clamp_min(1)
        variance = r.uploads["second"] / count.clamp_min(1) - shift * shift
        scale = self._capped(self._as_spread(variance.clamp_min(0)))
        scale = torch.where(count > 0, scale, r.server["scale"])
        return {"mean": r.server["mean"] + shift, "scale": scale}


def _default_cut(model: Model) -> str:
    """``stage2``; in a sequential model without it, the middle cut, of two the lower one."""
    if "stage2" in model.cuts:
        return "stage2"
    net, inside = model.template, model.head_name or ""
    cuts = [cut for cut in model.cuts if not inside.startswith(f"{cut}.")]
    if not isinstance(net, nn.Sequential):
        raise IncompatibleError(
            "fedimpro cannot tell which layers of this model are the lower ones; name the last of "
            f"them, as in fedimpro(cut={cuts[0] if cuts else 'NAME'})"
        )
    while cuts and not any(True for _ in net.get_submodule(cuts[0]).parameters()):
        cuts = cuts[1:]  # a cut after it would share statistics of the inputs
    if not cuts:
        raise IncompatibleError(
            "fedimpro trains layers below and above a cut, but this model has no layer below its "
            'head; choose another --model, e.g. "mlp(hidden=[64])"'
        )
    return cuts[(len(cuts) - 1) // 2]
