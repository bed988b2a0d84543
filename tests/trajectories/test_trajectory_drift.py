"""Trajectories of methods that correct client drift.

``c.share`` is r_k: client k's weight times N over the sum of all clients' weights. The corrections
are averaged with it, so that they have the client weights of the models' average.
"""

from __future__ import annotations

from typing import Any

import pytest
from problem import ENGINES, Case, compare
from simulator import Client, FedAvg, Vector


class FedProx(FedAvg):
    mu: float

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        return super().gradient(c, w, x, target) + self.mu * (w - c.anchor)


class SCAFFOLD(FedAvg):
    eta_g: float

    def setup(self) -> None:
        self.c, self.ck = self.zero, [self.zero] * self.N

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        return super().gradient(c, w, x, target) - self.ck[c.k] + self.c

    def reply(self, c: Client) -> None:
        new = self.ck[c.k] - self.c + (c.anchor - c.w) / (c.a * c.lr)
        c.change = new - self.ck[c.k]
        self.ck[c.k] = new

    def server(self, cohort: list[Client]) -> Vector:
        self.c = self.c + sum(c.share * c.change for c in cohort) / self.N
        return self.w + self.eta_g * sum(c.p * c.delta for c in cohort)

    def server_state(self) -> dict[str, Any]:
        return {"scaffold": self.c}

    def client_state(self, k: int) -> dict[str, Any]:
        return {"scaffold": self.ck[k]}


CASES = [
    Case("fedprox", FedProx, {"mu": 0.3}),
    Case("fedprox", FedProx, {"mu": 0.3}, optim={"momentum": 0.6}),
    Case("scaffold", SCAFFOLD, {"eta_g": 0.7}, weighting="uniform"),
    Case("scaffold", SCAFFOLD, {"eta_g": 0.7}),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_drift(case: Case, engine: str) -> None:
    compare(case, engine)
