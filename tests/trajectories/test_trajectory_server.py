"""Trajectories of methods that change how the server aggregates updates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.trajectories.problem import ENGINES, Case, by_both, compare
from tests.trajectories.simulator import Client, FedAvg, Vector, cross_entropy


class FedNova(FedAvg):
    """Beside FedProx, a_k is the distance of a constant gradient that the term pulls back."""

    mu = 0.0

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        return super().gradient(c, w, x, target) + self.mu * self.public * (w - c.anchor)

    def reply(self, c: Client) -> None:
        pull, rho, u, distance = c.lr * self.mu, self.world.momentum, 0.0, 0.0
        for _ in range(c.steps):
            g = 1 - pull * distance
            u = rho * u + g
            distance += g + rho * u if self.world.nesterov else u
        c.a = distance

    def server(self, cohort: list[Client]) -> Vector:
        a = sum(c.p * c.a for c in cohort)
        return self.w + a * sum(c.p * c.delta / c.a for c in cohort)


class FedAvgM(FedAvg):
    beta: float
    lr: float
    nesterov: bool

    def setup(self) -> None:
        self.u = self.zero

    def server(self, cohort: list[Client]) -> Vector:
        delta = sum(c.p * c.delta for c in cohort)
        self.u = self.beta * self.u + delta
        return self.w + self.lr * (delta + self.beta * self.u if self.nesterov else self.u)

    def server_state(self) -> dict[str, Any]:
        return {"fedavgm": self.u}


class FedOpt(FedAvg):
    lr: float
    beta1: float
    tau: float
    beta2 = 0.0

    def setup(self) -> None:
        self.m, self.v = self.zero, self.public * self.tau**2

    def server(self, cohort: list[Client]) -> Vector:
        delta = sum(c.p * c.delta for c in cohort)
        self.m = self.beta1 * self.m + (1 - self.beta1) * delta
        self.v = self.second_moment(delta**2)
        return self.w + self.lr * self.m / (np.sqrt(self.v) + self.tau)

    def server_state(self) -> dict[str, Any]:
        return {type(self).__name__.lower(): {"m": self.m, "v": self.v}}


class FedAdagrad(FedOpt):
    def second_moment(self, square: Vector) -> Vector:
        return self.v + square


class FedAdam(FedOpt):
    def second_moment(self, square: Vector) -> Vector:
        return self.beta2 * self.v + (1 - self.beta2) * square


class FedYogi(FedOpt):
    def second_moment(self, square: Vector) -> Vector:
        return self.v - (1 - self.beta2) * square * np.sign(self.v - square)


class FedExP(FedAvg):
    eps: float
    cohort_eps, average = True, True

    def setup(self) -> None:
        self.last = self.w  # the iterate before the present one

    def server(self, cohort: list[Client]) -> Vector:
        delta = sum(c.p * c.delta for c in cohort)
        spread = sum(c.p * (c.delta @ c.delta) for c in cohort)
        eps = self.eps * (len(cohort) if self.cohort_eps else 1)
        self.last = self.w
        return self.w + max(1.0, spread / (2 * (delta @ delta + eps))) * delta

    def server_state(self) -> dict[str, Any]:
        if not self.average:
            return {}
        share = 0.5 if self.round_number > 1 else 0.0
        return {"fedexp": {"params": self.public * self.last, "share": share}}

    def output(self) -> Vector:
        return (self.w + self.last) / 2 if self.average and self.round_number > 1 else self.w


class GroupDRO(FedAvg):
    eta: float
    loss = "mean"

    def setup(self) -> None:
        self.q, self.level = np.ones(self.N), 0.0

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        c.losses = [*getattr(c, "losses", []), cross_entropy(self.net.logits(w, x), target).mean()]
        return super().gradient(c, w, x, target)

    def reply(self, c: Client) -> None:
        loss = c.losses[0] if self.loss == "first" else np.mean(c.losses)
        self.q[c.k] *= np.exp(self.eta * loss)

    def server(self, cohort: list[Client]) -> Vector:
        q = self.q[[c.k for c in cohort]]
        self.level = np.log(q.mean())
        return self.w + sum(q_k * c.delta for q_k, c in zip(q / q.sum(), cohort, strict=True))

    def server_state(self) -> dict[str, Any]:
        return {"groupdro": {"level": self.level}}

    def client_state(self, k: int) -> dict[str, Any]:
        return {"groupdro": {"log_q": np.log(self.q[k])}}


class Krum(FedAvg):
    byzantine: int
    select = 1

    def mean(self, cohort: list[Client], values: list[Any]) -> Any:
        near = len(cohort) - self.byzantine - 2
        scores = []
        for c in cohort:
            distances = [np.sum((c.delta - d.delta) ** 2) for d in cohort if d is not c]
            scores.append(sum(sorted(distances)[:near]))
        best = np.argsort(scores, kind="stable")[: self.select]
        return np.mean([values[i] for i in best], axis=0)


class TrimmedMean(FedAvg):
    byzantine: int

    def mean(self, cohort: list[Client], values: list[Any]) -> Any:
        return np.sort(values, axis=0)[self.byzantine : len(cohort) - self.byzantine].mean(0)


class Median(FedAvg):
    def mean(self, cohort: list[Client], values: list[Any]) -> Any:
        return np.median(values, axis=0)


MOMENTUM = {"momentum": 0.6}
CASES = [
    *by_both("fednova", FedNova),
    Case("fednova", FedNova, optim=MOMENTUM),
    Case("fednova", FedNova, optim=MOMENTUM | {"nesterov": True}),
    Case("fednova", FedNova, plus="+fedper"),
    *by_both("fednova", FedNova, options={"mu": 0.5}, plus="+fedprox(mu=0.5)"),
    Case("fednova", FedNova, optim=MOMENTUM, options={"mu": 0.5}, plus="+fedprox(mu=0.5)"),
    *by_both("fedavgm", FedAvgM, {"beta": 0.7, "lr": 0.6, "nesterov": False}),
    *by_both("fedavgm", FedAvgM, {"beta": 0.7, "lr": 0.6, "nesterov": True}),
    Case("fedavgm", FedAvgM, {"beta": 0.7, "lr": 0.6, "nesterov": False}, plus="+fedper"),
    Case("fedadagrad", FedAdagrad, {"lr": 0.2, "beta1": 0.3, "tau": 0.05}),
    Case("fedadam", FedAdam, {"lr": 0.2, "beta1": 0.3, "tau": 0.05, "beta2": 0.8}),
    Case("fedyogi", FedYogi, {"lr": 0.2, "beta1": 0.3, "tau": 0.05, "beta2": 0.8}),
    Case("fedyogi", FedYogi, {"lr": 0.2, "beta1": 0.3, "tau": 0.05, "beta2": 0.8}, plus="+fedper"),
    *by_both("fedexp", FedExP, {"eps": 0.02}),
    Case("fedexp", FedExP, {"eps": 0.02, "cohort_eps": False, "average": False}),
    Case("fedexp", FedExP, {"eps": 0.02}, plus="+fedper"),
    Case("groupdro", GroupDRO, {"eta": 0.4}),
    Case("groupdro", GroupDRO, {"eta": 0.4, "loss": "first"}),
    Case("krum", Krum, {"byzantine": 0}),
    Case("krum", Krum, {"byzantine": 1}, per_round=5),
    Case("krum", Krum, {"byzantine": 1, "select": 3}, per_round=5),
    Case("trimmedmean", TrimmedMean, {"byzantine": 1}),
    Case("trimmedmean", TrimmedMean, {"byzantine": 1}, per_round=5),
    Case("median", Median),
    Case("median", Median, per_round=4),
    Case("krum", Krum, {"byzantine": 0, "select": 2}, norm=True),
    Case("trimmedmean", TrimmedMean, {"byzantine": 1}, norm=True),
    Case("median", Median, norm=True),
    Case("fedadam", FedAdam, {"lr": 0.2, "beta1": 0.3, "tau": 0.05, "beta2": 0.8}, norm=True),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_server(case: Case, engine: str) -> None:
    compare(case, engine)
