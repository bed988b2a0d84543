"""Federated learning with consensus-oriented generation. FedCOG (Ye et al. 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.core import rng, tree
from kedge.core.model import InjectedRows, Mode
from kedge.core.optim import Adam
from kedge.core.part import Doc, Drawn, Out, Part, Present, Range, register
from kedge.core.task import Batch
from kedge.core.tree import Params, Tree, Weights
from kedge.core.view import Spec, View
from kedge.errors import FieldError
from kedge.schema import Count, NotNegative, Positive, Size

_BLANK_ROWS = 2  # rows of zeros fed below the cut; two, so that no mask broadcasts from one row


@register
@dataclass(frozen=True)
class FedCOG(Part):
    r"""Generate samples of classes that a client lacks, and distil the global model on them.

    Each round: :math:`\hat x = \argmin L_c(\theta^t; \hat x, y) + \lambda_{dis}\big(1 -
    JS(p(\theta^t; \hat x), p(\theta_k^{t-1}; \hat x))\big)` from noise (eqs. 1-2), by Adam; then
    :math:`w_{real} L_c(\theta) + w_{kd}\,T^2\,KL(p(\theta^t; \hat x) \| p(\theta; \hat x))` (eq. 3)
    with weights :math:`(1, \lambda_{kd})`, or, with :math:`d` the class counts and :math:`\hat d =
    \max d - d`, :math:`(|d|, |\hat d|)/(|d| + |\hat d|)` (A.3.2).

    Ye et al., Fake It Till Make It: Federated Learning with Consensus-Oriented Generation, ICLR
    2024, arXiv:2312.05966.

    Deviations: targets are rounded to exactly N, uniform over classes for a balanced client;
    distillation uses the final images with the global model's logits on them (the code pairs them
    with earlier images); without a previous model there is no disagreement (the code uses a random
    model); the previous model uses the global BatchNorm statistics; multilabel tasks (not in the
    paper) draw label vectors from the client's label frequencies and sum divergences over labels.
    Neutral at: start never reached. Keeps: the previous local model.
    """

    start: Annotated[Size, Doc("first round with generation; FedAvg before it")] = 0
    samples: Annotated[Count, Doc("generated samples per client and round, N")] = 256
    steps: Annotated[Size, Doc("steps of the generation (table 7)")] = 100
    lr: Annotated[NotNegative, Doc("learning rate of the generation")] = 0.01
    betas: Annotated[tuple[float, float], Doc("Adam's two decay rates in the generation")] = (
        0.5,
        0.9,
    )
    targets: Annotated[
        Literal["complementary", "uniform", "custom"],
        Doc(
            "classes to generate: those the client lacks (A.1.1), uniform, or by shares; for "
            "multilabel tasks: label frequencies of the client, 1/2, or shares"
        ),
    ] = "complementary"
    shares: Annotated[
        tuple[float, ...], Doc("for targets=custom: share of each class, or label probability")
    ] = ()
    lambda_dis: Annotated[NotNegative, Doc("weight of the disagreement")] = 0.1
    disagreement: Annotated[
        Literal["js", "official"],
        Doc("Jensen-Shannon (eq. 2), or the code's: KL(m || p), clamped probabilities"),
    ] = "js"
    source: Annotated[
        Literal["inputs", "generator"],
        Doc("what is optimised: the inputs, or a small generator and its noise (A.5.1)"),
    ] = "inputs"
    latent: Annotated[Count, Doc("dimension of the generator's noise")] = 256
    width: Annotated[int, Doc("channels (or units) inside the generator"), Range(2)] = 128
    cut: Annotated[
        str, Doc("generate activations at this cut, e.g. token embeddings (A.1.2); '': inputs")
    ] = ""
    weighting: Annotated[
        Literal["balanced", "lambda"],
        Doc("weights of the two losses: from the class counts (A.3.2), or 1 and lambda_kd"),
    ] = "balanced"
    lambda_kd: Annotated[NotNegative, Doc("weight of the distillation, weighting=lambda")] = 0.01
    batch: Annotated[Count, Doc("generated samples in a local step")] = 64
    temperature: Annotated[Positive, Doc("temperature of the distillation, T")] = 1.0

    presets = {
        "paper": {"start": 50, "targets": "uniform", "weighting": "lambda"},
        "official": {"start": 50, "steps": 500, "disagreement": "official"},
        "flair": {"start": 400, "weighting": "lambda"},
    }
    neutral = {"start": 1_000_000}
    tiny = {"samples": 6, "steps": 3, "batch": 4}
    needs_labels = True
    tasks = ("classification", "multilabel")
    keeps = "P + 1"
    made_for = {"labels": "strong"}
    compute = "generation, and a pass of generated data"

    def makes_inputs(self) -> bool:
        return not self.cut

    def draw_samples(self, present: Present) -> Drawn | str:
        if self.cut:
            return f"FedCOG generates activations at {self.cut}, which are not shown."
        if self.phase(present.round) == "wait":
            return (
                f"FedCOG starts to generate in round {self.start + 1}; this is round "
                f"{present.round + 1}."
            )
        local = present.prepare()
        labels = local["y"] if local["y"].ndim == 1 else None
        where = (
            "they stay on the client, which made them from the global model and its own previous "
            "one"
        )
        return Drawn(local["x"].detach(), labels, f"images generated on {present.client}", where)

    def advice(self, rounds: int) -> str:
        if self.start < rounds:
            return ""
        return (
            f"fedcog starts in round {self.start}, but the run has only {rounds}, so it is FedAvg; "
            "lower start"
        )

    def client_init(self, spec: Spec) -> Tree:
        self._check(spec)
        seen = torch.zeros((), dtype=spec.dtype, device=spec.device)
        return {"previous": tree.map(torch.clone, spec.params), "seen": seen}

    def phase(self, round: int) -> str:
        return "generate" if round >= self.start else "wait"

    def prepare(self, v: View) -> Tree:
        if v.phase == "wait":
            return {}
        key_targets, key_seeds, key_order = rng.split(v.key, 3)
        y = self._targets(v, key_targets)
        previous = Weights(v.anchor.params | v.client["previous"], v.anchor.buffers)
        lambda_dis = self.lambda_dis * v.client["seen"]

        def loss(seeds: Params) -> Tensor:
            x = self._render(v.spec, seeds)
            anchor_logits, previous_logits = (self._logits(v, w, x) for w in (v.anchor, previous))
            task_loss = v.task.loss(anchor_logits, Batch(x, y)).mean()
            divergence = self._divergence(v, anchor_logits, previous_logits)
            return task_loss + lambda_dis * (1 - divergence)

        adam, seeds = Adam(beta1=self.betas[0], beta2=self.betas[1]), self._seeds(v.spec, key_seeds)
        state, lr = adam.init(seeds), torch.as_tensor(self.lr, dtype=v.spec.dtype)
        for _ in range(self.steps):
            seeds, state = adam.update(seeds, torch.func.grad(loss)(seeds), state, lr)
        x = self._render(v.spec, seeds)
        return {"x": x, "y": y, "logits": self._logits(v, v.anchor, x), "key": key_order}

    def cuts(self) -> tuple[str, ...]:
        return (self.cut,) if self.cut else ()

    def weigh(self, v: View, batch: Batch) -> Tensor:
        one = torch.ones(len(batch.x), dtype=v.spec.dtype, device=v.spec.device)
        return one if v.phase == "wait" else self._weights(v)[0] * one

    def term(self, v: View, params: Params, batch: Batch, out: Out) -> Tensor:
        if v.phase == "wait":
            return torch.zeros((), dtype=v.spec.dtype, device=v.spec.device)
        rows = self._rows(v)
        student = self._student_logits(v, params, v.local["x"][rows])
        kl = v.task.divergence(v.local["logits"][rows], student, self.temperature).mean()
        return self._weights(v)[1] * self.temperature**2 * kl

    def reply(self, v: View, weights: Weights) -> tuple[Tree, Tree]:
        return {"previous": v.public(weights.params), "seen": torch.ones_like(v.client["seen"])}, {}

    def _check(self, spec: Spec) -> None:
        if len(self.betas) != 2:
            raise FieldError(
                f"fedcog.betas = {self.betas} must be two numbers; write e.g. betas=[0.5, 0.9]"
            )
        if self.targets == "custom":
            valid = len(self.shares) == spec.task.outputs and min(self.shares) >= 0
            if not valid or sum(self.shares) <= 0:
                raise FieldError(
                    f"fedcog.shares = {self.shares} is not valid: targets=custom needs "
                    f"{spec.task.outputs} shares, none negative and not all 0"
                )
        if self.cut and any(name.endswith("running_mean") for name in spec.buffers):
            raise FieldError(
                f"fedcog.cut = {self.cut!r} needs a model without BatchNorm, whose statistics "
                "would mix generated rows with blank ones; remove cut"
            )

    def _targets(self, v: View, key: Tensor) -> Tensor:
        """Labels ``[N]``, rounded by largest remainders; multilabel: label vectors ``[N, L]``."""
        device, dtype = v.spec.device, v.spec.dtype
        counts = v.label_counts  # [C]
        if v.task.name == "multilabel":
            probability = counts / v.info.num_examples
            if self.targets != "complementary":
                probability = torch.full_like(probability, 0.5)
            if self.targets == "custom":
                probability = torch.tensor(self.shares, dtype=dtype, device=device)
            return (rng.uniform(key, (self.samples, len(counts)), dtype) < probability).to(dtype)
        counts = counts.round().to(torch.int64)  # exact arithmetic from here on
        missing, uniform = counts.max() - counts, torch.ones_like(counts)
        target = torch.where(missing.sum() > 0, missing, uniform)  # unnormalised
        if self.targets != "complementary":
            target = uniform
        if self.targets == "custom":
            total = sum(self.shares)
            target = torch.tensor([round(1e6 * s / total) for s in self.shares], device=device)
        scaled = self.samples * target
        quota, remainder = scaled // target.sum(), scaled % target.sum()
        rank = torch.argsort(torch.argsort(-remainder, stable=True))  # 0: the largest remainder
        quota = quota + (rank < self.samples - quota.sum())
        index = torch.arange(self.samples, device=device)
        return (index[:, None] >= quota.cumsum(0)).sum(1)

    def _weights(self, v: View) -> tuple[Tensor | float, Tensor | float]:
        """Weights of the task's loss and of the distillation."""
        if self.weighting == "lambda":
            return 1.0, self.lambda_kd
        full = len(v.label_counts) * v.label_counts.max()  # |d| + |max d - d|
        real = torch.where(full > 0, v.label_counts.sum() / full.clamp_min(1), 1.0)
        return real, 1 - real

    def _rows(self, v: View) -> Tensor:
        """Indices of this step's generated samples: shuffled epochs, cut into equal batches."""
        n, size = self.samples, self.batch
        passes = math.ceil((n - math.gcd(n, size) + size) / n)  # most epochs in one batch
        start = v.step.to(torch.int64) * size
        first = start // n
        keys = [rng.fold(v.local["key"], first + i) for i in range(passes)]
        order = torch.cat([rng.permutation(key, n) for key in keys])
        return order[start - first * n + torch.arange(size, device=v.spec.device)]

    def _student_logits(self, v: View, params: Params, x: Tensor) -> Tensor:
        """Logits of the local model in training mode; BatchNorm sees these rows as one batch."""
        if not self.cut:
            return v.forward(params, x, update=True).logits
        key = rng.fold(v.key, "dropout") if v.spec.model.is_random else None
        return self._from_cut(v, Weights(params, v.anchor.buffers), x, "probe", key)

    def _logits(self, v: View, weights: Weights, x: Tensor) -> Tensor:
        """Logits of a fixed model in evaluation mode.

        Bypasses ``v.forward``, which would keep every pass of the generation alive until its end.
        """
        if self.cut:
            return self._from_cut(v, weights, x, "eval", None)
        return v.spec.model.forward(weights, x, "eval").logits

    def _from_cut(
        self, v: View, weights: Weights, x: Tensor, mode: Mode, key: Tensor | None
    ) -> Tensor:
        """Logits of activations ``x`` that enter the model at the cut."""
        shape = (_BLANK_ROWS, *v.spec.input_shape)
        blank = x.new_zeros(shape, dtype=v.spec.input_dtype)
        rows = (InjectedRows(self.name, self.cut, x),)
        return v.spec.model.forward(weights, blank, mode, key=key, rows=rows).logits[_BLANK_ROWS:]

    def _divergence(self, v: View, anchor_logits: Tensor, previous_logits: Tensor) -> Tensor:
        """Divergence of two models' outputs, averaged over the batch."""
        p, q = _log_probs(v, anchor_logits), _log_probs(v, previous_logits)
        if self.disagreement == "js":
            m = torch.logaddexp(p, q) - math.log(2)
            return 0.5 * (p.exp() * (p - m) + q.exp() * (q - m)).sum(-1).mean()
        mean = ((p.exp() + q.exp()) / 2).clamp(0.01, 0.99)
        p, q = p.exp().clamp(0.01, 0.99).log(), q.exp().clamp(0.01, 0.99).log()
        return (0.5 * mean * (2 * mean.log() - p - q)).sum(-1).mean().clamp(0, 1)

    def _shape(self, spec: Spec) -> tuple[int, ...]:
        return spec.shapes[self.cut] if self.cut else spec.input_shape

    def _seeds(self, spec: Spec, key: Tensor) -> Params:
        """Initial variables of the generation: inputs, or noise and the generator's weights."""
        shape = self._shape(spec)
        key_noise, key_layers = rng.split(key, 2)
        if self.source == "inputs":
            return {"x": rng.normal(key_noise, (self.samples, *shape), spec.dtype)}
        seeds = {"z": rng.normal(key_noise, (self.samples, self.latent), spec.dtype)}
        for i, size in enumerate(self._layers(shape)):
            scale = ((1 if i == 0 else 2) / math.prod(size[1:])) ** 0.5  # keeps the variance at 1
            noise = rng.normal(rng.fold(key_layers, i), size, spec.dtype)
            seeds |= {
                f"weight{i}": scale * noise,
                f"bias{i}": torch.zeros_like(noise.flatten(1)[:, 0]),
            }
        return seeds

    def _layers(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Shapes of the generator's weights."""
        if len(shape) != 3:
            return [(self.width, self.latent), (math.prod(shape), self.width)]
        small = math.ceil(shape[1] / 4) * math.ceil(shape[2] / 4)
        channels = (self.width, self.width, self.width // 2, shape[0])
        convs = [(channels[i + 1], channels[i], 3, 3) for i in range(3)]
        return [(self.width * small, self.latent), *convs]

    def _render(self, spec: Spec, seeds: Params) -> Tensor:
        """Samples ``[N, *shape]`` from the optimised variables.

        The generator of images is a linear layer to a quarter of the size, upsampling, and three
        3x3 convolutions; for other inputs it has two linear layers.
        """
        if self.source == "inputs":
            return seeds["x"]
        shape = self._shape(spec)
        x = F.leaky_relu(F.linear(seeds["z"], seeds["weight0"], seeds["bias0"]), 0.2)
        if len(shape) != 3:
            return F.linear(x, seeds["weight1"], seeds["bias1"]).unflatten(1, shape)
        small = (math.ceil(shape[1] / 4), math.ceil(shape[2] / 4))
        x = F.interpolate(x.unflatten(1, (self.width, *small)), size=shape[1:])
        for i in (1, 2):
            x = F.leaky_relu(F.conv2d(x, seeds[f"weight{i}"], seeds[f"bias{i}"], padding=1), 0.2)
        return F.conv2d(x, seeds["weight3"], seeds["bias3"], padding=1)


def _log_probs(v: View, logits: Tensor) -> Tensor:
    """Log-probabilities of the classes; for multilabel tasks of each label being on and off."""
    if v.task.name == "multilabel":
        return torch.cat([F.logsigmoid(logits), F.logsigmoid(-logits)], -1)
    return F.log_softmax(logits, -1)
