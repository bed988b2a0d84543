"""Trajectories of methods with a second network or generated data on the client."""

from __future__ import annotations

import numpy as np
import pytest
from problem import ENGINES, SIZES, WIDTH, Case, compare
from simulator import Client, FedAvg, Vector, softmax

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


ALL = {"momentum": 0.6, "weight_decay": 0.05, "clip": 0.9}
REG = {"gamma": 0.4, "ascents": 3, "eta_s": 0.1, "eta_p": 0.02}
CASES = [
    Case("dann", DANN, {"lam": 0.3, "width": D_WIDTH}, extra=DISCRIMINATOR),
    Case("dann", DANN, {"lam": 0.3, "width": D_WIDTH, "alternate": True}, ALL, extra=DISCRIMINATOR),
    Case("fedreg", FedReg, REG),
    Case("fedreg", FedReg, REG, ALL),
    Case("fedreg", FedReg, REG, norm=True),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_client(case: Case, engine: str) -> None:
    compare(case, engine)
