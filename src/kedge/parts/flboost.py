"""Fine-tune the aggregated model on the server by data-free distillation.

FLBoost (anonymous; published in another form as FedFTG, Zhang et al. 2022).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.core import rng, tree
from kedge.core.optim import Adam
from kedge.core.part import Doc, Range, register
from kedge.core.round import Round
from kedge.core.steps import ServerView
from kedge.core.tree import Params, Tree, Weights
from kedge.parts.distil import (
    Distiller,
    Fit,
    Teams,
    allot_labels,
    client_order,
    client_shares,
    decayed_lr,
    draw_labels,
    generator_step,
    pass_key,
    student_logits,
    teacher_logits,
)
from kedge.parts.generators import diversity
from kedge.schema import Count, NotNegative, Size

# -- Limits on fine-tuning on the server, for samples of doubtful quality --------------------------


def limit_move(
    tuned: Weights, aggregated: Weights, anchor: Weights, names: Iterable[str], bound: Tensor
) -> Weights:
    """Move the tuned model back towards the aggregated one until it is within the bound.

    The bound is |tuned - aggregated| <= bound |aggregated - anchor|, with norms over the parameters
    in ``names``. Running statistics are moved back by the same factor.
    """
    base = {n: aggregated.params[n] for n in names}
    moved = tree.sq_dist(base, tuned.params).sqrt()
    limit = bound * tree.sq_dist(base, anchor.params).sqrt()
    factor = torch.where(moved > limit, limit / moved, torch.ones_like(moved))

    def shrink(start: Tensor, end: Tensor) -> Tensor:
        return start + factor * (end - start) if start.is_floating_point() else end

    params = tuned.params | tree.map(shrink, base, tuned.params)
    return Weights(params, tree.map(shrink, aggregated.buffers, tuned.buffers))


def trust(targets: Tensor, y: Tensor, share: Tensor, confidence: Tensor) -> tuple[Tensor, Tensor]:
    """Drop samples of whose label the clients are not confident.

    A sample is trusted if the clients' weighted probability of its label is at least
    ``confidence``.

    Args:
        targets: the clients' logits, ``[K, B, C]``.
        y: the labels, ``[B]``.
        share: the clients' weights for each sample, ``[K, B]``.
        confidence: a scalar.

    Returns:
        ``(share [K, B], found [])``: shares with which a mean over the batch is one over trusted
        samples, and whether there are any.
    """
    own = targets.softmax(-1).gather(-1, y.expand(len(targets), -1)[..., None])[..., 0]  # [K, B]
    mask = ((share * own).sum(0) >= confidence).to(share.dtype)  # [B]
    kept = mask.sum()
    return share * (mask * len(mask) / kept.clamp_min(1)), kept > 0


def stay_unless(condition: Tensor, new: Weights, old: Weights) -> Weights:
    """``new`` where the scalar ``condition`` holds, otherwise ``old``."""
    return tree.map(lambda a, b: torch.where(condition, a, b), new, old)


class _Game(NamedTuple):
    """Noise, labels and client weights of one iteration of the min-max game."""

    z: Tensor  # [B, d]
    y: Tensor  # [B]
    share: Tensor  # a_{k,y}, [K, B]
    key: Tensor


@register
@dataclass(frozen=True)
class FLBoost(Distiller):
    r"""Fine-tune the aggregated model on adversarially generated samples.

    :math:`\min_\omega\max_\theta E_{z, y \sim p_t}[L_{md} - \lambda_{cls}L_{cls} -
    \lambda_r L_r]` (eq. 2), :math:`L_{md} = \sum_k a_{k,y} KL(\omega_k(G) \| \omega(G))` (3),
    :math:`L_{cls} = \sum_k a_{k,y} CE(\omega_k(G), y)` (4), :math:`p_t(y) \propto \sum_k n_k^y`
    (5), :math:`a_{k,y} = n_k^y / \sum_i n_i^y` (6), :math:`L_r` keeps G(z, y) diverse.

    Anonymous, FLBoost: On-the-Fly Fine-Tuning Boosts Federated Learning via Data-Free Distillation,
    OpenReview 2021 (submission Ln5BeHxhVA3 to ICLR, withdrawn); and Zhang et al., Fine-Tuning
    Global Model via Data-Free Knowledge Distillation for Non-IID Federated Learning, CVPR 2022,
    arXiv:2203.09249.

    Deviations: the default and ``official`` are the authors' code. KL(teacher || student), divided
    by C; G maximises the L1 distance of logits, with the clients' logits detached, and takes one
    step per client (in descending order of label counts, where the code takes the cohort's order);
    labels are allotted in exact proportion to p_t; G ends in a BatchNorm, so that samples have the
    scale of normalised inputs. ``paper`` is as printed: KL(student || teacher) for both players,
    not divided by C, whose gradient also reaches G through the clients' models; one step of G on
    the sum over clients; labels drawn; no last BatchNorm. G upsamples before it convolves, as in
    the code; Table 5a has the reverse order. ``start``, ``warmup``, ``bound``, ``confidence``
    and ``student_bn=batch`` are not in the paper and off by default; they limit what poor samples
    can do. Write the part last: it fine-tunes the model that earlier parts return.
    Neutral at: steps = 0. Uploads: label counts. The server keeps G.
    """

    steps: Annotated[Size, Doc("iterations I per round")] = 10
    generator_steps: Annotated[Size, Doc("generator steps I_g per iteration")] = 1
    student_steps: Annotated[Size, Doc("global model's steps I_d per iteration")] = 5
    batch: Annotated[int, Doc("samples B per iteration"), Range(2)] = 50
    lr: Annotated[
        float | None,
        Doc("learning rate of the global model; none: the clients' rate of the round"),
        Range(0),
    ] = None
    generator_lr: Annotated[NotNegative, Doc("learning rate of the generator (Adam)")] = 0.01
    decay: Annotated[
        float,
        Doc("factor of generator_lr per round, and of lr if that is a number"),
        Range(0, 1, open=True),
    ] = 0.998
    weight_decay: Annotated[NotNegative, Doc("weight decay of the global model")] = 1e-3
    lambda_cls: Annotated[
        NotNegative, Doc("weight of L_cls, the clients' cross-entropy on samples")
    ] = 1.0
    lambda_r: Annotated[NotNegative, Doc("weight of L_r, the diversity of samples")] = 1.0
    focused: Annotated[
        bool, Doc("FocusedKD: labels follow p_t; else uniform over the present classes")
    ] = True
    attention: Annotated[
        bool, Doc("AttEnsemble: clients weighted by their samples of the class; else equally")
    ] = True
    adversarial: Annotated[
        bool, Doc("AdvLearning; else G is trained without L_md, before the global model")
    ] = True
    direction: Annotated[
        Literal["teacher_student", "student_teacher"], Doc("KL(first || second)")
    ] = "teacher_student"
    student_md: Annotated[
        Literal["kl", "mse_logits"], Doc("L_md of the global model (Table 4 tries both)")
    ] = "kl"
    generator_md: Annotated[
        Literal["kl", "mse_logits", "l1_logits"], Doc("L_md of the generator")
    ] = "l1_logits"
    class_mean: Annotated[bool, Doc("divide the global model's loss by C")] = True
    detach_teachers: Annotated[bool, Doc("no gradient of L_md through the clients' models")] = True
    cls_weights: Annotated[
        Literal["sample", "batch"], Doc("L_cls weighted by a_{k,y} per sample, or its batch mean")
    ] = "batch"
    per_client: Annotated[bool, Doc("one step of G per client, not on the sum")] = True
    labels: Annotated[
        Literal["allotted", "drawn"], Doc("exact proportions, shuffled; or independent draws")
    ] = "allotted"
    student_bn: Annotated[
        Literal["train", "batch", "frozen"],
        Doc(
            "BatchNorm of the global model: train: as usual; batch: it normalises by the samples, "
            "but keeps the clients' statistics; frozen: evaluation mode"
        ),
    ] = "train"
    level: Annotated[
        Literal["input", "feature"], Doc("feature: FLBoost-f, G generates features for the head")
    ] = "input"
    noise: Annotated[Count, Doc("dimension of z (256 for CIFAR-100)")] = 100
    width: Annotated[int, Doc("channels of the generator's first map"), Range(2)] = 128
    final_norm: Annotated[bool, Doc("images end in a BatchNorm without scale and shift")] = True
    start: Annotated[Size, Doc("first round with fine-tuning; the base alone before")] = 0
    warmup: Annotated[
        Size, Doc("rounds from start in which the generator is trained, but not the model")
    ] = 0
    bound: Annotated[
        float | None,
        Doc("largest norm of the fine-tuning, in norms of the round's update; none: no limit"),
        Range(0),
    ] = None
    confidence: Annotated[
        float | None,
        Doc("least probability of its label for the clients, for a sample to count; none: all do"),
        Range(0, 1),
    ] = None

    presets = {
        "paper": {
            "lr": 0.1,
            "direction": "student_teacher",
            "generator_md": "kl",
            "class_mean": False,
            "detach_teachers": False,
            "cls_weights": "sample",
            "per_client": False,
            "labels": "drawn",
            "final_norm": False,
        },
        "official": {
            "generator_md": "l1_logits",
            "class_mean": True,
            "detach_teachers": True,
            "cls_weights": "batch",
            "per_client": True,
        },
        "cifar100": {"noise": 256},
        "mse": {
            "lr": 0.1,
            "student_md": "mse_logits",
            "generator_md": "mse_logits",
            "class_mean": False,
            "detach_teachers": False,
            "cls_weights": "sample",
            "per_client": False,
        },
    }
    neutral = {"steps": 0}
    tiny = {"steps": 2, "student_steps": 2, "batch": 6, "noise": 3, "width": 4}
    aim = "fine-tune"

    def advice(self, rounds: int) -> str:
        first = self.start + self.warmup
        if first < rounds:
            return ""
        return (
            f"flboost fine-tunes from round {first} on (start + warmup), but the run has only "
            f"{rounds}, so the model is its base's; lower start or warmup"
        )

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        # not a phase: the clients' steps are the same in all rounds and need no second capture
        if r.round < self.start:
            return weights, r.server
        trains_student = r.round >= self.start + self.warmup
        aggregated = weights
        counts = r.uploads["counts"]  # [K, C]
        share = self._ensemble(counts)
        z, y = self._draw(r.key, counts.sum(0), r.spec.dtype)
        keys = rng.split(rng.fold(r.key, "pass"), self.steps)
        games = [_Game(z[i], y[i], share[:, y[i]], keys[i]) for i in range(self.steps)]
        first = Weights(**r.server)
        fit = Fit(first, Adam().init(first.params))
        order = client_order(counts) if self.per_client else None
        teams = self._teams(r, order, joined=self.adversarial and r.stacks_all)
        for game in games:
            fit = self._train_generator(r, weights, fit, teams, game)
            if self.adversarial and trains_student:
                weights = self._train_student(r, weights, fit.generator, teams.teachers, game)
        if not self.adversarial and trains_student:
            for game in games:
                weights = self._train_student(r, weights, fit.generator, teams.teachers, game)
        if self.bound is not None:
            names, bound = self._tuned_names(r.spec), counts.new_full((), self.bound)
            weights = limit_move(weights, aggregated, r.anchor, names, bound)
        return r.keep(weights), r.keep(fit.generator)._asdict()

    def _ensemble(self, counts: Tensor) -> Tensor:
        """a_{k,y}, ``[K, C]``: sums to 1 over the clients for every present class."""
        return client_shares(counts if self.attention else torch.ones_like(counts))

    def _draw(self, key: Tensor, counts: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Noise ``[I, B, d]`` and labels ``[I, B]``; a class without samples is never drawn."""
        key_z, key_y = rng.split(key, 2)
        number, shape = self.steps * self.batch, (self.steps, self.batch)
        z = rng.normal(key_z, (*shape, self.noise), dtype)
        counts = counts.round().to(torch.int64)  # proportional to p_t
        counts = counts if self.focused else (counts > 0).to(torch.int64)
        sample = draw_labels if self.labels == "drawn" else allot_labels
        return z, sample(key_y, counts, number).reshape(shape)

    def _train_generator(
        self, r: Round, student: Weights, fit: Fit, teams: Teams, game: _Game
    ) -> Fit:
        given = {"game": game, "lr": decayed_lr(r, self.generator_lr, self.decay)}
        joined = self._joined(r, teams, student)
        if joined is None:
            given["student"] = student
        xs = {"models": joined or teams.taken, "share": game.share[teams.rows]}
        for _ in range(self.generator_steps):
            fit = r.iterate(self._generator_step, fit, xs, given, borrow=True)
        return fit

    def _generator_step(self, s: ServerView, given: Tree, fit: Fit, x: Tree) -> Fit:
        game: _Game = given["game"]
        rest = given.get("student"), x["models"], game._replace(share=x["share"]), len(game.share)
        return generator_step(s, lambda g: self._generator_loss(g, s, *rest), fit, given["lr"])

    def _generator_loss(
        self,
        generator: Weights,
        s: ServerView,
        student: Weights | None,
        teachers: Weights,
        game: _Game,
        cohort: int,
    ) -> tuple[Tensor, Params]:
        """-L_md + lambda_cls L_cls + lambda_r L_r over the teachers, and G's next buffers.

        For None, the student is the last of the teachers.
        """
        x, buffers = self._prepared_generator(s)(generator, game.z, game.y, train=True)
        every = teacher_logits(s, self.level, teachers, x)  # [K, B, C]
        targets = every if student is not None else every[:-1]
        labels = game.y.expand(len(targets), -1)
        ce = F.cross_entropy(targets.movedim(-1, 1), labels, reduction="none")  # [K, B]
        if self.cls_weights == "sample":
            cls = (game.share * ce).sum(0).mean()
        else:
            cls = (game.share.mean(1) * ce.mean(1)).sum()
        portion = len(targets) / cohort  # L_r is divided among the clients' steps
        loss = self.lambda_cls * cls + self.lambda_r * portion * diversity(game.z, x)
        if self.adversarial:
            targets = targets.detach() if self.detach_teachers else targets
            logits = every[-1]
            if student is not None:
                logits, _ = student_logits(s, self.level, student, x, "eval")
            loss = loss - self._discrepancy(s, self.generator_md, targets, logits, game.share)
        return loss, buffers

    def _train_student(
        self, r: Round, weights: Weights, generator: Weights, teachers: Weights, game: _Game
    ) -> Weights:
        taught = {"generator": generator, "teachers": teachers, "game": game}
        lr = decayed_lr(r, r.lr, 1.0) if self.lr is None else decayed_lr(r, self.lr, self.decay)
        given = {"lesson": r.apply(self._lesson, taught, borrow=True), "key": game.key, "lr": lr}
        steps = {"step": torch.arange(self.student_steps, device=game.key.device)}
        return r.iterate(self._student_step, weights, steps, given, borrow=True)

    def _lesson(self, s: ServerView, given: Tree) -> Tree:
        """Samples and the clients' logits on them, which are constant over the student's steps."""
        game: _Game = given["game"]
        x, _ = self._prepared_generator(s)(given["generator"], game.z, game.y, train=False)
        targets = teacher_logits(s, self.level, given["teachers"], x)
        if self.confidence is None:
            return {"x": x, "targets": targets, "share": game.share}
        least = game.share.new_full((), self.confidence)
        share, found = trust(targets, game.y, game.share, least)
        return {"x": x, "targets": targets, "share": share, "found": found}

    def _student_step(self, s: ServerView, given: Tree, weights: Weights, x: Tree) -> Weights:
        lesson, key = given["lesson"], pass_key(s, given["key"], x["step"])
        new = self._descend(s, weights, given["lr"], lesson, key)
        return stay_unless(lesson["found"], new, weights) if "found" in lesson else new

    def _student_forward(
        self, student: Weights, s: ServerView, x: Tensor, key: Tensor | None
    ) -> tuple[Tensor, Params]:
        if self.student_bn != "batch":
            return super()._student_forward(student, s, x, key)
        return student_logits(s, self.level, student, x, "probe", key)

    def _student_loss(
        self, student: Weights, s: ServerView, lesson: Tree, key: Tensor | None
    ) -> tuple[Tensor, Params]:
        """L_md and the global model's next buffers."""
        logits, buffers = self._student_forward(student, s, lesson["x"], key)
        targets, share = lesson["targets"], lesson["share"]
        loss = self._discrepancy(s, self.student_md, targets, logits, share)
        return loss / (s.task.outputs if self.class_mean else 1), buffers

    def _discrepancy(
        self, s: ServerView, measure: str, teachers: Tensor, student: Tensor, share: Tensor
    ) -> Tensor:
        """L_md: the mean over samples of the clients' weighted divergences."""
        if measure == "kl":
            pair = (teachers, student)
            loss = s.task.divergence(*(pair if self.direction == "teacher_student" else pair[::-1]))
        else:
            diff = student - teachers  # [K, B, C]
            loss = (diff.abs() if measure == "l1_logits" else diff.square()).mean(-1)
        return (share * loss).sum(0).mean()  # loss [K, B]
