"""Identities of the methods in parts/aggregation.py."""

from __future__ import annotations

from collections.abc import Iterator

from kedge.check.identities.common import LR, STEPS, A, H, run_quadratics
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import position, quadratics
from kedge.parts.aggregation import FedAvgM, FedNova


@oracle(FedNova)
def equal_steps_equal_fedavg(cls: type[FedNova]) -> Iterator[Claim]:
    yield Claim(
        "fixed point of FedAvg", position(run_quadratics("fedavg")), position(run_quadratics(cls()))
    )


@oracle(FedNova)
def unequal_steps_by_hand(cls: type[FedNova]) -> Iterator[Claim]:
    """h = (1, 10), a = (1, 1), 1 and 3 steps, p = (1/4, 3/4), from w = 0: the updates are 0.05 and
    1 - 0.5^3 = 0.875, so w = (1/4 + 3 * 3/4) (0.05/4 + 0.875/3 * 3/4) = 2.5 * 0.23125 =
    0.578125."""
    run = quadratics(H, (1.0, 1.0), LR, steps=None, copies=(1, 3)).simulate(cls())
    run.run_round()
    yield Claim("w after one round", 0.578125, position(run))


@oracle(FedAvgM)
def momentum_by_hand(cls: type[FedAvgM]) -> Iterator[Claim]:
    """FedAvg's update is d(w) = mean_k (1 - r_k)(a_k - w); momentum iterates u = beta u + d, w +=
    u."""
    beta, w, u = 0.5, 0.0, 0.0
    for _ in range(4):
        d = sum((1 - (1 - LR * h) ** STEPS) * (a - w) for h, a in zip(H, A, strict=True)) / 2
        u = beta * u + d
        w += u
    yield Claim("w after four rounds at beta = 0.5", w, position(run_quadratics(cls(beta=beta), 4)))
