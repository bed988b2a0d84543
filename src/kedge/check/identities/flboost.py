"""Identities of FLBoost.

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

from kedge.check.identities.two_linear import COUNTS, linear_clients, server_round_of
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import DOUBLE
from kedge.core import rng, tree
from kedge.core.optim import SGD
from kedge.core.round import Round
from kedge.core.tree import Params, Weights
from kedge.parts.flboost import FLBoost
from kedge.parts.generators import diversity

SMALL: dict[str, Any] = {"batch": 6, "noise": 3, "width": 4}
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
    a = cls()._ensemble(COUNTS)
    expected = torch.tensor([[0.75, 0.25, 0.0], [0.25, 0.75, 0.0]], dtype=DOUBLE)
    yield Claim("error of a_{k,y}", 0.0, _gap(a, expected), 0.0)
    plain = cls(attention=False)._ensemble(COUNTS)
    yield Claim(
        "error of the uniform weights without attention",
        0.0,
        _gap(plain, torch.full_like(plain, 0.5)),
        0.0,
    )


@oracle(FLBoost)
def label_proportions(cls: type[FLBoost]) -> Iterator[Claim]:
    """n = (8, 4, 0) and 2 x 7 labels: the quotas 9 1/3, 4 2/3 are rounded to 9, 5, 0. Unfocused,
    the present classes have equal quotas: 7, 7, 0."""
    part = cls(steps=2, batch=7)
    for what, one, expected in (
        ("focused", part, (9, 5, 0)),
        ("unfocused", cls(steps=2, batch=7, focused=False), (7, 7, 0)),
    ):
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
        direction, divisor = part.direction, 3 if part.class_mean else 1
        r, weights = server_round_of(part, round=3)
        new, slot = part.server_step(r, weights)
        z, y = part._draw(r.key, COUNTS.sum(0), DOUBLE)
        x = part._generator(r.spec)(Weights(**slot), z[0], y[0], train=False)[0].flatten(1)
        a = torch.tensor([[0.75, 0.25, 0.0], [0.25, 0.75, 0.0]], dtype=DOUBLE)[:, y[0]]  # [K, B]
        w = weights.params
        log_s = torch.log_softmax(x @ w["head.weight"].T + w["head.bias"], 1)
        s, grad = log_s.exp(), torch.zeros_like(log_s)
        for k in range(2):
            c = tree.take(r.clients.params, k)
            log_t = torch.log_softmax(x @ c["head.weight"].T + c["head.bias"], 1)
            if direction == "teacher_student":
                part_k = s - log_t.exp()
            else:
                part_k = s * ((log_s - log_t) - (s * (log_s - log_t)).sum(1, keepdim=True))
            grad = grad + a[k][:, None] * part_k
        expected = {
            "head.weight": grad.T @ x / len(x) + divisor * 1e-3 * w["head.weight"],
            "head.bias": grad.mean(0) + divisor * 1e-3 * w["head.bias"],
        }
        gap = max(_gap(new.params[n], w[n] - lr * expected[n]) for n in expected)
        yield Claim(f"error of the global model after a step ({case})", 0.0, gap, 1e-13)


@oracle(FLBoost)
def learning_rate_of_the_run(cls: type[FLBoost]) -> Iterator[Claim]:
    """With lr = none and a schedule 0.05 0.5^t, four rounds equal those of lr = 0.05, decay = 0.5;
    generator_steps = 0, as decay acts on G, too. Detects the rate of the first round, and a decay
    on top of the schedule."""
    runs = []
    for options in ({"decay": 0.9}, {"decay": 0.5, "lr": 0.05}):
        part = cls(**ONE | {"generator_steps": 0}, **options)  # type: ignore[arg-type]
        problem = linear_clients()
        run = replace(problem, optim=SGD(lr=0.05, schedule="exponential(0.5)")).simulate(part)
        for _ in range(4):
            run.run_round()
        runs.append(run.weights.params)
    yield Claim("difference from the same rates as numbers", 0.0, tree.gap(*runs), 1e-14)


@oracle(FLBoost)
def generator_ascends_and_student_descends(cls: type[FLBoost]) -> Iterator[Claim]:
    """To first order, Adam's first step of size e changes every parameter by e sign(g), so the
    generator's step changes L_md by + e |g|_1, and the student's SGD step by - e |g|^2."""
    e = 1e-6
    alone: dict[str, Any] = {"lambda_cls": 0.0, "lambda_r": 0.0, "weight_decay": 0.0, "decay": 1.0}
    part = cls(**ONE | SUMMED | {"student_steps": 0}, generator_lr=e, **alone)
    r, weights = server_round_of(part)
    z, y = (drawn[0] for drawn in part._draw(r.key, COUNTS.sum(0), DOUBLE))

    def md(params: Params, student: Params, train: bool) -> Tensor:
        both = Weights(params, r.server["buffers"])
        x = part._generator(r.spec)(both, z, y, train)[0]
        return _discrepancy(r, x, y, student)

    before = r.server["params"]
    leaves = {n: p.clone().requires_grad_() for n, p in before.items()}
    first = md(leaves, weights.params, True)
    grads = torch.autograd.grad(first, list(leaves.values()))
    after = part.server_step(r, weights)[1]["params"]
    rise = float(md(after, weights.params, True) - first.detach()) / e
    yield Claim(
        "increase of L_md by the generator, normalised",
        1.0,
        rise / float(sum(g.abs().sum() for g in grads)),
        1e-3,
    )

    part = cls(**ONE | SUMMED | {"generator_steps": 0}, lr=e, **alone)
    leaves = {n: p.clone().requires_grad_() for n, p in weights.params.items()}
    first = md(before, leaves, False)
    grads = torch.autograd.grad(first, list(leaves.values()))
    new = part.server_step(r, weights)[0].params
    fall = float(md(before, new, False) - first.detach()) / e
    yield Claim(
        "decrease of L_md by the student, normalised",
        -1.0,
        fall / float(sum((g * g).sum() for g in grads)),
        1e-3,
    )


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
        gap = max(_gap(slot["params"][n], p) for n, p in expected.params.items())
        yield Claim(f"error of the generator ({case})", 0.0, gap, 1e-11)
        gap = max(_gap(slot["buffers"][n], b) for n, b in expected.buffers.items())
        yield Claim(f"error of its statistics ({case})", 0.0, gap, 1e-11)


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
    gap = tree.gap(slot, part.server_step(r, other)[1])
    yield Claim("effect of the global model on the generator", 0.0, gap, 0.0)
    still = cls(**ONE | {"steps": 2, "generator_steps": 0}, adversarial=True)
    r.server = slot
    gap = tree.gap(still.server_step(r, weights)[0], new)
    yield Claim("error of the student trained after the generator", 0.0, gap, 1e-13)


@oracle(FLBoost)
def equal_clients_equal_fedavg(cls: type[FLBoost]) -> Iterator[Claim]:
    """Two clients with the same data have the same model, which is their mean: all divergences and
    gradients are zero, and without weight decay the round equals FedAvg's. Detects a student that
    starts from last round's model."""
    part = cls(**SMALL, steps=3, student_steps=2, weight_decay=0.0)
    plain, run = (linear_clients().simulate(m) for m in ("fedavg", part))
    plain.run_round()
    run.run_round()
    gap = tree.gap(plain.weights.params, run.weights.params)
    yield Claim("difference from FedAvg's model", 0.0, gap, 1e-12)


@oracle(FLBoost)
def feature_level_trains_the_head_only(cls: type[FLBoost]) -> Iterator[Claim]:
    """FLBoost-f on a network whose only layer is the head is a linear classifier of features: a
    step with a fixed generator equals student_step_by_hand on the generated features."""
    part = cls(**ONE | {"generator_steps": 0}, level="feature", weight_decay=0.0, lr=0.1)
    r, weights = server_round_of(part)
    z, y = (drawn[0] for drawn in part._draw(r.key, COUNTS.sum(0), DOUBLE))
    x = part._generator(r.spec)(Weights(**r.server), z, y, train=False)[0]
    leaves = {n: p.clone().requires_grad_() for n, p in weights.params.items()}
    loss = _discrepancy(r, x, y, leaves)
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    expected = tree.map(lambda w, g: w - 0.1 * g / 3, weights.params, grads)  # over C = 3
    yield Claim(
        "error of the head", 0.0, tree.gap(expected, part.server_step(r, weights)[0].params), 1e-13
    )


def _discrepancy(r: Round, x: Tensor, y: Tensor, student: Params) -> Tensor:
    """Mean over samples of sum_k a_{k,y} KL(t_k || s)."""
    s = torch.log_softmax(F.linear(x.flatten(1), *student.values()), 1)
    total = torch.zeros((), dtype=DOUBLE)
    for k in range(2):
        c = tree.take(r.clients.params, k)
        t = torch.log_softmax(F.linear(x.flatten(1), c["head.weight"], c["head.bias"]), 1)
        gaps = F.kl_div(s, t, reduction="none", log_target=True).sum(1)  # KL(t || s)
        total = total + (COUNTS[k] / COUNTS.sum(0).clamp_min(1))[y] @ gaps / len(x)
    return total


def _generator_by_torch(part: FLBoost, r: Round, weights: Weights, official: bool) -> Weights:
    """The generator after its Adam steps: one on the sum over clients, or one per client."""
    z, y = (drawn[0] for drawn in part._draw(r.key, COUNTS.sum(0), DOUBLE))
    a = (COUNTS / COUNTS.sum(0).clamp_min(1))[:, y]
    leaves = {n: p.clone().requires_grad_() for n, p in r.server["params"].items()}
    buffers = r.server["buffers"]
    adam = torch.optim.Adam(leaves.values(), lr=part.generator_lr * 0.998**r.round)
    for _ in range(part.generator_steps):
        for group in ([0], [1]) if official else ([0, 1],):
            x, buffers = part._generator(r.spec)(Weights(leaves, buffers), z, y, train=True)
            flat, w = x.flatten(1), weights.params
            s = F.linear(flat, w["head.weight"], w["head.bias"])
            loss = torch.zeros((), dtype=DOUBLE)
            for k in group:
                c = tree.take(r.clients.params, k)
                t = F.linear(flat, c["head.weight"], c["head.bias"])
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
            mean = torch.zeros((), dtype=DOUBLE)
            for i in range(len(y)):
                for j in range(len(y)):
                    product = ((z[i] - z[j]) ** 2).mean() * (flat[i] - flat[j]).abs().mean()
                    mean = mean + product / len(y) ** 2
            loss = loss + 0.3 * torch.exp(-mean) * len(group) / 2
            adam.zero_grad()
            loss.backward()
            adam.step()
            buffers = tree.detach(buffers)
    return Weights(tree.detach(leaves), buffers)


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
