"""Trajectories of methods with a fixed classifier, or one that is calibrated at the end."""

from __future__ import annotations

import numpy as np
import pytest

from kedge.core import rng
from tests.trajectories.problem import (
    DOUBLE,
    ENGINES,
    OUTPUTS,
    WIDTH,
    Case,
    by_both,
    compare,
    key_of,
)
from tests.trajectories.simulator import Client, FedAvg, Vector, softmax
from tests.trajectories.test_trajectory_personal import FineTune


class FedETF(FedAvg):
    """The head's output, normalised, is compared with the vertices of a simplex."""

    scale: float
    balanced = True

    def setup(self) -> None:
        self.w = self.net.with_leaves(self.w, {"fedetf/scale": self.scale})

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        mu, s = self.net.logits(w, x), self.net.split(w)["fedetf/scale"]
        length = np.linalg.norm(mu, axis=1, keepdims=True)
        unit = mu / length
        vertices = np.eye(OUTPUTS) - 1 / OUTPUTS
        vertices = vertices / np.linalg.norm(vertices, axis=0)
        with np.errstate(divide="ignore"):
            prior = np.log(self.world.label_counts(c.k)) if self.balanced else 0.0
        d = (softmax(s * unit @ vertices + prior) - target) / len(x)
        own = self.net.join({"fedetf/scale": (d * (unit @ vertices)).sum()})
        d = s * d @ vertices
        return self.net.backward(w, x, (d - unit * (d * unit).sum(1, keepdims=True)) / length) + own


class SphereFed(FedAvg):
    """Features of length 1 are regressed on labels by the rows of a signed cosine transform."""

    ridge: float
    class_mean = True
    calibrate = True

    def setup(self) -> None:
        key_row, key_sign = rng.split(self.world.init_key("spherefed"), 2)
        row = rng.permutation(key_row, WIDTH).numpy()[:OUTPUTS, None]
        wave = np.cos(np.pi / WIDTH * row * (np.arange(WIDTH) + 0.5))
        sign = 1 - 2 * rng.integers(key_sign, (WIDTH,), 2).numpy()
        self.classifier = sign * wave / np.linalg.norm(wave, axis=1, keepdims=True)

    def trainable(self, c: Client) -> Vector:
        return 1 - self.net.mask("head")

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        h = self.net.features(w, x)
        length = np.linalg.norm(h, axis=1, keepdims=True)
        z, classes = h / length, OUTPUTS if self.class_mean else 1
        d = 2 / classes / len(x) * (z @ self.classifier.T - target) @ self.classifier
        return self.net.backward(w, x, 0.0, (d - z * (d * z).sum(1, keepdims=True)) / length)

    def with_head(self, w: Vector, head: Vector) -> Vector:
        return self.net.with_leaves(w, {"head.weight": head, "head.bias": np.zeros(OUTPUTS)})

    def server(self, cohort: list[Client]) -> Vector:
        return self.with_head(super().server(cohort), self.classifier)

    def finish(self) -> None:
        rows = np.concatenate(self.world.rows)
        z = self.net.features(self.w, self.world.x[rows], self.stats)
        z, n = z / np.linalg.norm(z, axis=1, keepdims=True), len(rows)
        cross = z.T @ self.world.one_hot(self.world.y[rows]) / n
        head = np.linalg.inv(z.T @ z / n + self.ridge * np.eye(WIDTH)) @ cross
        if self.calibrate:
            self.w = self.with_head(self.w, head.T)


class WithFineTune(SphereFed, FineTune):
    """The clients' own models show that the head is frozen, which the server's cannot."""

    def setup(self) -> None:
        SphereFed.setup(self)
        FineTune.setup(self)


class CCVR(FedAvg):
    """FedAvg; then SGD on the head, with features drawn from each class's Gaussian."""

    samples: int
    steps: int
    batch_size: int
    lr: float
    momentum: float
    jitter: float
    labels = "equal"

    def finish(self) -> None:
        key_features, key_batches = rng.split(
            key_of("server", self.round_number, "survey", "ccvr"), 2
        )
        drawn, rows = [], np.concatenate(self.world.rows)
        y, h = self.world.y[rows], self.net.features(self.w, self.world.x[rows], self.stats)
        eps = rng.normal(key_features, (OUTPUTS, self.samples, WIDTH), DOUBLE).numpy()
        for j in range(OUTPUTS):
            value, vector = np.linalg.eigh(np.cov(h[y == j].T))
            root = np.sqrt(value + self.jitter * value.mean())
            drawn.append(h[y == j].mean(0) + eps[j] @ (vector * root) @ vector.T)
        counts = np.bincount(y) if self.labels == "proportional" else np.ones(OUTPUTS, int)
        u, head = self.zero, self.net.mask("head")
        for key in rng.split(key_batches, self.steps):
            key_y, key_row = rng.split(key, 2)
            index = rng.integers(key_y, (self.batch_size,), int(counts.sum())).numpy()
            label = np.repeat(np.arange(OUTPUTS), counts)[index]
            row = rng.integers(key_row, (self.batch_size,), self.samples).numpy()
            z = np.array(drawn)[label, row]
            d = (softmax(self.net.head(self.w, z)) - self.world.one_hot(label)) / len(z)
            g = self.net.join({"head.weight": d.T @ z, "head.bias": d.sum(0)})
            u = self.momentum * u + g
            self.w = self.w - self.lr * head * u


ALL = {"momentum": 0.6, "weight_decay": 0.05, "clip": 0.9}
SCALE = {"extra": {"fedetf/scale": (1,)}}
DRAWN = {"samples": 6, "steps": 5, "lr": 0.3, "momentum": 0.7, "jitter": 0.01, "batch_size": 7}
RETRAINED = "ccvr(samples=6, steps=5, lr=0.3, momentum=0.7, jitter=0.01, batch=7, labels="
CASES = [
    *by_both("fedetf", FedETF, {"scale": 1.7}, **SCALE),
    Case("fedetf", FedETF, {"scale": 1.7, "balanced": False}, ALL, **SCALE),
    Case("fedetf", FedETF, {"scale": 1.7}, **SCALE, norm=True),
    *by_both("spherefed", SphereFed, {"ridge": 0.02}),
    Case("spherefed", SphereFed, {"ridge": 0.02, "class_mean": False}, ALL),
    Case("spherefed", SphereFed, {"ridge": 0.02, "calibrate": False}, norm=True),
    Case("spherefed", SphereFed, {"ridge": 0.02}, norm=True),
    Case("spherefed", WithFineTune, {"ridge": 0.02}, ALL, plus="+finetune"),
    Case(RETRAINED + "equal)", CCVR, options=DRAWN),
    Case(RETRAINED + "proportional)", CCVR, options=DRAWN | {"labels": "proportional"}, norm=True),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_classifiers(case: Case, engine: str) -> None:
    compare(case, engine)
