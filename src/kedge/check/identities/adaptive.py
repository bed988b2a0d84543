"""Identities of the methods in parts/adaptive.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kedge.check.identities.common import LR, A, H, after_steps, close, moved, pair, positions
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import images, position, quadratics
from kedge.core import tree
from kedge.core.part import Part
from kedge.core.tree import Weights
from kedge.parts.adaptive import FedAdagrad, FedAdam, FedExP, FedYogi, GroupDRO


@oracle(FedAdagrad)
def two_rounds_by_hand(cls: type[FedAdagrad]) -> Iterator[Claim]:
    """lr = 0.5, tau = 0.1, no momentum. First d = 0.25 and v = 0.01 + 0.0625; then d is FedAvg's
    update at the new w, and v grows by d^2. Detects a v that starts at 0 or is forgotten."""
    first = 0.5 * 0.25 / (math.sqrt(0.0725) + 0.1)
    d = _update(first)
    second = first + 0.5 * d / (math.sqrt(0.0725 + d * d) + 0.1)
    yield from positions(pair().simulate(cls(lr=0.5, tau=0.1)), first, second)


@oracle(FedAdam)
def moments_by_hand(cls: type[FedAdam]) -> Iterator[Claim]:
    """lr = 0.5, tau = 0.1, beta = (0.8, 0.6). m = 0.2 * 0.25 and v = 0.6 * 0.01 + 0.4 * 0.0625 =
    0.031. Detects bias correction, a v that starts at 0, tau under the root, and momentum without
    its factor 1 - beta."""
    first = 0.5 * 0.05 / (math.sqrt(0.031) + 0.1)
    d = _update(first)
    m, v = 0.8 * 0.05 + 0.2 * d, 0.6 * 0.031 + 0.4 * d * d
    second = first + 0.5 * m / (math.sqrt(v) + 0.1)
    part = cls(lr=0.5, tau=0.1, beta1=0.8, beta2=0.6)
    yield from positions(pair().simulate(part), first, second)


@oracle(FedYogi)
def additive_second_moment_by_hand(cls: type[FedYogi]) -> Iterator[Claim]:
    """lr = 0.5, tau = 0.1, beta = (0.8, 0.6). v = 0.01 is below d^2 = 0.0625 and grows by 0.4 d^2,
    to 0.035; likewise in the second round. With tau = 1 it is above and shrinks: 1 - 0.025. Detects
    a flipped sign."""
    first = 0.5 * 0.05 / (math.sqrt(0.035) + 0.1)
    d = _update(first)
    assert d * d > 0.035
    m, v = 0.8 * 0.05 + 0.2 * d, 0.035 + 0.4 * d * d
    second = first + 0.5 * m / (math.sqrt(v) + 0.1)
    part = cls(lr=0.5, tau=0.1, beta1=0.8, beta2=0.6)
    yield from positions(pair().simulate(part), first, second)
    run = pair().trained(cls(lr=0.5, tau=1.0, beta1=0.8, beta2=0.6))
    yield Claim("w with v above d^2", 0.5 * 0.05 / (math.sqrt(0.975) + 1), position(run))


@oracle(FedAdagrad)
def second_moment_per_coordinate(cls: type[FedAdagrad]) -> Iterator[Claim]:
    """First round on a network, from FedAvg's update d of the same clients: v is tau^2 + d^2."""
    yield from _coordinates(cls(lr=0.3, tau=0.01), 1.0, 1.0, 1.0)


@oracle(FedAdam)
def moments_per_coordinate(cls: type[FedAdam]) -> Iterator[Claim]:
    """First round on a network, from FedAvg's update d of the same clients: m = (1 - beta1) d, v =
    beta2 tau^2 + (1 - beta2) d^2. BatchNorm statistics are FedAvg's."""
    yield from _coordinates(cls(lr=0.3, tau=0.01, beta1=0.7, beta2=0.9), 0.3, 0.9, 0.1)


@oracle(FedExP)
def server_step_size_by_hand(cls: type[FedExP]) -> Iterator[Claim]:
    """For h = 10, a step of 0.05 gives updates of a/2. For (0.5, -0.25) the mean is 0.125, the mean
    square 0.15625, and eta = 0.15625/(2 (0.015625 + S 0.001)) with S = 2, or 1 in the printed form.
    Equal updates give eta = 1, not 1/2; opposite updates cancel. Detects a missing 2, S, max,
    square or 1/M."""
    for part, s in ((cls(eps=1e-3), 2), (cls(eps=1e-3, cohort_eps=False), 1)):
        eta = 0.15625 / (2 * (0.015625 + s * 0.001))
        got = _halves(part, (1.0, -0.5))
        yield Claim(f"w for updates 0.5 and -0.25, {s} eps", 0.125 * eta, got)
    yield Claim("w for equal updates", 0.5, _halves(cls(eps=1e-3), (1.0, 1.0)))
    yield Claim("w for opposite updates", 0.0, _halves(cls(eps=1e-3), (1.0, -1.0)))


@oracle(FedExP)
def client_weights_enter_both_means(cls: type[FedExP]) -> Iterator[Claim]:
    """p = (1/4, 3/4): the mean is -0.0625, the mean square 0.0625 + 0.046875 = 0.109375."""
    eta = 0.109375 / (2 * (0.00390625 + 2 * 0.001))
    got = _halves(cls(eps=1e-3), (1.0, -0.5), copies=(1, 3))
    yield Claim("w for updates 0.5 and -0.25 of 1 and 3 samples", -0.0625 * eta, got)


@oracle(FedExP)
def norms_are_over_all_parameters(cls: type[FedExP]) -> Iterator[Claim]:
    """On a network the update is eta times FedAvg's, with norms over all parameters."""
    problem = images(sizes=(5, 9, 14))
    deltas = [moved(problem.simulate("fedavg"), [k]).params for k in range(3)]
    p = [5 / 28, 9 / 28, 14 / 28]
    mean = tree.map(lambda *d: p[0] * d[0] + p[1] * d[1] + p[2] * d[2], *deltas)
    spread = sum(q * float(tree.sq_norm(d)) for q, d in zip(p, deltas, strict=True))
    eta = max(1.0, spread / (2 * (float(tree.sq_norm(mean)) + 3 * 1e-6)))
    got = moved(problem.simulate(cls(eps=1e-6)), [0, 1, 2]).params
    yield Claim("eta is above 1", 1.0, float(eta > 1), 0.0)
    yield close("error of the update", got, tree.scale(mean, eta))


@oracle(FedExP)
def mean_of_the_last_two_iterates(cls: type[FedExP]) -> Iterator[Claim]:
    """On a network with BatchNorm the model to evaluate is the mean of the last two iterates of a
    run that does not average; after the first round it is that round's. Both train alike. Detects
    a mean with the initial model, and clients that start from the mean."""
    problem = images(sizes=(5, 9), norm="bn")
    run, plain = problem.simulate(cls()), problem.simulate(cls(average=False))
    iterates: list[Weights] = []
    yield close("first model", run.output, run.weights, 0.0)
    for t in range(1, 4):
        run.run_round()
        plain.run_round()
        iterates = [*iterates, plain.weights][-2:]
        yield close(f"iterates at t = {t}", run.weights, plain.weights, 0.0)
        yield close(f"model without mean at t = {t}", plain.output, iterates[-1], 0.0)
        mean = tree.map(_mean, iterates[0], iterates[-1])
        yield close(f"error of the model at t = {t}", run.output, mean, 1e-15)


@oracle(GroupDRO)
def high_losses_increase_the_weight(cls: type[GroupDRO]) -> Iterator[Claim]:
    """At w = 0 the losses are 0 and 5, the updates 0 and 0.5: with eta = 0.2, q = (1, e) and w =
    0.5 e/(1 + e). Later losses multiply q further. Client sizes do not matter. Detects a flipped
    sign, a forgotten q, and weights by size."""
    for copies in (None, (1, 3)):
        run = pair(copies=copies).simulate(cls(eta=0.2))
        for w in _weighted_by_losses([[0, 1]] * 3):
            run.run_round()
            yield Claim(f"w at t = {run.round}, client sizes {copies or (1, 1)}", w, position(run))
    got = position(pair().trained(cls(eta=0.2)))
    yield Claim("w at t = 1 in closed form", 0.5 * math.e / (1 + math.e), got)


@oracle(GroupDRO)
def mean_or_first_loss(cls: type[GroupDRO]) -> Iterator[Claim]:
    """Two steps of client 1 visit 0, 0.5, 0.75 with losses 5 and 1.25: the mean loss is 3.125, the
    first loss 5. Client 0 stays at 0 with loss 0. Detects the loss after the step, and a sum over
    steps."""
    for part, value in ((cls(eta=0.2), 3.125), (cls(eta=0.2, loss="first"), 5.0)):
        q = math.exp(0.2 * value)
        got = position(pair(2).trained(part))
        yield Claim(f"w with the {part.loss} loss", 0.75 * q / (1 + q), got)


@oracle(GroupDRO)
def absent_clients_keep_their_weight(cls: type[GroupDRO]) -> Iterator[Claim]:
    """The cohorts are client 1, both, client 1, both. Alone, client 1 moves w by its own update,
    for any q_1, and its loss still increases q_1; q_0 is unchanged. Detects a q that is stored
    normalised over the cohort, or that changes for absent clients."""
    run, cohorts = pair().simulate(cls(eta=0.2)), ([1], [0, 1], [1], [0, 1])
    for cohort, w in zip(cohorts, _weighted_by_losses(cohorts), strict=True):
        run.run_round(cohort)
        yield Claim(f"w at t = {run.round}", w, position(run))


def _weighted_by_losses(cohorts: Sequence[list[int]]) -> Iterator[float]:
    """w after each round of one step at eta = 0.2: log q_k grows by 0.2 times the loss."""
    w, log_q = 0.0, [0.0, 0.0]
    for cohort in cohorts:
        for k in cohort:
            log_q[k] += 0.2 * H[k] * (w - A[k]) ** 2 / 2
        q = [math.exp(log_q[k]) for k in cohort]
        d = [after_steps(k, w, 1) - w for k in cohort]
        w += sum(x * y for x, y in zip(q, d, strict=True)) / sum(q)
        yield w


def _update(w: float) -> float:
    """FedAvg's update of the standard pair in one step."""
    return sum(after_steps(k, w, 1) - w for k in range(2)) / 2


def _coordinates(part: Any, share: float, keep: float, add: float) -> Iterator[Claim]:
    """The update is lr share d / (sqrt(keep tau^2 + add d^2) + tau), per coordinate."""
    problem = images(norm="bn")
    plain, run = problem.simulate("fedavg"), problem.simulate(part)
    d, got = moved(plain).params, moved(run).params
    lr, tau = part.lr * share, part.tau
    expected = tree.map(lambda x: lr * x / (torch.sqrt(keep * tau**2 + add * x**2) + tau), d)
    yield close("error of the update", got, expected)
    yield close("error of BatchNorm statistics", run.weights.buffers, plain.weights.buffers, 0.0)


def _halves(part: Part, optima: tuple[float, ...], copies: tuple[int, ...] | None = None) -> float:
    """w after one round from 0 in which every client's update is half its optimum."""
    return position(quadratics((10.0,) * len(optima), optima, LR, 1, copies).trained(part))


def _mean(old: Tensor, new: Tensor) -> Tensor:
    return (old + new) / 2 if old.is_floating_point() else new
