"""Trajectories of methods that train on other data than the client's own.

Drawn numbers come from the key that the method must use: of (seed, round, client, part, hook,
step) on a client, of (seed, round, part) on the server.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kedge.core import rng
from tests.trajectories.problem import (
    DOUBLE,
    ENGINES,
    INPUT,
    OUTPUTS,
    WIDTH,
    Case,
    by_both,
    compare,
    key_of,
)
from tests.trajectories.projection import first_layer
from tests.trajectories.simulator import Client, FedAvg, Vector, softmax


class Mixup(FedAvg):
    alpha: float

    def batch(self, c: Client, x: Vector, target: Vector) -> tuple[Vector, Vector]:
        key_order, key_weight = rng.split(c.key("mixup", "transform", c.t), 2)
        partner = rng.permutation(key_order, len(x)).numpy()
        lam = rng.beta(key_weight, self.alpha, self.alpha, DOUBLE).item()
        x, target = (lam * v + (1 - lam) * v[partner] for v in (x, target))
        return x, target


class NaiveMix(FedAvg):
    """The pool has ``rows`` means of ``samples`` samples of one client each."""

    lam: float
    samples: int
    rows: int
    refresh = "once"

    def survey(self, cohort: list[Client]) -> None:
        if self.refresh == "once" and self.round_number > 0:
            return
        part, t = type(self).__name__.lower(), self.round_number
        clients = range(self.N) if self.refresh == "once" else sorted(c.k for c in cohort)
        x, y = [], []
        for k in clients:
            shape = -(-self.rows // self.N), self.samples
            key = key_of("clients", t, k, part, "survey")
            drawn = self.world.rows[k][rng.integers(key, shape, len(self.world.rows[k])).numpy()]
            x += list(self.world.x[drawn].mean(1))
            y += list(self.world.one_hot(self.world.y[drawn]).mean(1))
        order = rng.permutation(key_of("server", t, "survey", part), len(x)).numpy()
        chosen = order[np.arange(self.rows) % len(x)]
        self.pool = {"x": np.array(x)[chosen], "y": np.array(y)[chosen]}

    def partners(self, c: Client, size: int) -> tuple[Vector, Vector]:
        key = c.key(type(self).__name__.lower(), "prepare")
        order = rng.permutation(key, self.rows).numpy()
        row = order[(c.t * size + np.arange(size)) % self.rows]
        return self.pool["x"][row], self.pool["y"][row]

    def batch(self, c: Client, x: Vector, target: Vector) -> tuple[Vector, Vector]:
        x_mean, y_mean = self.partners(c, len(x))
        target = (1 - self.lam) * target + self.lam * y_mean
        return (1 - self.lam) * x + self.lam * x_mean, target

    def server_state(self) -> dict[str, Any]:
        return {type(self).__name__.lower(): self.pool}


class FedMix(NaiveMix):
    """The derivative of the loss along the mean is differentiated once more."""

    def batch(self, c: Client, x: Vector, target: Vector) -> tuple[Vector, Vector]:
        c.true = target
        return (1 - self.lam) * x, super().batch(c, x, target)[1]

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        v = self.partners(c, len(x))[0].reshape(len(x), -1)
        leaf, h, p = self.net.split(w), self.net.features(w, x), softmax(self.net.logits(w, x))
        slope = 1 - h * h
        dz = v @ leaf["body.weight"].T  # along v: of tanh's input, features, logits
        dh = slope * dz
        do = dh @ leaf["head.weight"].T
        d_do = self.lam / len(x) * (p - c.true)  # the derivative along v is (p - y) do
        d_dh = d_do @ leaf["head.weight"]
        d_logits = self.lam / len(x) * p * (do - (p * do).sum(1, keepdims=True))
        own = self.net.join({"head.weight": d_do.T @ dh, "body.weight": (d_dh * slope).T @ v})
        own = own + self.net.backward(w, x, d_logits, -2 * h * dz * d_dh)
        return super().gradient(c, w, x, target) + own


class VHL(FedAvg):
    """Virtual samples i of class i mod C, with C outputs more for their classes, or without."""

    alpha: float
    lam: float
    lam_virtual: float
    tau: float
    rows: int
    per_class: int
    align_epochs: int
    spread: float
    labels = "extra"

    def setup(self) -> None:
        self.key = rng.fold(self.world.init_key("vhl"), "virtual")
        if self.labels == "extra":
            weight, bias = first_layer(self.world.init_key("vhl"), WIDTH, OUTPUTS)
            self.w = self.net.with_leaves(self.w, {"vhl/weight": weight, "vhl/bias": bias})

    def virtual(self, c: Client) -> tuple[Vector, Any]:
        drawn = rng.integers(c.key("vhl", "term", c.t), (self.rows,), OUTPUTS * self.per_class)
        means = rng.normal(rng.fold(self.key, "means"), (OUTPUTS, *INPUT), DOUBLE).numpy()
        key, y = rng.fold(self.key, "samples"), (drawn % OUTPUTS).numpy()
        noise = [rng.normal(rng.fold(key, int(i)), INPUT, DOUBLE).numpy() for i in drawn]
        return means[y] + self.spread * np.array(noise), y

    def contrast(self, z: Vector, y: Any) -> Vector:
        """Derivative of the contrastive loss by the rows of z."""
        length, other = np.linalg.norm(z, axis=1, keepdims=True), 1 - np.eye(len(z))
        unit, same = z / length, other * (y[:, None] == y)
        p = softmax(np.where(other, unit @ unit.T / self.tau, -np.inf))
        wanted = same / np.maximum(same.sum(1, keepdims=True), 1)
        d = (p * wanted.sum(1, keepdims=True) - wanted) / len(z) / self.tau
        d = (d + d.T) @ unit
        return (d - unit * (d * unit).sum(1, keepdims=True)) / length

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        (x_v, y_v), y = self.virtual(c), target.argmax(1)
        z, z_v, total = self.net.features(w, x), self.net.features(w, x_v), self.zero
        d = self.lam * self.contrast(np.concatenate([z, z_v]), np.concatenate([y, y_v]))[: len(z)]
        d_v = self.lam_virtual * self.contrast(z_v, y_v)
        aligned = c.t * len(x) < self.align_epochs * c.n or not self.align_epochs
        leaf = {"vhl/weight": np.zeros((0, WIDTH)), "vhl/bias": np.zeros(0)} | self.net.split(w)
        weight = np.concatenate([leaf["head.weight"], leaf["vhl/weight"]])
        bias = np.concatenate([leaf["head.bias"], leaf["vhl/bias"]])
        virtual_label = y_v + len(bias) - OUTPUTS
        real, virtual = (x, z, y, d, 1.0), (x_v, z_v, virtual_label, d_v, self.alpha)
        for x_i, z_i, label, d_i, scale in (real, virtual):
            e = scale * (softmax(z_i @ weight.T + bias) - np.eye(len(bias))[label]) / len(z_i)
            e, extra = e[:, :OUTPUTS], e[:, OUTPUTS:]
            own = {"vhl/weight": extra.T @ z_i, "vhl/bias": extra.sum(0)}
            d_i = extra @ leaf["vhl/weight"] + (d_i if aligned else 0)
            total = total + self.net.backward(w, x_i, e, d_i) + self.net.join(own)
        return total

    def server_state(self) -> dict[str, Any]:
        return {"vhl": {"key": self.key.numpy()}}


ALL = {"momentum": 0.6, "weight_decay": 0.05, "clip": 0.9}
EXTRA = {"vhl/weight": (OUTPUTS, WIDTH), "vhl/bias": (OUTPUTS,)}
VIRTUAL = {"alpha": 0.6, "lam": 0.3, "lam_virtual": 0.2, "tau": 0.4, "rows": 7, "per_class": 5}
VIRTUAL |= {"align_epochs": 1, "spread": 0.7}
POOL = {"lam": 0.3, "samples": 4, "rows": 13}
CASES = [
    *by_both("mixup", Mixup, {"alpha": 0.7}),
    Case("mixup", Mixup, {"alpha": 0.4}, ALL, epochs=2),
    *by_both("naivemix", NaiveMix, POOL),
    Case("naivemix", NaiveMix, POOL | {"refresh": "round"}, ALL, epochs=2),
    *by_both("fedmix", FedMix, POOL),
    Case("fedmix", FedMix, POOL | {"refresh": "round"}, ALL, epochs=2),
    *by_both("vhl", VHL, VIRTUAL, epochs=2, extra=EXTRA),
    Case("vhl", VHL, VIRTUAL, ALL, epochs=2, extra=EXTRA),
    Case("vhl", VHL, VIRTUAL, epochs=2, extra=EXTRA, norm=True),
    Case("vhl", VHL, VIRTUAL | {"labels": "shared", "align_epochs": 0}, epochs=2),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_data(case: Case, engine: str) -> None:
    compare(case, engine)
