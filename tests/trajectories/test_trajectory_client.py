"""Trajectories of methods with a second network or generated data on the client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kedge.core import rng
from tests.trajectories.problem import (
    DOUBLE,
    ENGINES,
    OUTPUTS,
    SIZES,
    WIDTH,
    Case,
    by_both,
    compare,
)
from tests.trajectories.simulator import Client, FedAvg, Vector, softmax

D_WIDTH = 4
D_SIZES = (WIDTH, D_WIDTH, D_WIDTH, len(SIZES))
DISCRIMINATOR: dict[str, tuple[int, ...]] = {}
for i in range(3):
    DISCRIMINATOR |= {f"dann/weight{i}": (D_SIZES[i + 1], D_SIZES[i])}
    DISCRIMINATOR |= {f"dann/bias{i}": (D_SIZES[i + 1],)}


class DANN(FedAvg):
    """The discriminator descends on its loss, the network ascends on it times lambda."""

    lam: float
    width: int
    alternate = False

    def setup(self) -> None:
        """The first discriminator is uniform within 1 / sqrt(inputs), as layers of torch are."""
        for i, inputs in enumerate(D_SIZES[:-1]):
            key, shape = rng.fold(self.world.init_key("dann"), i), (D_SIZES[i + 1], inputs + 1)
            drawn = (2 * rng.uniform(key, shape, DOUBLE).numpy() - 1) / np.sqrt(inputs)
            first = self.net.split(self.w)
            np.testing.assert_allclose(first[f"dann/weight{i}"], drawn[:, :-1], rtol=1e-12)
            np.testing.assert_allclose(first[f"dann/bias{i}"], drawn[:, -1], rtol=1e-12)

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        leaf, layers = self.net.split(w), [self.net.features(w, x)]
        for i in range(3):
            z = layers[-1] @ leaf[f"dann/weight{i}"].T + leaf[f"dann/bias{i}"]
            layers.append(z if i == 2 else np.maximum(z, 0))
        d = (softmax(layers[3]) - np.eye(self.N)[c.k]) / len(x)
        grads = {}
        for i in (2, 1, 0):
            grads |= {f"dann/weight{i}": d.T @ layers[i], f"dann/bias{i}": d.sum(0)}
            d = d @ leaf[f"dann/weight{i}"] * (layers[i] > 0 if i else 1)
        reversed_gradient = self.net.backward(w, x, 0.0, -self.lam * d)
        return super().gradient(c, w, x, target) + self.net.join(grads) + reversed_gradient

    def trainable(self, c: Client) -> Vector:
        own = self.net.mask("dann/")
        if not self.alternate:
            return super().trainable(c)
        return own if c.t % 2 == 0 else 1 - own


class FedReg(FedAvg):
    """The global model generates data in evaluation mode; all gradients are in training mode."""

    gamma: float
    ascents: int
    eta_s: float
    eta_p: float

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        between = self.gamma * w + (1 - self.gamma) * c.anchor
        return super().gradient(c, between, x, target)

    def ascended(self, c: Client, x: Vector, target: Vector, eta: float) -> Vector:
        for _ in range(self.ascents):
            d_logits = softmax(self.net.logits(c.anchor, x, self.stats)) - target
            d_x = self.net.backward_to_input(c.anchor, x, d_logits, stats=self.stats)
            x = x + eta * np.sign(d_x)
        return x

    def after_step(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        pseudo = self.ascended(c, x, target, self.eta_s)
        perturbed = self.ascended(c, x, target, self.eta_p)
        middle = (w + c.anchor) / 2
        predicted = softmax(self.net.logits(c.anchor, pseudo, self.stats))
        for x_i, y_i in ((pseudo, predicted), (perturbed, target)):
            g = super().gradient(c, middle, x_i, y_i)
            w = w - max(0.0, (w - c.anchor) @ g / (g @ g)) * g
        return w


class FedTR(FedAvg):
    """Centroids c_j of the classes and a drift variable d_k."""

    drift_rule: str
    alpha: float
    lambda_R: float  # noqa: N815
    reduction, eta_g, persistent = "mean", 0.01, False

    def setup(self) -> None:
        self.centroids = np.zeros((OUTPUTS, WIDTH))
        self.valid = np.zeros(OUTPUTS)
        self.d, self.mean_d = [self.zero] * self.N, self.zero

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        if c.t == 0 and self.drift_rule == "descent" and not self.persistent:
            self.d[c.k] = self.zero
        gap = self.valid @ target.T * (self.net.features(w, x) - target @ self.centroids).T
        rows = gap.size if self.reduction == "mean" else 1
        pull = self.net.backward(w, x, 0.0, 2 * self.lambda_R / rows * gap.T)
        alpha = 0.0 if self.drift_rule == "none" else self.alpha
        drift = alpha * self.public * (w - c.anchor + self.d[c.k])
        return super().gradient(c, w, x, target) + pull + drift

    def after_step(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        if self.drift_rule == "descent":
            u = self.public * (w - c.anchor) + self.d[c.k]
            self.d[c.k] = self.d[c.k] - self.eta_g * self.alpha * u
        return w

    def reply(self, c: Client) -> None:
        own = self.world.rows[c.k]
        one_hot = self.world.one_hot(self.world.y[own])
        c.sums = one_hot.T @ self.net.features(c.w, self.world.x[own], c.stats)
        c.counts = one_hot.sum(0)[:, None]
        if self.drift_rule == "accumulate":
            self.d[c.k] = self.d[c.k] + c.delta

    def server(self, cohort: list[Client]) -> Vector:
        count = sum(c.counts for c in cohort)
        means = sum(c.sums for c in cohort) / np.maximum(count, 1)
        self.centroids = np.where(count > 0, means, self.centroids)
        self.valid = np.where(count[:, 0] > 0, 1.0, self.valid)
        if self.drift_rule == "accumulate":
            self.mean_d = self.mean_d + sum(c.share * c.delta for c in cohort) / self.N
        elif self.drift_rule == "descent":
            self.mean_d = sum(c.p * self.d[c.k] for c in cohort)
        return super().server(cohort) + self.mean_d

    def server_state(self) -> dict[str, Any]:
        drift = {"drift": self.mean_d} if self.drift_rule == "accumulate" else {}
        return {"fedtr": {"centroids": self.centroids, "valid": self.valid} | drift}

    def client_state(self, k: int) -> dict[str, Any]:
        kept = self.drift_rule == "accumulate" or self.persistent
        return {"fedtr": {"drift": self.d[k]}} if kept else {}


ALL = {"momentum": 0.6, "weight_decay": 0.05, "clip": 0.9}
REG = {"gamma": 0.4, "ascents": 3, "eta_s": 0.1, "eta_p": 0.02}
TR = {"alpha": 0.3, "lambda_R": 0.4, "eta_g": 0.6}
CASES = [
    Case("dann", DANN, {"lam": 0.3, "width": D_WIDTH}, extra=DISCRIMINATOR),
    Case("dann", DANN, {"lam": 0.3, "width": D_WIDTH, "alternate": True}, ALL, extra=DISCRIMINATOR),
    Case("fedreg", FedReg, REG),
    Case("fedreg", FedReg, REG, ALL),
    Case("fedreg", FedReg, REG, norm=True),
    *by_both("fedtr", FedTR, TR | {"drift_rule": "accumulate"}),
    Case("fedtr", FedTR, TR | {"drift_rule": "accumulate"}, plus="+fedper", norm=True),
    Case("fedtr", FedTR, TR | {"drift_rule": "none"}),
    Case("fedtr", FedTR, TR | {"drift_rule": "descent", "reduction": "sum"}),
    Case("fedtr", FedTR, TR | {"drift_rule": "descent", "persistent": True}),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_client(case: Case, engine: str) -> None:
    compare(case, engine)
