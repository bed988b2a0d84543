"""Identities of the methods in parts/regularisers.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.check.identities.common import (
    close,
    cross_entropy,
    descended,
    features_of,
    first_batch,
    logits_of,
    samples_of,
)
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import DOUBLE, Problem, images, linear, step_view
from kedge.core.optim import SGD
from kedge.core.part import Out, Part
from kedge.core.task import Batch
from kedge.core.tree import Params
from kedge.core.view import View
from kedge.parts.regularisers import FedDecorr, FedLC, FedNTD, FedProto, LogitAdjust


@oracle(FedNTD)
def one_sample_by_hand(cls: type[FedNTD]) -> Iterator[Claim]:
    """x = (0, log 2, log 3) of class 0. The global model has logits x, so the other two classes
    have probabilities 2/5 and 3/5; the local model has logits 0, so they have 1/2 each: KL = 0.4
    log 0.8 + 0.6 log 1.2. The derivative in a logit is tau (1/2 - p_c), and 0 for the true class.
    Detects swapped models, the true class included, a sum over classes instead of the mean over
    samples, and a missing tau^2."""
    x = torch.tensor([[0.0, math.log(2), math.log(3)]], dtype=DOUBLE)
    problem = linear(x, torch.tensor([0]), [1], torch.eye(3))
    for tau, p in ((1.0, 2 / 5), (2.0, 2**0.5 / (2**0.5 + 3**0.5))):
        part = cls(beta=3.0, tau=tau)
        v, batch = step_view(problem.simulate(part), 0, part)
        term = _term_of(part, v, batch)
        local = {"head.weight": torch.diag(torch.tensor([1.0, 0.0, 0.0], dtype=DOUBLE))}
        kl = p * math.log(2 * p) + (1 - p) * math.log(2 * (1 - p))
        yield Claim(f"term at tau = {tau:g}", 3 * tau**2 * kl, float(term(local)))
        grad = torch.func.grad(term)(local)["head.weight"]  # [class, input]
        expected = torch.cat([0 * x, 3 * tau * (0.5 - p) * x, 3 * tau * (p - 0.5) * x])
        yield close(f"error of its gradient at tau = {tau:g}", grad, expected, 1e-9)
        yield close(f"gradient of the true logit at tau = {tau:g}", grad[:1], 0 * x, 0.0)


@oracle(FedNTD)
def two_steps_by_autograd(cls: type[FedNTD]) -> Iterator[Claim]:
    """At the first step the two models are equal, and the term and its gradient are 0; the second
    step descends on CE + beta KL against the model at the start of the round."""
    run = images(sizes=(9, 9), batch=9, steps=2).simulate(cls(beta=2.0))
    start = run.weights.params

    def loss(params: Params, *, t: int) -> Tensor:
        batch = batches[t]
        local, anchor = (logits_of(run, batch.x, w) for w in (params, start))
        return F.cross_entropy(local, batch.y) + 2.0 * _untrue_divergence(local, anchor, batch.y)

    params, batches = start, [first_batch(run, 0, t) for t in range(2)]
    for t in range(2):
        params = descended(params, partial(loss, t=t))
    run.run_round([0])
    yield close("error of the model after two steps", run.weights.params, params)


@oracle(FedNTD)
def teacher_runs_in_evaluation_mode(cls: type[FedNTD]) -> Iterator[Claim]:
    """With BatchNorm the first term of a round is not 0: the model in training normalises by the
    batch, the same model as teacher by its running statistics. With eval_mode = false it is 0."""
    for eval_mode in (True, False):
        problem = images(sizes=(9, 9), batch=9, steps=1, norm="bn")
        run = problem.trained(cls(beta=2.0, eval_mode=eval_mode))
        batch = first_batch(run, 0)
        expected = 0.0
        if eval_mode:
            local = run.bound.model.forward(run.weights, batch.x, "probe").logits
            teacher = logits_of(run, batch.x)
            expected = float(2.0 * _untrue_divergence(local, teacher, batch.y))
        got = float(run.run_round([0]).losses[cls.name][0])
        yield Claim(f"first term with eval_mode = {eval_mode}", expected, got, 1e-12)


@oracle(FedDecorr)
def three_samples_by_hand(cls: type[FedDecorr]) -> Iterator[Claim]:
    """Features (1, 2, 3) and (0, 0, 3): centred and divided by their standard deviations 1 and sqrt
    3 they are (-1, 0, 1) and (-1, -1, 2)/sqrt 3, with product sqrt 3. Both off-diagonal entries
    have the square 3; divided by B = 3 that is 1. Detects a biased variance, an included diagonal
    (2 more), and a factor B."""
    part = cls(beta=0.7)
    got = _decorrelated(part, torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 3.0]], dtype=DOUBLE))
    yield Claim("term of 3 x 2 features", 0.7, got, 1e-7)


@oracle(FedDecorr)
def white_features_have_zero_loss(cls: type[FedDecorr]) -> Iterator[Claim]:
    """Orthogonal columns give 0 at any scale and shift. Two equal columns of three have (B - 1)^2
    in two of six entries, divided by B. One sample has no term."""
    white = torch.tensor([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]], dtype=DOUBLE)
    scale, shift = torch.tensor([0.1, 3.0, 40.0]), torch.tensor([1.0, -2.0, 5.0])
    part, moved, twice = cls(beta=1.0), white * scale + shift, white[:, [0, 0, 1]]
    yield Claim("term of white features", 0.0, _decorrelated(part, white), 1e-12)
    yield Claim("term of scaled and shifted features", 0.0, _decorrelated(part, moved), 1e-12)
    yield Claim("term of two equal features", 2 / 6 * 9 / 4, _decorrelated(part, twice), 1e-7)
    yield Claim("term of one sample", 0.0, _decorrelated(part, white[:1]), 0.0)


@oracle(FedDecorr)
def gradient_reaches_the_body(cls: type[FedDecorr]) -> Iterator[Claim]:
    """One full-batch step by autograd on CE + beta mean_{i != j} (B - 1)^2 corr_ij^2 / B, from
    torch.cov. Detects features detached from the body."""
    run = images(sizes=(9, 9), batch=9, steps=1).simulate(cls(beta=0.3))
    batch = first_batch(run, 0)

    def term(params: Params) -> Tensor:
        cov = torch.cov(features_of(run, batch.x, params).T)  # [6, 6]
        scale = torch.sqrt(cov.diagonal() + 1e-8)
        off = (cov / (scale[:, None] * scale))[~torch.eye(6, dtype=torch.bool)]
        return 0.3 * (8**2 * off**2).mean() / 9

    expected = descended(run.weights.params, cross_entropy(run, batch), term)
    run.run_round([0])
    yield close("error of the model after one step", run.weights.params, expected)


@oracle(FedProto)
def first_round_is_fedavg(cls: type[FedProto]) -> Iterator[Claim]:
    """There are no prototypes yet. Detects a pull towards zeros."""
    run, plain = (images().trained(m) for m in (cls(lam=5.0), "fedavg"))
    yield close("difference from FedAvg's model", run.weights, plain.weights, 0.0)


@oracle(FedProto)
def prototypes_by_hand(cls: type[FedProto]) -> Iterator[Claim]:
    """At learning rate 0 all clients have the same features: pooled over samples, a prototype is
    the mean feature of the class over all samples; over clients, the mean of the clients' means. A
    class absent from the cohort keeps its prototype."""
    for pool in ("samples", "clients"):
        part = cls(pool=pool)
        run = images(optim=SGD(lr=0.0)).trained(part)
        data = [samples_of(run, k) for k in range(3)]
        features = [features_of(run, batch.x) for batch in data]
        got = run.server.slots[cls.name]["prototypes"]
        for j in range(3):
            own = [z[b.y == j] for z, b in zip(features, data, strict=True) if (b.y == j).any()]
            every = torch.cat(own) if pool == "samples" else torch.stack([z.mean(0) for z in own])
            yield close(f"error of prototype {j}, mean over {pool}", got[j], every.mean(0))
        lacks = [j for j in range(3) if not (data[0].y == j).any()]
        run.run_round([0])
        after = run.server.slots[cls.name]["prototypes"]
        yield Claim("a class is absent", 1.0, float(bool(lacks)), 0.0)
        yield close("change of the absent prototype", after[lacks], got[lacks], 0.0)


@oracle(FedProto)
def prototypes_of_the_trained_model(cls: type[FedProto]) -> Iterator[Claim]:
    """With one client the next model is the client's: its prototypes are class means in evaluation
    mode at the new weights and BatchNorm statistics, not at the initial ones."""
    run = images(sizes=(5, 14), norm="bn").trained(cls(), clients=[1])
    batch = samples_of(run, 1)
    z, got = features_of(run, batch.x), run.server.slots[cls.name]["prototypes"]
    for j in batch.y.unique().tolist():
        yield close(f"error of prototype {j}", got[j], z[batch.y == j].mean(0))


@oracle(FedProto)
def one_step_by_autograd(cls: type[FedProto]) -> Iterator[Claim]:
    """One full-batch step of round 1 on CE + lam/(B F) sum ||z - C_y||^2, prototypes constant. Only
    client 0 took part in round 0, so other classes have no prototype and no term. Detects a wrong
    sign or factor, and a pull towards the zeros of missing prototypes."""
    run = images(sizes=(5, 14), batch=14, steps=1).trained(cls(lam=0.8), clients=[0])
    slot, known = run.server.slots[cls.name], set(samples_of(run, 0).y.tolist())
    batch = first_batch(run, 1)

    def term(params: Params) -> Tensor:
        total = torch.zeros((), dtype=DOUBLE)
        for z, y in zip(features_of(run, batch.x, params), batch.y, strict=True):
            if int(y) in known:
                square = ((z - slot["prototypes"][int(y)]) ** 2).sum()
                total = total + 0.8 / (len(batch.y) * 6) * square
        return total

    expected = descended(run.weights.params, cross_entropy(run, batch), term)
    run.run_round([1])
    yield Claim("a class has no prototype", 1.0, float(len(known) < 3), 0.0)
    yield close("error of the model after one step", run.weights.params, expected)


def _untrue_divergence(local: Tensor, anchor: Tensor, y: Tensor) -> Tensor:
    """Mean over samples of the KL divergence over the classes other than the true one."""
    total = torch.zeros((), dtype=DOUBLE)
    for one, other, true in zip(local, anchor, y.tolist(), strict=True):
        rest = [c for c in range(3) if c != true]
        q, p = torch.softmax(one[rest], 0), torch.softmax(other[rest], 0)
        total = total + (p * torch.log(p / q)).sum()
    return total / len(y)


def _term_of(part: FedNTD, v: View, batch: Batch) -> Callable[[Params], Tensor]:
    return lambda params: part.term(v, params, batch, v.forward(params, batch.x))


def _decorrelated(part: FedDecorr, features: Tensor) -> float:
    v, batch = step_view(images().simulate(part), 0, part)
    return float(part.term(v, {}, batch, Out(features, features, {})))


@oracle(FedLC)
def margins_by_hand(cls: type[FedLC]) -> Iterator[Claim]:
    """With 16, 1 and 81 samples the margins are tau (1/2, 1, 1/3). At zero logits the softmax is
    that of the negative margins, the loss is its mean -log over the samples, and one full-batch
    step at learning rate 1 changes the bias by class shares - softmax. Detects a flipped sign,
    another power, margins from shares instead of counts, and a margin of the true class alone."""
    for tau in (1.0, 0.3):
        q = _softmax([-tau / 2, -tau, -tau / 3])
        yield from _claims(cls(tau=tau), (16, 1, 81), q, f"tau = {tau:g}")


@oracle(FedLC)
def absent_class_gets_no_gradient(cls: type[FedLC]) -> Iterator[Claim]:
    """n = 0 has an infinite margin: the class drops out of the softmax, and its bias is
    unchanged."""
    q = _softmax([-1 / 2, -1])
    yield from _claims(cls(tau=1.0), (16, 1, 0), [*q, 0.0], "two classes of three")


@oracle(LogitAdjust)
def softmax_of_the_log_prior(cls: type[LogitAdjust]) -> Iterator[Claim]:
    """At zero logits and tau = 1 the softmax of log pi is pi: the bias gets no gradient, and the
    loss is the labels' entropy. At tau = 2 it is pi^2/sum pi^2. Detects a flipped sign, a factor,
    and the prior of another client or of all clients."""
    counts = (16, 1, 81)
    prior = [n / sum(counts) for n in counts]
    yield from _claims(cls(tau=1.0), counts, prior, "tau = 1")
    q = [p**2 / sum(p**2 for p in prior) for p in prior]
    yield from _claims(cls(tau=2.0), counts, q, "tau = 2")
    run = _biased(counts).trained(cls(tau=1.0), clients=[0])
    yield close("change of the bias", run.weights.params["head.bias"], torch.zeros(3))


@oracle(LogitAdjust)
def absent_class_drops_out(cls: type[LogitAdjust]) -> Iterator[Claim]:
    """A class with share 0 drops out of the softmax."""
    yield from _claims(cls(tau=1.0), (3, 1, 0), [0.75, 0.25, 0.0], "two classes of three")


def _claims(part: Part, counts: tuple[int, ...], q: list[float], what: str) -> Iterator[Claim]:
    """Claims about the first client's loss and one full-batch step at learning rate 1, for the
    softmax q."""
    run, total = _biased(counts).simulate(part), sum(counts)
    loss = run.run_round([0]).losses["task"][0]
    expected = -sum(n / total * math.log(p) for n, p in zip(counts, q, strict=True) if n)
    yield Claim(f"loss, {what}", expected, float(loss))
    moved = run.weights.params["head.bias"].tolist()
    for c, (n, p) in enumerate(zip(counts, q, strict=True)):
        yield Claim(f"bias of class {c}, {what}", n / total - p, moved[c])


def _softmax(logits: list[float]) -> list[float]:
    return torch.tensor(logits, dtype=DOUBLE).softmax(0).tolist()


def _biased(counts: tuple[int, ...]) -> Problem:
    """One client with the given class counts, and one with balanced classes."""
    y = torch.cat([torch.repeat_interleave(torch.tensor(counts)), torch.arange(3).repeat(4)])
    x, sizes, zeros = torch.zeros(len(y), 1), (sum(counts), 12), torch.zeros(3, 1)
    return linear(x, y, sizes, zeros, zeros[:, 0], batch=sum(counts), lr=1.0)
