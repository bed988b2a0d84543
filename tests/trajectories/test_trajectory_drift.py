"""Trajectories of methods that correct client drift.

``c.share`` is r_k: client k's weight times N over the sum of all clients' weights. The corrections
are averaged with it, so that they have the client weights of the models' average. ``c.a`` is the
number of steps K, which is effective with momentum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.trajectories.problem import ENGINES, Case, by_both, compare
from tests.trajectories.simulator import Client, FedAvg, Vector


class FedProx(FedAvg):
    mu: float

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        return super().gradient(c, w, x, target) + self.mu * self.public * (w - c.anchor)


class FedDyn(FedAvg):
    alpha: float
    by_share = False

    def setup(self) -> None:
        self.h, self.g = self.zero, [self.zero] * self.N

    def alpha_of(self, c: Client) -> float:
        return self.alpha / c.share if self.by_share else self.alpha

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        proximal = self.alpha_of(c) * self.public * (w - c.anchor)
        return super().gradient(c, w, x, target) - self.g[c.k] + proximal

    def reply(self, c: Client) -> None:
        c.change = -self.alpha_of(c) * c.delta
        self.g[c.k] = self.g[c.k] + c.change

    def server(self, cohort: list[Client]) -> Vector:
        self.h = self.h + sum(c.share * c.change for c in cohort) / self.N
        return super().server(cohort) - self.h / self.alpha

    def server_state(self) -> dict[str, Any]:
        return {"feddyn": self.h}

    def client_state(self, k: int) -> dict[str, Any]:
        return {"feddyn": self.g[k]}


class SCAFFOLD(FedAvg):
    name, eta_g = "scaffold", 1.0

    def setup(self) -> None:
        self.corrected = self.public
        self.c, self.ck = self.zero, [self.zero] * self.N

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        return super().gradient(c, w, x, target) - self.ck[c.k] + self.c

    def reply(self, c: Client) -> None:
        c.change = self.corrected * (-self.c - c.delta / (c.a * c.lr))
        self.ck[c.k] = self.ck[c.k] + c.change

    def server(self, cohort: list[Client]) -> Vector:
        self.c = self.c + sum(c.share * c.change for c in cohort) / self.N
        return self.w + self.eta_g * sum(c.p * c.delta for c in cohort)

    def server_state(self) -> dict[str, Any]:
        return {self.name: self.c}

    def client_state(self, k: int) -> dict[str, Any]:
        return {self.name: self.ck[k]}


class FedPVR(SCAFFOLD):
    name, from_stage = "fedpvr", "head"

    def setup(self) -> None:
        super().setup()
        self.corrected = self.net.mask("head", self.from_stage)


class FedDC(FedAvg):
    """With ``by_share``, client k has alpha / r_k and s / r_k, and h is a plain mean."""

    alpha: float
    by_share = False

    def setup(self) -> None:
        self.s, self.sk = self.zero, [self.zero] * self.N  # control variates
        self.h, self.hk = self.zero, [self.zero] * self.N  # mean drift and drifts

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        c.r = c.share if self.by_share else 1.0
        drift = self.alpha / c.r * self.public * (w + self.hk[c.k] - c.anchor)
        return super().gradient(c, w, x, target) + drift + self.s / c.r - self.sk[c.k]

    def reply(self, c: Client) -> None:
        c.change = -self.s / c.r - c.delta / (c.a * c.lr)
        self.sk[c.k] = self.sk[c.k] + c.change
        self.hk[c.k] = self.hk[c.k] + c.delta

    def server(self, cohort: list[Client]) -> Vector:
        self.s = self.s + sum(c.share * c.change for c in cohort) / self.N
        self.h = self.h + sum(c.share / c.r * c.delta for c in cohort) / self.N
        return super().server(cohort) + self.h

    def server_state(self) -> dict[str, Any]:
        return {"feddc": {"slope": self.s, "drift": self.h}}

    def client_state(self, k: int) -> dict[str, Any]:
        return {"feddc": {"slope": self.sk[k], "drift": self.hk[k]}}


class FedSAM(FedAvg):
    rho: float

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        g = super().gradient(c, w, x, target)
        return super().gradient(c, w + self.rho * g / np.linalg.norm(g), x, target)


class FedSpeed(FedAvg):
    lam: float
    rho: float
    merge: float

    def setup(self) -> None:
        self.h, self.hk = self.zero, [self.zero] * self.N

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        g = super().gradient(c, w, x, target)
        worst = super().gradient(c, w + self.rho * g / np.linalg.norm(g), x, target)
        proximal = self.lam * self.public * (w - c.anchor + self.hk[c.k])
        return (1 - self.merge) * g + self.merge * worst + proximal

    def reply(self, c: Client) -> None:
        self.hk[c.k] = self.hk[c.k] + c.delta

    def server(self, cohort: list[Client]) -> Vector:
        self.h = self.h + sum(c.share * c.delta for c in cohort) / self.N
        return self.w + sum(c.p * c.delta for c in cohort) + self.h

    def server_state(self) -> dict[str, Any]:
        return {"fedspeed": self.h}

    def client_state(self, k: int) -> dict[str, Any]:
        return {"fedspeed": self.hk[k]}


class FedCM(FedAvg):
    alpha: float
    eta_g: float
    start = "zero"

    def setup(self) -> None:
        self.m = self.zero

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        g = super().gradient(c, w, x, target)
        if self.round_number == 0 and self.start == "gradient":
            return g
        return np.where(self.public, self.alpha * g + (1 - self.alpha) * self.m, g)

    def server(self, cohort: list[Client]) -> Vector:
        delta = sum(c.p * c.delta for c in cohort)
        self.m = -delta / (cohort[0].lr * sum(c.p * c.a for c in cohort))
        return self.w + self.eta_g * delta

    def server_state(self) -> dict[str, Any]:
        return {"fedcm": self.m}


MOMENTUM = {"momentum": 0.6}
CASES = [
    *by_both("fedprox", FedProx, {"mu": 0.3}),
    Case("fedprox", FedProx, {"mu": 0.3}, {"momentum": 0.6, "clip": 0.9, "weight_decay": 0.05}),
    Case("fedprox", FedProx, {"mu": 0.3}, plus="+fedper"),
    *by_both("feddyn", FedDyn, {"alpha": 0.3}),
    *by_both("feddyn", FedDyn, {"alpha": 0.3, "by_share": True}),
    Case("feddyn", FedDyn, {"alpha": 0.3}, MOMENTUM),
    Case("feddyn", FedDyn, {"alpha": 0.3}, plus="+fedper"),
    *by_both("scaffold", SCAFFOLD, {"eta_g": 0.7}),
    Case("scaffold", SCAFFOLD, {"eta_g": 0.7}, MOMENTUM),
    Case("scaffold", SCAFFOLD, {"eta_g": 0.7}, plus="+fedper"),
    *by_both("fedpvr", FedPVR, {"eta_g": 0.7}),
    Case("fedpvr", FedPVR, {"from_stage": "body"}, MOMENTUM),
    *by_both("feddc", FedDC, {"alpha": 0.2}),
    *by_both("feddc", FedDC, {"alpha": 0.2, "by_share": True}),
    Case("feddc", FedDC, {"alpha": 0.2}, MOMENTUM),
    Case("feddc", FedDC, {"alpha": 0.2}, plus="+fedper"),
    Case("fedsam", FedSAM, {"rho": 0.2}),
    Case("fedsam", FedSAM, {"rho": 0.2}, MOMENTUM),
    Case("fedsam", FedSAM, {"rho": 0.2}, norm=True),
    *by_both("fedspeed", FedSpeed, {"lam": 0.3, "rho": 0.2, "merge": 0.6}),
    Case("fedspeed", FedSpeed, {"lam": 0.3, "rho": 0.2, "merge": 0.6}, plus="+fedper"),
    *by_both("fedcm", FedCM, {"alpha": 0.4, "eta_g": 0.7}),
    Case("fedcm", FedCM, {"alpha": 0.4, "eta_g": 0.7, "start": "gradient"}),
    Case("fedcm", FedCM, {"alpha": 0.4, "eta_g": 0.7}, MOMENTUM),
    Case("fedcm", FedCM, {"alpha": 0.4, "eta_g": 0.7}, plus="+fedper"),
]


@pytest.mark.filterwarnings("ignore:.* assumes plain SGD")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_drift(case: Case, engine: str) -> None:
    compare(case, engine)
