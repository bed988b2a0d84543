"""Trajectories of methods with a term on features or logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.trajectories.problem import ENGINES, OUTPUTS, WIDTH, Case, by_both, compare, statistics
from tests.trajectories.projection import backward, cosine, first_layers, project, sigmoid
from tests.trajectories.simulator import Client, FedAvg, Vector, softmax


class MOON(FedAvg):
    """``previous`` is the client's own trained model; who has none compares with the anchor."""

    mu: float
    tau: float
    projection: int
    width = 0
    eval_mode = True

    def setup(self) -> None:
        if self.projection:
            first = first_layers(self.world.init_key("moon"), WIDTH, self.width, self.projection)
            self.w = self.net.with_leaves(self.w, {f"moon/{n}": v for n, v in first.items()})
        self.previous, self.previous_stats = [self.w * self.public] * self.N, [self.stats] * self.N
        self.trained, self.previous_seen = np.zeros(self.N), [0] * self.N

    def projected(self, w: Vector, features: Vector) -> list[Vector]:
        return project(self.leaves(w), features) if self.projection else [features]

    def leaves(self, w: Vector) -> dict[str, Vector]:
        own = self.net.split(w).items()
        return {n.removeprefix("moon/"): v for n, v in own if n.startswith("moon/")}

    def constant(self, w: Vector, x: Vector, stats: Any) -> Vector:
        return self.projected(w, self.net.features(w, x, stats if self.eval_mode else None))[-1]

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        z_global = z_previous = self.constant(c.anchor, x, self.stats)
        if self.trained[c.k]:
            z_previous = self.constant(self.previous[c.k], x, self.previous_stats[c.k])
        layers = self.projected(w, self.net.features(w, x))
        (positive, d_positive), (negative, d_negative) = (
            cosine(layers[-1], z) for z in (z_global, z_previous)
        )
        scale = self.mu / self.tau / len(x) * sigmoid((negative - positive) / self.tau)
        grads, d = backward(self.leaves(w), layers, scale[:, None] * (d_negative - d_positive))
        own = self.net.join({f"moon/{n}": g for n, g in grads.items()})
        return super().gradient(c, w, x, target) + own + self.net.backward(w, x, 0.0, d)

    def reply(self, c: Client) -> None:
        self.previous[c.k], self.previous_stats[c.k] = c.w * self.public, c.stats
        self.trained[c.k], self.previous_seen[c.k] = 1, self.seen + c.steps

    def client_state(self, k: int) -> dict[str, Any]:
        stats = self.previous_stats[k] if self.eval_mode else None
        state = {"previous": self.previous[k], "seen": self.trained[k]}
        return {"moon": state | {"buffers": statistics(stats, self.previous_seen[k])}}


class FedNTD(FedAvg):
    beta: float
    tau: float
    eval_mode = True

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        teacher = self.net.logits(c.anchor, x, self.stats if self.eval_mode else None)
        p, q = (
            softmax(np.where(target, -np.inf, z) / self.tau)
            for z in (teacher, self.net.logits(w, x))
        )
        distil = self.net.backward(w, x, self.beta * self.tau * (q - p) / len(x))
        return super().gradient(c, w, x, target) + distil


class FedLC(FedAvg):
    tau: float

    def shift(self, c: Client) -> Vector:
        counts = self.world.label_counts(c.k)
        return -self.tau * np.where(counts, counts, 1e-12) ** -0.25

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        p = softmax(self.net.logits(w, x) + self.shift(c))
        return self.net.backward(w, x, (p - target) / len(x))


class LogitAdjust(FedLC):
    def shift(self, c: Client) -> Vector:
        share = self.world.label_counts(c.k) / c.n
        return self.tau * np.log(np.where(share, share, 1e-12))


class FedDecorr(FedAvg):
    beta: float

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        h = self.net.features(w, x)
        rows, width = h.shape
        centred = h - h.mean(0)
        deviation = np.sqrt(h.var(0, ddof=1) + 1e-8)
        z = centred / deviation
        products = z.T @ z
        np.fill_diagonal(products, 0)
        d = 4 * self.beta / (rows * width * (width - 1)) * z @ products
        d = d / deviation - centred * (d * centred).sum(0) / deviation**3 / (rows - 1)
        return super().gradient(c, w, x, target) + self.net.backward(w, x, 0.0, d - d.mean(0))


class FedProto(FedAvg):
    lam: float
    pool = "samples"

    def setup(self) -> None:
        self.prototypes, self.valid = np.zeros((OUTPUTS, WIDTH)), np.zeros(OUTPUTS)

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        gap = self.net.features(w, x) - target @ self.prototypes
        d = 2 * self.lam / gap.size * (target @ self.valid)[:, None] * gap
        return super().gradient(c, w, x, target) + self.net.backward(w, x, 0.0, d)

    def server(self, cohort: list[Client]) -> Vector:
        for j in range(OUTPUTS):
            means, counts = [], []
            for c in cohort:
                rows = [i for i in self.world.rows[c.k] if self.world.y[i] == j]
                if rows:
                    means.append(self.net.features(c.w, self.world.x[rows], c.stats).mean(0))
                    counts.append(len(rows) if self.pool == "samples" else 1)
            if means:
                self.prototypes[j], self.valid[j] = np.average(means, 0, counts), 1
        return super().server(cohort)

    def server_state(self) -> dict[str, Any]:
        return {"fedproto": {"prototypes": self.prototypes, "valid": self.valid}}


ALL = {"momentum": 0.6, "weight_decay": 0.05, "clip": 0.9}
PROJECTED: dict[str, Any] = {
    "extra": {"moon/weight0": (4, WIDTH), "moon/bias0": (4,)}
    | {"moon/weight1": (6, 4), "moon/bias1": (6,)}
}
MU = {"mu": 1.7, "tau": 0.4}
CASES = [
    *by_both("moon", MOON, MU | {"projection": 6, "width": 4}, **PROJECTED),
    Case("moon", MOON, MU | {"projection": 6, "width": 4}, ALL, **PROJECTED),
    Case("moon", MOON, MU | {"projection": 0}),
    Case("moon", MOON, MU | {"projection": 0}, plus="+fedper"),
    Case("moon", MOON, MU | {"projection": 0}, norm=True),
    Case("moon", MOON, MU | {"projection": 0, "eval_mode": False}, norm=True),
    Case("fedntd", FedNTD, {"beta": 0.7, "tau": 1.6}),
    Case("fedntd", FedNTD, {"beta": 0.7, "tau": 1.6}, ALL),
    Case("fedntd", FedNTD, {"beta": 0.7, "tau": 1.6}, plus="+fedper"),
    Case("fedntd", FedNTD, {"beta": 0.7, "tau": 1.6}, norm=True),
    Case("fedntd", FedNTD, {"beta": 0.7, "tau": 1.6, "eval_mode": False}, norm=True),
    Case("fedlc", FedLC, {"tau": 0.6}),
    Case("fedlc", FedLC, {"tau": 0.6}, ALL),
    Case("logitadjust", LogitAdjust, {"tau": 0.6}),
    Case("logitadjust", LogitAdjust, {"tau": 0.6}, ALL),
    Case("feddecorr", FedDecorr, {"beta": 0.3}),
    Case("feddecorr", FedDecorr, {"beta": 0.3}, ALL),
    Case("feddecorr", FedDecorr, {"beta": 0.3}, norm=True),
    *by_both("fedproto", FedProto, {"lam": 0.8}),
    Case("fedproto", FedProto, {"lam": 0.8, "pool": "clients"}, ALL),
    Case("fedproto", FedProto, {"lam": 0.8}, norm=True, plus="+fedper"),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_features(case: Case, engine: str) -> None:
    compare(case, engine)
