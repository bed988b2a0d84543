"""Identities of the methods in parts/drift.py. FedPVR also inherits those of SCAFFOLD: where the
model is a head and nothing else, the two are the same."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kedge.check.identities.common import (
    BEST,
    LR,
    STEPS,
    A,
    H,
    close,
    cross_entropy,
    gradient,
    head,
    pair,
    picked,
    positions,
    run_quadratics,
    samples_of,
)
from kedge.check.objective import CURVATURES, OPTIMA, SIZES, blocks, client_weights, settle
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import fedavg_point, images, position, quadratics
from kedge.core import tree
from kedge.core.tree import Params
from kedge.parts.drift import FedCM, FedDC, FedPVR, FedSpeed
from kedge.sim.simulation import Simulation


@oracle(FedDC)
def drift_and_control_variates_at_the_fixed_point(cls: type[FedDC]) -> Iterator[Claim]:
    """At the fixed point no client moves, so s = 0, the h_k add up to 0, and grad f_k(w) + alpha
    h_k - s_k = 0. Every update d adds d to h_k and -d/(K lr) - s to s_k, and the s of all rounds
    add up to 0, hence s_k = -h_k/(K lr) and h_k = -grad f_k(w)/(alpha + 1/(K lr)). Detects alpha
    without its half, a correction that is lost or not sent, and a wrong K."""
    alpha = 1.0
    run = run_quadratics(cls(alpha=alpha))
    yield Claim("w at the fixed point", BEST, position(run))
    for k in range(2):
        drift = -H[k] * (BEST - A[k]) / (alpha + 1 / (STEPS * LR))
        state = {n: float(x["head.weight"][k]) for n, x in run.store.rows[cls.name].items()}
        yield Claim(f"h_{k}", drift, state["drift"])
        yield Claim(f"s_{k}", -drift / (STEPS * LR), state["slope"])
    yield Claim("s at the fixed point", 0.0, head(run.server.slots[cls.name]["slope"]))


@oracle(FedDC)
def two_rounds_of_one_step(cls: type[FedDC]) -> Iterator[Claim]:
    """From w = 0 the gradients are (0, -10): w_k = h_k = (0, 0.5), s_k = (0, -10), s = -5, and w =
    0.25 + 0.25. At w = 0.5, alpha = 1 the directions are 0.5 + 0 - 5 = -4.5 and -5 + 0.5 + 5 = 0.5,
    so w_k = (0.725, 0.475), h_k = (0.225, 0.475), s_k = (0.5, -4.5), s = -2, w = 0.6 + 0.35.
    Detects a flipped sign of h, s or s_k."""
    run = pair().simulate(cls(alpha=1.0))
    for w, drift, variates, s in (
        (0.5, (0.0, 0.5), (0.0, -10.0), -5.0),
        (0.95, (0.225, 0.475), (0.5, -4.5), -2.0),
    ):
        yield from positions(run, w)
        state = {n: x["head.weight"].flatten() for n, x in run.store.rows[cls.name].items()}
        for k in range(2):
            yield Claim(f"h_{k} at t = {run.round}", drift[k], float(state["drift"][k]))
            yield Claim(f"s_{k} at t = {run.round}", variates[k], float(state["slope"][k]))
        yield Claim(f"s at t = {run.round}", s, head(run.server.slots[cls.name]["slope"]))


@oracle(FedDC)
def two_steps_of_one_client(cls: type[FedDC]) -> Iterator[Claim]:
    """Two steps of client 1 alone at alpha = 2: 0 to 0.5, where the gradient is -5 + 2 * 0.5, to
    0.7. One client of two: h has the mean 0.35, s_1 = -0.7/(2 * 0.05) = -7, s = -3.5. Detects a
    mean over the cohort in place of all clients."""
    run = pair(2).trained(cls(alpha=2.0), clients=[1])
    yield Claim("w = w_1 + h_1 / N", 1.05, position(run))
    yield Claim("s changes by 1/N", -3.5, head(run.server.slots[cls.name]["slope"]))


@oracle(FedSpeed)
def optimum_without_ascent(cls: type[FedSpeed]) -> Iterator[Claim]:
    """At the fixed point the h_k add up to 0 and grad f_k(w) + lam h_k = 0."""
    run = run_quadratics(cls(lam=2.0, rho=0.0))
    yield Claim("w at the fixed point", BEST, position(run))
    for k in range(2):
        got = float(run.store.rows[cls.name]["head.weight"][k])
        yield Claim(f"h_{k} = -grad f_{k} / lam", -H[k] * (BEST - A[k]) / 2.0, got)


@oracle(FedSpeed)
def fixed_point_with_ascent(cls: type[FedSpeed]) -> Iterator[Claim]:
    """In one dimension the ascent step is rho times the gradient's sign, + for client 0 and - for
    client 1, so the optimum moves to a with sum h_k (w + rho sign_k - a_k) = 0: w = (10 + 9
    rho)/11. Detects a descent step, and one that is not normalised."""
    yield Claim("w at rho = 0.1", 10.9 / 11, position(run_quadratics(cls(lam=2.0, rho=0.1))))


@oracle(FedSpeed)
def two_rounds_by_hand(cls: type[FedSpeed]) -> Iterator[Claim]:
    """lam = 2, rho = 0.2. Client 0 stays at w = 0; client 1 has g = -10, g' = -12: w_k = h_k = (0,
    0.6), w = 0.3 + 0.3. At 0.6: g' = 0.8 at the point 0.8 and -6 at 0.4, lam h_k = (0, 1.2), hence
    w_k = 0.6 - 0.05 (0.8, -4.8) = (0.56, 0.84), h_k = (-0.04, 0.84), w = 0.7 + 0.4. Detects a
    flipped sign of h and a proximal term in the ascent step."""
    run = pair().simulate(cls(lam=2.0, rho=0.2))
    yield from positions(run, 0.6, 1.1)
    for k, h in enumerate((-0.04, 0.84)):
        yield Claim(f"h_{k}", h, float(run.store.rows[cls.name]["head.weight"][k]))


@oracle(FedSpeed)
def two_steps_with_merged_gradients(cls: type[FedSpeed]) -> Iterator[Claim]:
    """Client 1 alone, lam = 2, rho = 0.2, merge = 1/4: -0.75 * 10 - 0.25 * 12 = -10.5 leads to
    0.525. At that point g = -4.75, g' = -6.75, 0.75 g + 0.25 g' = -5.25, the proximal gradient is 2
    * 0.525, and w_1 = 0.525 + 0.05 * 4.2 = 0.735. One client of two adds half of its h."""
    run = pair(2).trained(cls(lam=2.0, rho=0.2, merge=0.25), clients=[1])
    yield Claim("w = w_1 + h_1 / N", 1.5 * 0.735, position(run))


@oracle(FedPVR)
def only_the_head_is_corrected(cls: type[FedPVR]) -> Iterator[Claim]:
    """After one full-batch step c_k is client k's gradient in the head. Client 0's step in the
    second round is -lr (g - c_0 + c) in the head and -lr g in the body."""
    run = images(sizes=(5, 5, 5), batch=5, steps=1).simulate(cls())
    names = set(run.bound.model.head_names())
    first = [_gradient(run, k) for k in range(3)]
    run.run_round()
    state, c = run.store.rows[cls.name], run.server.slots[cls.name]
    yield Claim("control variates outside the head", 0.0, float(len(set(c) ^ names)), 0.0)
    if not names <= set(c):
        return
    own = tree.map(lambda *g: torch.stack(g), *(picked(g, c) for g in first))
    mean = tree.map(lambda g: g.mean(0), own)
    yield close("error of c_k = grad f_k", state, own)
    yield close("error of c = mean of c_k", c, mean)
    change = _gradient(run, 0)
    change |= tree.map(lambda g, c, c_0: g + c - c_0[0], picked(change, c), mean, own)
    expected = tree.axpy(-LR, change, run.weights.params)
    run.run_round([0])
    for what, some in (("head", names), ("body", set(expected) - names)):
        found, second = (picked(w, some) for w in (run.weights.params, expected))
        yield close(f"error of the second step of the {what}", found, second)


@oracle(FedCM)
def two_rounds_with_momentum(cls: type[FedCM]) -> Iterator[Claim]:
    """From m = 0 the first directions are 0.1 g = (0, -1): w_k = (0, 0.05), w = 0.025, m = -0.5. At
    0.025 the gradients are (0.025, -9.75), the directions 0.1 g + 0.9 m are (-0.4475, -1.425), and
    w = 0.025 + 0.05 * 0.93625, m = -0.93625 = 0.1 mean g + 0.9 m. Detects a flipped sign of m, the
    factors swapped, and a first round with the whole gradient."""
    run = pair().simulate(cls(alpha=0.1))
    yield from _two_rounds(run, cls.name, (0.025, -0.5), (0.0718125, -0.93625))


@oracle(FedCM)
def two_rounds_from_the_gradient(cls: type[FedCM]) -> Iterator[Claim]:
    """``start = gradient``: the first round is FedAvg's: w_k = (0, 0.5), w = 0.25, m = -0.25/0.05,
    the mean gradient. At 0.25 the gradients are (0.25, -7.5), the directions 0.1 g + 0.9 m are
    (-4.475, -5.25), and w = 0.25 + 0.05 * 4.8625, m = -4.8625."""
    run = pair().simulate(cls(alpha=0.1, start="gradient"))
    yield from _two_rounds(run, cls.name, (0.25, -5.0), (0.493125, -4.8625))


@oracle(FedCM)
def momentum_is_divided_by_the_steps(cls: type[FedCM]) -> Iterator[Claim]:
    """h = (1, 10), a = (1, 1), 1 and 3 steps, p = (1/4, 3/4), from 0: the updates are 0.05 and 1 -
    0.5^3, their mean 0.66875, and K = 2.5, so m = -0.66875/(0.05 * 2.5) = -5.35. The server's step
    is doubled, m is not."""
    part = cls(eta_g=2.0, start="gradient")
    run = quadratics(H, (1.0, 1.0), LR, steps=None, copies=(1, 3)).trained(part)
    yield Claim("m", -5.35, head(run.server.slots[cls.name]))
    yield Claim("w", 1.3375, position(run))


def _two_rounds(run: Simulation, name: str, *expected: tuple[float, float]) -> Iterator[Claim]:
    """Claims about w and m after each round."""
    for w, m in expected:
        yield from positions(run, w)
        yield Claim(f"m at t = {run.round}", m, head(run.server.slots[name]))


@oracle(FedCM)
def fixed_point_of_fedavg_with_a_smaller_step(cls: type[FedCM]) -> Iterator[Claim]:
    """At a fixed point m = 0, so that clients take FedAvg's steps with the learning rate alpha eta.
    With 1 to 6 samples and as many steps, all clients taking part."""
    run = blocks(LR).simulate(cls(alpha=0.6))
    settle(run)
    for i, name in enumerate(("body.weight", "head.weight")):
        weights = client_weights(SIZES, "size")
        expected = fedavg_point(CURVATURES[i], OPTIMA[i], 0.6 * LR, SIZES, weights)
        yield Claim(f"{name} at alpha = 0.6", expected, float(run.weights.params[name]))


def _gradient(run: Simulation, k: int) -> Params:
    """Gradient of a client's loss on all its data at the global model."""
    return gradient(run.weights.params, cross_entropy(run, samples_of(run, k)))[1]
