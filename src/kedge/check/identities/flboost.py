"""Identities of FLBoost, and of the limits on its fine-tuning.

Most of them play one iteration on the server with two clients chosen by hand, on the linear
classifier :math:`\\omega(x) = Wx + b` of 8x8 images, where the gradients are known in closed form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.check.identities.common import close, descended, gradient, leaves_of, linear_of
from kedge.check.identities.two_linear import (
    COUNTS,
    SHARE,
    SMALL,
    equals_fedavg,
    head_gradient,
    linear_clients,
    pairwise_diversity,
    server_round_of,
    teachers,
)
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import DOUBLE, images
from kedge.core import rng, tree
from kedge.core.optim import SGD
from kedge.core.round import Round
from kedge.core.tree import Params, Weights
from kedge.parts.flboost import FLBoost
from kedge.parts.generators import diversity

ONE: dict[str, Any] = SMALL | {"steps": 1, "generator_steps": 1, "student_steps": 1}
#: One step on the KL divergence summed over clients, with gradients through all models.
SUMMED: dict[str, Any] = {
    "generator_md": "kl",
    "class_mean": False,
    "detach_teachers": False,
    "cls_weights": "sample",
    "per_client": False,
}


@oracle(FLBoost)
def ensemble_weights(cls: type[FLBoost]) -> Iterator[Claim]:
    """n = (6, 1, 0), (2, 3, 0) gives a = (3/4, 1/4, 0), (1/4, 3/4, 0), which sum to 1 for every
    present class. Detects shares of a client's own data, 6/7 and 2/5."""
    yield close("error of a_{k,y}", cls()._ensemble(COUNTS), SHARE, 0.0)
    plain = cls(attention=False)._ensemble(COUNTS)
    half = torch.full_like(plain, 0.5)
    yield close("error of the uniform weights without attention", plain, half, 0.0)


@oracle(FLBoost)
def label_proportions(cls: type[FLBoost]) -> Iterator[Claim]:
    """n = (8, 4, 0) and 2 x 7 labels: the quotas 9 1/3, 4 2/3 are rounded to 9, 5, 0. Unfocused,
    the present classes have equal quotas: 7, 7, 0."""
    for what, focused, expected in (("focused", True, (9, 5, 0)), ("unfocused", False, (7, 7, 0))):
        one = cls(steps=2, batch=7, focused=focused)
        _, y = one._draw(rng.key(1), COUNTS.sum(0), DOUBLE)
        found = torch.bincount(y.flatten(), minlength=3).tolist()
        for c in range(3):
            yield Claim(f"{what}: samples of class {c}", expected[c], found[c], 0.0)
    _, y = cls(steps=40, batch=100, labels="drawn")._draw(rng.key(1), COUNTS.sum(0), DOUBLE)
    share = torch.bincount(y.flatten(), minlength=3) / y.numel()
    yield Claim("drawn: share of class 0", 2 / 3, float(share[0]), 0.03)
    yield Claim("drawn: share of the absent class", 0.0, float(share[2]), 0.0)


@oracle(FLBoost)
def student_step_by_hand(cls: type[FLBoost]) -> Iterator[Claim]:
    """With s and t_k the softmax of student and clients, the gradient of KL(t || s) in the logits
    is s - sum_k a_k t_k, and of KL(s || t) it is s (g - <s, g>) with g = log s - sum_k a_k log t_k;
    a step is W - eta [(1/BC) sum_b grad_b x_b' + decay W], or without 1/C. Of round 3, eta is the
    run's rate 0.05, whatever the decay, or lr 0.998^3. Detects a loss that is summed over the
    batch, not divided by C, unweighted, reversed or of the wrong sign, and a rate that is decayed
    twice or not at all."""
    cases: tuple[tuple[str, Any, float], ...] = (
        ("the run's rate", {}, 0.05 / 3),
        ("its own rate", {"lr": 0.1, "class_mean": False}, 0.1 * 0.998**3),
        ("student_teacher", {"lr": 0.1, "direction": "student_teacher"}, 0.1 * 0.998**3 / 3),
    )
    for case, options, lr in cases:
        part = cls(**ONE, **options)
        r, weights = server_round_of(part, round=3)
        new, slot = part.server_step(r, weights)
        z, y = _drawn(part, r)
        x = part._generator(r.spec)(Weights(**slot), z, y, train=False)[0].flatten(1)
        log_s = torch.log_softmax(linear_of(weights.params, x), 1)
        s, grad = log_s.exp(), torch.zeros_like(log_s)
        for k, teacher in enumerate(teachers(r)):
            log_t = torch.log_softmax(linear_of(teacher, x), 1)
            if part.direction == "teacher_student":
                part_k = s - log_t.exp()
            else:
                part_k = s * ((log_s - log_t) - (s * (log_s - log_t)).sum(1, keepdim=True))
            grad = grad + SHARE[k, y][:, None] * part_k
        decay = 1e-3 * (3 if part.class_mean else 1)
        expected = tree.axpy(-lr, head_gradient(grad, x, weights.params, decay), weights.params)
        yield close(f"error of the global model after a step ({case})", new.params, expected, 1e-13)


@oracle(FLBoost)
def learning_rate_of_the_run(cls: type[FLBoost]) -> Iterator[Claim]:
    """With lr = none and a schedule 0.05 0.5^t, four rounds equal those of lr = 0.05, decay = 0.5;
    generator_steps = 0, as decay acts on G, too. Detects the rate of the first round, and a decay
    on top of the schedule."""
    problem = replace(linear_clients(), optim=SGD(lr=0.05, schedule="exponential(0.5)"))
    own, same = (
        problem.trained(cls(**ONE | {"generator_steps": 0} | options), rounds=4).weights.params
        for options in ({"decay": 0.9}, {"decay": 0.5, "lr": 0.05})
    )
    yield close("difference from the same rates as numbers", own, same, 1e-14)


@oracle(FLBoost)
def generator_ascends_and_student_descends(cls: type[FLBoost]) -> Iterator[Claim]:
    """To first order, Adam's first step of size e changes every parameter by e sign(g), so the
    generator's step changes L_md by + e |g|_1, and the student's SGD step by - e |g|^2."""
    e = 1e-6
    alone: dict[str, Any] = {"lambda_cls": 0.0, "lambda_r": 0.0, "weight_decay": 0.0, "decay": 1.0}
    part = cls(**ONE | SUMMED | {"student_steps": 0}, generator_lr=e, **alone)
    r, weights = server_round_of(part)
    z, y = _drawn(part, r)

    def md(params: Params, student: Params, train: bool) -> Tensor:
        both = Weights(params, r.server["buffers"])
        x = part._generator(r.spec)(both, z, y, train)[0]
        return _discrepancy(r, x, y, student)

    before = r.server["params"]
    first, grads = gradient(before, lambda p: md(p, weights.params, True))
    after = part.server_step(r, weights)[1]["params"]
    rise = float(md(after, weights.params, True) - first) / e
    size = float(sum(g.abs().sum() for g in grads.values()))
    yield Claim("increase of L_md by the generator, normalised", 1.0, rise / size, 1e-3)

    part = cls(**ONE | SUMMED | {"generator_steps": 0}, lr=e, **alone)
    first, grads = gradient(weights.params, lambda p: md(before, p, False))
    new = part.server_step(r, weights)[0].params
    fall = float(md(before, new, False) - first) / e
    size = float(tree.sq_norm(grads))
    yield Claim("decrease of L_md by the student, normalised", -1.0, fall / size, 1e-3)


@oracle(FLBoost)
def generator_steps_equal_torch_adam(cls: type[FLBoost]) -> Iterator[Claim]:
    """Two steps of the generator in round 3 against torch.optim.Adam on -L_md + 0.7 L_cls + 0.3
    L_r, summed per sample and per client: the default (the authors' steps, one per client), the
    paper's, and KL(t || s) with the gradient through all models. Covers the ratio of the three
    losses, every stop-gradient, the order of the authors' steps and the decay of the rate."""
    cases: dict[str, dict[str, Any]] = {"default": {}, "paper": cls.presets["paper"]}
    for case, own in (cases | {"summed": SUMMED}).items():
        options: dict[str, Any] = {"lambda_cls": 0.7, "lambda_r": 0.3, "generator_steps": 2}
        part = cls(**ONE | {"student_steps": 0} | options | own)
        r, weights = server_round_of(part, round=3)
        slot = part.server_step(r, weights)[1]
        expected = _generator_by_torch(part, r, weights, official=case == "default")
        yield close(f"error of the generator ({case})", slot["params"], expected.params, 1e-11)
        yield close(f"error of its statistics ({case})", slot["buffers"], expected.buffers, 1e-11)


@oracle(FLBoost)
def diversity_by_hand(cls: type[FLBoost]) -> Iterator[Claim]:
    """z = (0, 0), (2, 0) have distance 4/2 = 2, x = (0, 1), (3, 0) have distance (3 + 1)/2 = 2: two
    of the four ordered pairs have the product 4, so L_r = exp(-2)."""
    z = torch.tensor([[0.0, 0.0], [2.0, 0.0]], dtype=DOUBLE)
    x = torch.tensor([[0.0, 1.0], [3.0, 0.0]], dtype=DOUBLE)
    yield Claim("L_r", 0.1353352832366127, float(diversity(z, x)))


@oracle(FLBoost)
def without_adversarial_learning(cls: type[FLBoost]) -> Iterator[Claim]:
    """Without AdvLearning the generator does not depend on the global model and is trained before
    it: two iterations are two of the generator, then two of the student."""
    part = cls(**ONE | {"steps": 2}, adversarial=False)
    r, weights = server_round_of(part)
    other = weights._replace(params=tree.scale(weights.params, -2.0))
    new, slot = part.server_step(r, weights)
    same = part.server_step(r, other)[1]
    yield close("effect of the global model on the generator", slot, same, 0.0)
    still = cls(**ONE | {"steps": 2, "generator_steps": 0}, adversarial=True)
    r.server = slot
    tuned = still.server_step(r, weights)[0]
    yield close("error of the student trained after the generator", tuned, new, 1e-13)


@oracle(FLBoost)
def equal_clients_equal_fedavg(cls: type[FLBoost]) -> Iterator[Claim]:
    """Two clients with the same data have the same model, which is their mean: all divergences and
    gradients are zero, and without weight decay the round equals FedAvg's. Detects a student that
    starts from last round's model."""
    part = cls(**SMALL, steps=3, student_steps=2, weight_decay=0.0)
    yield from equals_fedavg(part)


@oracle(FLBoost)
def feature_level_trains_the_head_only(cls: type[FLBoost]) -> Iterator[Claim]:
    """FLBoost-f on a network whose only layer is the head is a linear classifier of features: a
    step with a fixed generator equals student_step_by_hand on the generated features."""
    part = cls(**ONE | {"generator_steps": 0}, level="feature", weight_decay=0.0, lr=0.1)
    r, weights = server_round_of(part)
    z, y = _drawn(part, r)
    x = part._generator(r.spec)(Weights(**r.server), z, y, train=False)[0]
    step = descended(weights.params, lambda p: _discrepancy(r, x, y, p) / 3, lr=0.1)  # over C = 3
    yield close("error of the head", step, part.server_step(r, weights)[0].params, 1e-13)


@oracle(FLBoost)
def start_and_warmup(cls: type[FLBoost]) -> Iterator[Claim]:
    """With start = 3 and warmup = 2, round 2 changes neither player, rounds 3 and 4 train the
    generator as if there were no student's steps, and round 5 is like one without the two."""
    part = cls(**ONE, start=3, warmup=2)
    r, weights = server_round_of(part, round=2)
    new, slot = part.server_step(r, weights)
    yield close("change before the start", (new, slot), (weights, r.server), 0.0)
    waits = cls(**ONE | {"student_steps": 0})
    for round, other in ((3, waits), (4, waits), (5, cls(**ONE))):
        r, weights = server_round_of(part, round=round)
        new, slot = part.server_step(r, weights)
        yield close(f"error of round {round}", (new, slot), other.server_step(r, weights), 0.0)
    yield Claim("the student moves in round 5", 1.0, float(tree.gap(new, weights) > 1e-4), 0.0)


@oracle(FLBoost)
def bounded_fine_tuning(cls: type[FLBoost]) -> Iterator[Claim]:
    """Let d be the fine-tuning and u the round's update. A bound of |d| / 2|u| halves d, and one of
    2 |d| / |u| leaves it; 0 keeps the aggregated model. Detects norms of the weights themselves, a
    bound per leaf, and squared norms."""
    r, weights = server_round_of(cls(**ONE))
    free = tree.sub(cls(**ONE).server_step(r, weights)[0].params, weights.params)
    update = tree.sub(weights.params, r.anchor.params)
    norms = [torch.cat([x.flatten() for x in t.values()]).norm() for t in (free, update)]
    ratio = float(norms[0] / norms[1])
    for times, expected in ((0.0, 0.0), (0.5, 0.5), (2.0, 1.0)):
        new = cls(**ONE, bound=times * ratio).server_step(r, weights)[0].params
        moved, what = tree.sub(new, weights.params), f"bounded at {times} of its norm"
        yield close(f"error of a fine-tuning {what}", moved, tree.scale(free, expected), 1e-13)


@oracle(FLBoost)
def doubtful_samples_do_not_count(cls: type[FLBoost]) -> Iterator[Claim]:
    """Let q_b = sum_k a_{k,y} t_k(y) of each of six samples. With a confidence between two of them,
    the gradient is the mean over those above. Above all q_b there is no step, and no weight decay.
    Detects a mean over the batch, and clients that are not weighted."""
    part = cls(**ONE)
    r, weights = server_round_of(part)
    plain, slot = part.server_step(r, weights)
    z, y = _drawn(part, r)
    x = part._generator(r.spec)(Weights(**slot), z, y, train=False)[0].flatten(1)
    w, taught = weights.params, torch.zeros(len(y), 3, dtype=DOUBLE)
    for k, teacher in enumerate(teachers(r)):
        taught += SHARE[k, y][:, None] * torch.softmax(linear_of(teacher, x), 1)
    q = taught[torch.arange(len(y)), y]
    gaps = (torch.softmax(linear_of(w, x), 1) - taught) / 3  # over C
    ordered = q.sort().values
    for number in range(1, 6):
        confidence = float(ordered[-number - 1 :][:2].mean())
        kept = q >= confidence
        expected = tree.axpy(-0.05, head_gradient(gaps[kept], x[kept], w, 1e-3), w)
        new = cls(**ONE, confidence=confidence).server_step(r, weights)[0].params
        yield close(f"error of a step with {number} trusted samples", expected, new, 1e-13)
    none = cls(**ONE, confidence=min(1.0, float(q.max()) + 1e-6)).server_step(r, weights)[0]
    yield close("change without a trusted sample", none, weights, 0.0)
    every = cls(**ONE, confidence=0.0).server_step(r, weights)[0]
    yield close("error of a step on all samples", every, plain, 1e-13)


@oracle(FLBoost)
def statistics_of_the_clients(cls: type[FLBoost]) -> Iterator[Claim]:
    """Normalisation by the batch does not read running statistics. With a fixed generator,
    student_bn = batch therefore gives the parameters of student_bn = train, and the statistics of
    FedAvg. Detects evaluation mode, and statistics of generated images."""
    options: dict[str, Any] = SMALL | {"steps": 2, "student_steps": 2, "generator_steps": 0}
    methods = ("fedavg", cls(**options, student_bn="batch"), cls(**options, student_bn="train"))
    runs = [images(norm="bn").trained(m) for m in methods]
    plain, batch, train = (run.weights for run in runs)
    what = "difference of the parameters from those of training mode"
    yield close(what, batch.params, train.params, 0.0)
    yield close("difference of the statistics from FedAvg's", batch.buffers, plain.buffers, 0.0)
    moved = float(tree.gap(train.buffers, plain.buffers) > 1e-3)
    yield Claim("training mode moves the statistics", 1.0, moved, 0.0)


def _discrepancy(r: Round, x: Tensor, y: Tensor, student: Params) -> Tensor:
    """Mean over samples of sum_k a_{k,y} KL(t_k || s)."""
    s = torch.log_softmax(linear_of(student, x), 1)
    total = torch.zeros((), dtype=DOUBLE)
    for k, teacher in enumerate(teachers(r)):
        t = torch.log_softmax(linear_of(teacher, x), 1)
        gaps = F.kl_div(s, t, reduction="none", log_target=True).sum(1)  # KL(t || s)
        total = total + SHARE[k, y] @ gaps / len(x)
    return total


def _generator_by_torch(part: FLBoost, r: Round, weights: Weights, official: bool) -> Weights:
    """The generator after its Adam steps: one on the sum over clients, or one per client."""
    (z, y), models = _drawn(part, r), teachers(r)
    a = SHARE[:, y]
    leaves = leaves_of(r.server["params"])
    buffers = r.server["buffers"]
    adam = torch.optim.Adam(leaves.values(), lr=part.generator_lr * 0.998**r.round)
    for _ in range(part.generator_steps):
        for group in ([0], [1]) if official else ([0, 1],):
            x, buffers = part._generator(r.spec)(Weights(leaves, buffers), z, y, train=True)
            s = linear_of(weights.params, x)
            loss = torch.zeros((), dtype=DOUBLE)
            for k in group:
                t = linear_of(models[k], x)
                for b in range(len(y)):
                    p, q = torch.softmax(t[b], 0), torch.softmax(s[b], 0)
                    if official:
                        md = (s[b] - t[b].detach()).abs().mean()
                    elif part.direction == "teacher_student":
                        md = (p * (p.log() - q.log())).sum()
                    else:
                        md = (q * (q.log() - p.log())).sum()
                    share = a[k].mean() if official else a[k, b]
                    loss = loss - a[k, b] * md / len(y) - share * 0.7 * p.log()[y[b]] / len(y)
            loss = loss + 0.3 * pairwise_diversity(z, x) * len(group) / 2
            adam.zero_grad()
            loss.backward()
            adam.step()
            buffers = tree.detach(buffers)
    return Weights(tree.detach(leaves), buffers)


def _drawn(part: FLBoost, r: Round) -> tuple[Tensor, Tensor]:
    """Noise and labels of the first iteration."""
    z, y = part._draw(r.key, COUNTS.sum(0), DOUBLE)
    return z[0], y[0]
