"""Methods that distil with samples from a generator on the server.

FedGen (Zhu et al. 2021), FedDF (Lin et al. 2020).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.core import rng, tree
from kedge.core.optim import Adam
from kedge.core.part import Doc, Out, Range, register
from kedge.core.round import Round
from kedge.core.steps import ServerView
from kedge.core.task import Batch
from kedge.core.tree import Params, Tree, Weights
from kedge.core.view import Spec, View
from kedge.errors import FieldError
from kedge.parts.distil import (
    Distiller,
    Draws,
    Fit,
    Taught,
    allot_labels,
    client_shares,
    decayed_lr,
    draw_labels,
    generator_step,
    pass_key,
    teacher_logits,
)
from kedge.parts.generators import diversity
from kedge.schema import Count, NotNegative, Size

_FLBOOST = {
    "generator_lr": 0.01,
    "decay": 0.998,
    "weight_decay": 1e-3,
    "batch": 50,
    "keep_moments": False,
    "prior": "normal",
    "noise": 100,
    "width": 128,
}


@register
@dataclass(frozen=True)
class FedGen(Taught):
    r"""Train clients also on samples of a generator that the server fits to all client models.

    Server: :math:`\min_\theta E_{y, z} \sum_k a_{k,y} CE(h_k(G(z, y)), y) + \eta L_{div}` (eq. 4,
    with the diversity of section 3.4), :math:`a_{k,y} = n_k^y/\sum_i n_i^y`, y uniform over those
    in the cohort. Client: :math:`CE(x, y) + \alpha_t \frac{B'}{B} CE(h(G(z', y')), y') + \beta_t
    KL(h(G(z, y)) \| f(x))` (eq. 5), y' uniform, :math:`h(G(z, y))` a constant, from the second
    round on; :math:`\alpha_t = \max(\alpha \cdot 0.98^t, 10^{-4})`, and :math:`\beta_t` likewise.

    Zhu, Hong and Zhou, Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML
    2021, arXiv:2105.10056.

    ``level = input`` is FedGen* of FLBoost's tables: G generates images, and h is the whole model.
    Deviations: a, alpha_t, beta_t, B'/B and the divergence follow the authors' code; the paper
    averages the clients' logits and uses plain losses. Label counts cover the client's data, not
    the batches it used. G is FLBoost's network (Table 5b, or 5a for images), one layer deeper for
    features. Generated samples are used in all local epochs (the code stops after 20) and do not
    update BatchNorm's running statistics. Neutral at: alpha = beta = 0. Sends: G. Uploads: label
    counts.
    """

    alpha: Annotated[NotNegative, Doc("initial weight of the generated samples' loss")] = 10.0
    beta: Annotated[NotNegative, Doc("initial weight of the divergence")] = 10.0
    fade: Annotated[float, Doc("factor of both weights per round"), Range(0, 1, open=True)] = 0.98
    floor: Annotated[NotNegative, Doc("smallest value of both weights")] = 1e-4
    rows: Annotated[Size, Doc("generated samples B' per local step; 0: the batch size")] = 0
    steps: Annotated[Size, Doc("generator steps per round (Adam)")] = 50
    batch: Annotated[int, Doc("samples per generator step"), Range(2)] = 32
    generator_lr: Annotated[NotNegative, Doc("learning rate of the generator")] = 3e-4
    decay: Annotated[float, Doc("factor of generator_lr per round"), Range(0, 1, open=True)] = 0.98
    weight_decay: Annotated[NotNegative, Doc("weight decay of the generator")] = 1e-2
    eta: Annotated[NotNegative, Doc("weight of L_div, the diversity of samples")] = 1.0
    keep_moments: Annotated[bool, Doc("keep Adam's moments between rounds")] = True
    prior: Annotated[
        Literal["uniform", "normal"], Doc("noise z: uniform on [0, 1), or standard normal")
    ] = "uniform"
    level: Annotated[
        Literal["feature", "input"], Doc("what G generates; input: images (FedGen*)")
    ] = "feature"
    noise: Annotated[Count, Doc("dimension of z")] = 32
    width: Annotated[
        Size,
        Doc(
            "channels of the image generator's first map; a 64th of the feature generator's hidden "
            "size; 0: 128 or 8 (512 hidden units)"
        ),
    ] = 0
    final_norm: Annotated[bool, Doc("images end in a BatchNorm without scale and shift")] = True

    presets = {
        "emnist": {"generator_lr": 1e-4, "beta": 1.0},
        "flboost": _FLBOOST,
        "star": _FLBOOST | {"level": "input"},
    }
    neutral = {"alpha": 0.0, "beta": 0.0}
    tiny = {"steps": 2, "batch": 6, "noise": 3, "width": 2}
    sends = "G"
    compute = "a pass of generated samples; a generator on the server"

    def server_init(self, spec: Spec) -> Tree:
        if self.width == 1:
            raise FieldError(f"{self.name}.width = 1 leaves no room for the label; write 2 or more")
        if self.level == "feature":
            spec.model.require_head(self.name)
        generator = self._generator(spec)
        generator.in_layout(spec.model.layout)  # built now: the first pass may be inside a trace
        first = generator.init(spec.key, spec.dtype, spec.device)
        moments = {"moments": Adam().init(first.params)} if self.keep_moments else {}
        return {"generator": first._asdict()} | moments

    def phase(self, round: int) -> str:
        return "first" if round == 0 else "later"

    def send(self, server: Tree) -> Tree:
        return server["generator"]

    def term(self, v: View, params: Params, batch: Batch, out: Out) -> Tensor:
        if v.phase == "first":  # G is untrained
            return out.logits.new_zeros(())
        size, (key_y, key_other, key_same) = len(batch.x), rng.split(v.key, 3)
        rows = self.rows or size
        labels = rng.integers(key_y, (rows,), v.task.outputs)  # y'
        ce = F.cross_entropy(self._generated_logits(v, params, key_other, labels), labels)
        target = self._generated_logits(v, params, key_same, batch.y).detach()
        divergence = v.task.divergence(target, out.logits).mean()
        alpha, beta = self._weight(v, self.alpha), self._weight(v, self.beta)
        return alpha * (rows / size) * ce + beta * divergence

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        counts = r.uploads["counts"]  # [K, C]
        generator = Weights(**r.server["generator"])
        moments = r.server["moments"] if self.keep_moments else Adam().init(generator.params)
        given = {
            "teachers": self._teachers(r),
            "share": self._ensemble(counts),
            "present": (counts.sum(0) > 0).to(torch.int64),
            "lr": decayed_lr(r, self.generator_lr, self.decay),
        }
        keys = rng.fold(r.key, torch.arange(self.steps, device=r.key.device))  # [steps, 2]
        fit = r.iterate(self._generator_step, Fit(generator, moments), {"key": keys}, given)
        optimizer = {"moments": fit.moments} if self.keep_moments else {}
        return weights, {"generator": fit.generator._asdict()} | optimizer

    def _ensemble(self, counts: Tensor) -> Tensor:
        """a_{k,y}, ``[K, C]``: sums to 1 over the clients for every present class."""
        return client_shares(counts)

    def _generator_step(self, s: ServerView, given: Tree, fit: Fit, x: Tree) -> Fit:
        key_y, key_z = rng.split(x["key"], 2)
        y = draw_labels(key_y, given["present"], self.batch)
        z, share = self._noise(key_z, self.batch, s.spec), given["share"][:, y]
        rest = given["teachers"], z, y, share

        def loss(generator: Weights) -> tuple[Tensor, Params]:
            return self._generator_loss(generator, s, *rest)

        return generator_step(s, loss, fit, given["lr"], self.weight_decay)

    def count(self, formula: str, symbols: dict[str, int]) -> int:
        """Add the symbol G, the size of the generator.

        Images are assumed square, with one channel or three.
        """
        shape: tuple[int, ...] = (symbols["F"],)
        if self.level == "input":
            channels = 1 if math.isqrt(symbols["X"]) ** 2 == symbols["X"] else 3
            shape = (channels, *2 * (math.isqrt(symbols["X"] // channels),))
        meta = torch.device("meta")  # shapes without memory
        net = self._build(shape, symbols["C"])
        size = tree.numel(net.init(rng.key(0, meta), torch.float32, meta))
        return super().count(formula, symbols | {"G": size})

    def _generator_loss(
        self, own: Weights, s: ServerView, teachers: Weights, z: Tensor, y: Tensor, share: Tensor
    ) -> tuple[Tensor, Params]:
        """sum_k a_{k,y} CE + eta L_div, and G's next buffers."""
        x, buffers = self._prepared_generator(s)(own, z, y, train=True)
        logits = teacher_logits(s, self.level, teachers, x)  # [K, B, C]
        labels = y.expand(len(logits), -1)
        ce = F.cross_entropy(logits.movedim(-1, 1), labels, reduction="none")  # [K, B]
        return (share * ce).sum(0).mean() + self.eta * diversity(z, x), buffers

    def _generated_logits(self, v: View, params: Params, key: Tensor, labels: Tensor) -> Tensor:
        """Logits ``[B, C]`` of the local model on samples generated for ``labels``."""
        z = self._noise(key, len(labels), v.spec)
        generate = self._generator(v.spec).in_layout(v.spec.model.layout)
        x = generate(Weights(**v.sent), z, labels, train=False)[0]
        return v.head(params, x) if self.level == "feature" else v.forward(params, x).logits

    def _weight(self, v: View, first: float) -> Tensor:
        """The weight ``max(first * fade**round, floor)`` of this round; 0 stays 0."""
        initial = torch.zeros_like(v.info.lr) + first
        weight = initial * self.fade ** v.round.to(v.spec.dtype)
        return torch.where(initial > 0, weight.clamp_min(self.floor), 0.0)

    def _noise(self, key: Tensor, rows: int, spec: Spec) -> Tensor:
        draw = rng.uniform if self.prior == "uniform" else rng.normal
        return draw(key, (rows, self.noise), spec.dtype)

    def _stored_generator(self, server: Tree) -> Weights:
        return Weights(**server["generator"])


@register
@dataclass(frozen=True)
class FedDF(Distiller):
    r"""Distil the clients' models into their average, on generated images.

    :math:`\min_\omega KL(\frac{1}{|S|}\sum_{k \in S} softmax(\omega_k(x)) \| softmax(\omega(x)))`
    starting from the average (algorithm 1), for x = G(z, y). First G minimises
    :math:`\frac{1}{|S|}\sum_k CE(\omega_k(G(z, y)), y) + \eta L_{div}`; labels are allotted in
    proportion to the cohort's label counts.

    Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS 2020,
    arXiv:2006.07242.

    Deviations: this is the data-free variant of FLBoost's comparison (its authors' later code);
    the paper uses unlabelled data or a pretrained generator. As in that code, the target averages
    softmaxes (the paper averages logits), the student takes 20 SGD steps, and the global model's
    BatchNorm runs in training mode on generated images; ``student_bn = frozen`` fine-tunes in
    evaluation mode. Write the part last: it fine-tunes the model that earlier parts return. Neutral
    at: student_steps = 0. Uploads: label counts. The server keeps G.
    """

    generator_steps: Annotated[Size, Doc("generator steps per round (Adam)")] = 50
    student_steps: Annotated[Size, Doc("global model's steps per round (SGD)")] = 20
    batch: Annotated[int, Doc("samples per step"), Range(2)] = 50
    lr: Annotated[NotNegative, Doc("learning rate of the global model")] = 0.1
    generator_lr: Annotated[NotNegative, Doc("learning rate of the generator")] = 0.01
    decay: Annotated[
        float, Doc("factor of both learning rates per round"), Range(0, 1, open=True)
    ] = 0.998
    weight_decay: Annotated[NotNegative, Doc("weight decay of both models")] = 1e-3
    eta: Annotated[NotNegative, Doc("weight of L_div, the diversity of samples")] = 1.0
    student_bn: Annotated[
        Literal["train", "frozen"], Doc("frozen: fine-tune the global model in evaluation mode")
    ] = "train"
    level: Annotated[
        Literal["input", "feature"], Doc("feature: G generates features, only the head is tuned")
    ] = "input"
    noise: Annotated[Count, Doc("dimension of z (256 for CIFAR-100)")] = 100
    width: Annotated[int, Doc("channels of the generator's first map"), Range(2)] = 128
    final_norm: Annotated[bool, Doc("images end in a BatchNorm without scale and shift")] = True

    presets = {"flboost": {"generator_steps": 50, "student_steps": 20}, "cifar100": {"noise": 256}}
    neutral = {"student_steps": 0}
    tiny = {"generator_steps": 2, "student_steps": 2, "batch": 6, "noise": 3, "width": 4}
    aim = "distil into"

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        counts = r.uploads["counts"].sum(0).round().to(torch.int64)  # [C]
        generator = self._train_generator(r, Weights(**r.server), counts)
        return self._train_student(r, weights, generator, counts), generator._asdict()

    def _train_generator(self, r: Round, generator: Weights, counts: Tensor) -> Weights:
        lr = decayed_lr(r, self.generator_lr, self.decay)
        given = {"teachers": self._teachers(r), "lr": lr}
        draws = self._draws(r, "generator", self.generator_steps, counts)
        first = Fit(generator, Adam().init(generator.params))
        return r.iterate(self._generator_step, first, draws, given).generator

    def _generator_step(self, s: ServerView, given: Tree, fit: Fit, x: Draws) -> Fit:
        def loss(generator: Weights) -> tuple[Tensor, Params]:
            return self._generator_loss(generator, s, given["teachers"], *x)

        return generator_step(s, loss, fit, given["lr"], self.weight_decay)

    def _generator_loss(
        self, generator: Weights, s: ServerView, teachers: Weights, z: Tensor, y: Tensor
    ) -> tuple[Tensor, Params]:
        """The clients' mean cross-entropy + eta L_div, and G's next buffers."""
        x, buffers = self._prepared_generator(s)(generator, z, y, train=True)
        logits = teacher_logits(s, self.level, teachers, x)  # [K, B, C]
        ce = F.cross_entropy(logits.flatten(0, 1), y.repeat(len(logits)))
        return ce + self.eta * diversity(z, x), buffers

    def _train_student(
        self, r: Round, weights: Weights, generator: Weights, counts: Tensor
    ) -> Weights:
        lr, key = decayed_lr(r, self.lr, self.decay), rng.fold(r.key, "pass")
        given = {"teachers": self._teachers(r), "generator": generator, "lr": lr, "key": key}
        draws = self._draws(r, "student", self.student_steps, counts)._asdict()
        draws["step"] = torch.arange(self.student_steps, device=key.device)
        return r.iterate(self._student_step, weights, draws, given)

    def _student_step(self, s: ServerView, given: Tree, weights: Weights, draw: Tree) -> Weights:
        x, _ = self._prepared_generator(s)(given["generator"], draw["z"], draw["y"], train=False)
        mean = self._ensemble(teacher_logits(s, self.level, given["teachers"], x))
        key = pass_key(s, given["key"], draw["step"])
        return self._descend(s, weights, given["lr"], x, mean, key)

    def _ensemble(self, logits: Tensor) -> Tensor:
        """Log of the mean softmax ``[B, C]`` of K clients' logits ``[K, B, C]``."""
        return torch.logsumexp(F.log_softmax(logits, -1), 0) - math.log(len(logits))

    def _student_loss(
        self, student: Weights, s: ServerView, x: Tensor, mean: Tensor, key: Tensor | None
    ) -> tuple[Tensor, Params]:
        """KL(mean softmax || student), and the global model's next buffers."""
        logits, buffers = self._student_forward(student, s, x, key)
        return s.task.divergence(mean, logits).mean(), buffers

    def _draws(self, r: Round, player: str, steps: int, counts: Tensor) -> Draws:
        """Noise and labels of every step of ``"generator"`` or ``"student"``."""
        key_z, key_y = rng.split(rng.fold(r.key, player), 2)
        z = rng.normal(key_z, (steps, self.batch, self.noise), r.spec.dtype)
        y = allot_labels(key_y, counts, steps * self.batch).reshape(steps, self.batch)
        return Draws(z, y)
