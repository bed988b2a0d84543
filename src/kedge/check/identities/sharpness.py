"""Identities of the methods in parts/sharpness.py."""

from __future__ import annotations

from collections.abc import Iterator

from kedge.check.identities.common import LR
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import position, quadratics
from kedge.parts.sharpness import FedSAM


@oracle(FedSAM)
def one_step_by_hand(cls: type[FedSAM]) -> Iterator[Claim]:
    """f = 10 (w - 1)^2/2 at w = 0: g = -10, the worst point is -rho, its gradient -10 (1 + rho), so
    one step of 0.05 leads to 0.5 (1 + rho)."""
    run = quadratics((10.0,), (1.0,), LR, steps=1).simulate(cls(rho=0.2))
    run.run_round()
    yield Claim("w after one step at rho = 0.2", 0.6, position(run))
