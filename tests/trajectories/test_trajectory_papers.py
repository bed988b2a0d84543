"""Trajectories of FedImpro and FedBR."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kedge.core import rng
from tests.trajectories.problem import (
    BATCH,
    DOUBLE,
    ENGINES,
    OUTPUTS,
    WIDTH,
    Case,
    by_both,
    compare,
    key_of,
)
from tests.trajectories.projection import Leaves, backward, cosine, first_layers, project, sigmoid
from tests.trajectories.simulator import Client, FedAvg, Vector, softmax


class FedImpro(FedAvg):
    """Statistics of each class at the cut; features drawn from them train the head."""

    cut: str
    weight: float
    ramp: int
    s_max: float
    beta_m: float | str
    beta_g: float
    noise: float
    cap, mix, labels, draws_from, spread, count_weighted = (
        True,
        "sum",
        "balanced",
        "local",
        "std",
        False,
    )

    def setup(self) -> None:
        self.mu = rng.uniform(self.world.init_key("fedimpro"), (OUTPUTS, WIDTH), DOUBLE).numpy()
        self.sigma = self.capped(self.as_spread(np.full_like(self.mu, 0.01)))

    def as_spread(self, variance: Vector) -> Vector:
        return variance if self.spread == "variance" else np.sqrt(variance)

    def capped(self, spread: Vector) -> Vector:
        bound = self.s_max**2 if self.spread == "variance" else self.s_max
        return np.minimum(spread, bound) if self.s_max else spread

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        if c.t == 0:
            c.mu, c.sigma = self.mu, self.sigma
        share = self.round_number / self.ramp if self.ramp else 1.0
        weight = self.weight * (min(share, 1.0) if self.cap else share)
        real = super().gradient(c, w, x, target) * (1 if self.mix == "sum" else 1 - weight)
        y = [*range(OUTPUTS)] * (len(x) // OUTPUTS + 1)
        y = target.argmax(1) if self.labels == "batch" else np.array(y)
        local = self.draws_from == "local"
        mu, sigma = (c.mu, c.sigma) if local else (self.mu, self.sigma)
        sigma = np.sqrt(sigma) if self.spread == "variance" else sigma
        eps = rng.normal(c.key("fedimpro", "inject", c.t), (len(y), WIDTH, 1), DOUBLE).numpy()
        h = mu[y] + sigma[y] * eps[..., 0]
        h, z = (np.tanh(h), self.net.linear) if self.cut == "body" else (h, self.net.features)
        d = weight * (softmax(self.net.head(w, h)) - self.world.one_hot(y)) / len(y)
        self.update(c, z(w, x), target.argmax(1))
        return real + self.net.join({"head.weight": d.T @ h, "head.bias": d.sum(0)})

    def update(self, c: Client, z: Vector, y: Any) -> None:
        mu, sigma = c.mu.copy(), c.sigma.copy()
        b = 1 - WIDTH / 5000 if self.beta_m == "by_dimension" else self.beta_m
        for j in set(y):
            own = z[y == j]
            mu[j] = b * c.mu[j] + (1 - b) * own.mean(0)
            if len(own) > 1:
                spread = self.as_spread(own.var(0, ddof=1))
                sigma[j] = self.capped(b * c.sigma[j] + (1 - b) * spread)
        c.mu, c.sigma = mu, sigma

    def reply(self, c: Client) -> None:
        keys = rng.split(c.key("fedimpro", "reply"), 2)
        e = [self.noise * rng.normal(key, (OUTPUTS, WIDTH), DOUBLE).numpy() for key in keys]
        c.mu, c.sigma = c.mu + e[0], np.maximum(c.sigma + e[1], 0)

    def server(self, cohort: list[Client]) -> Vector:
        mu, sigma = (np.mean([getattr(c, v) for c in cohort], 0) for v in ("mu", "sigma"))
        if self.count_weighted:
            mu, sigma = self.pooled(cohort)
        self.mu = self.beta_g * self.mu + (1 - self.beta_g) * mu
        self.sigma = self.beta_g * self.sigma + (1 - self.beta_g) * sigma
        return super().server(cohort)

    def pooled(self, cohort: list[Client]) -> tuple[Vector, Vector]:
        """Mean and scale of the mixture of the clients' Gaussians, by label counts."""
        mu, sigma = self.mu.copy(), self.sigma.copy()
        n = np.array([self.world.label_counts(c.k) for c in cohort])
        square = 1 if self.spread == "variance" else 2
        for j in np.flatnonzero(n.sum(0)):
            mu[j] = np.average([c.mu[j] for c in cohort], 0, n[:, j])
            second = [c.sigma[j] ** square + (c.mu[j] - mu[j]) ** 2 for c in cohort]
            sigma[j] = self.capped(self.as_spread(np.average(second, 0, n[:, j])))
        return mu, sigma

    def server_state(self) -> dict[str, Any]:
        return {"fedimpro": {"mean": self.mu, "scale": self.sigma}}


class FedBR(FedAvg):
    """Pseudo-samples, means of ``samples`` rows of one client; a projection P that ascends."""

    lam: float
    mu: float
    inv_temperature1: float
    inv_temperature2: float
    samples: int
    width: int
    out: int
    rows, means, across, refresh, mixture, max_step = 0, 0, 1, "round", 0, True

    def setup(self) -> None:
        self.rows = self.rows or BATCH
        sizes = WIDTH, self.width, self.width, self.out
        self.mlp = first_layers(self.world.init_key("fedbr"), *sizes)

    def survey(self, cohort: list[Client]) -> None:
        t = self.round_number
        if self.refresh == "once" and t > 0:
            return
        clients = range(self.N) if self.refresh == "once" else sorted(c.k for c in cohort)
        pool = []
        for k in clients:
            key, rows = key_of("clients", t, k, "fedbr", "survey"), self.world.rows[k]
            drawn = rng.integers(key, (self.means or self.rows, self.samples), len(rows)).numpy()
            pool.append(self.world.x[rows[drawn]].mean(1))
        key = key_of("server", t, "survey", "fedbr")
        row = np.arange(self.rows * self.across).reshape(-1, self.across)
        if self.means:
            flat = np.concatenate(pool)
            pieces = flat[rng.permutation(key, len(flat)).numpy()[row % len(flat)]]
        else:
            client = rng.integers(key, row.shape, len(pool)).numpy()
            pieces = np.array(pool)[client, row % self.rows]
        self.pseudo = pieces.mean(1)

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        if c.t == 0:
            c.mlp = self.mlp
        x_p, y_p = self.pseudo, np.full((self.rows, OUTPUTS), 1 / OUTPUTS)
        if self.mixture:
            shape = self.rows, self.mixture
            pick = rng.integers(c.key("fedbr", "ascend", c.t), shape, len(x)).numpy()
            x_p, y_p = (
                (own + v[pick].sum(1)) / (1 + self.mixture) for own, v in ((x_p, x), (y_p, target))
            )
        pair = np.arange(self.rows) % len(x)
        z = [self.net.features(v, i) for v, i in ((w, x_p), (c.anchor, x_p), (w, x))]
        z[2] = z[2][pair]
        if self.max_step:
            grads, _ = self.contrast(c.mlp, z)
            c.mlp = {n: leaf + c.lr * grads[n] for n, leaf in c.mlp.items()}
        _, (d_p, _, d_pairs) = self.contrast(c.mlp, z)
        d = np.zeros((len(x), WIDTH))
        np.add.at(d, pair, d_pairs)
        uniform = self.lam / self.rows * (softmax(self.net.logits(w, x_p)) - y_p)
        total = super().gradient(c, w, x, target) + self.net.backward(w, x, 0.0, self.mu * d)
        return total + self.net.backward(w, x_p, uniform, self.mu * d_p)

    def contrast(self, p: Leaves, z: list[Vector]) -> tuple[Leaves, list[Vector]]:
        """Derivatives of L_con by P and by the features: pseudo, global, real."""
        layers = [project(p, v) for v in z]
        a, b, r = (v[-1] for v in layers)
        cos_b, by_a1 = cosine(a, b)
        cos_r, by_a2 = cosine(a, r)
        s = sigmoid(self.inv_temperature2 * cos_r - self.inv_temperature1 * cos_b)[:, None] / len(a)
        up, down = s * self.inv_temperature2, s * self.inv_temperature1
        d = [up * by_a2 - down * by_a1, -down * cosine(b, a)[1], up * cosine(r, a)[1]]
        done = [backward(p, v, d_v) for v, d_v in zip(layers, d, strict=True)]
        return {n: sum(grads[n] for grads, _ in done) for n in p}, [d_z for _, d_z in done]

    def server(self, cohort: list[Client]) -> Vector:
        self.mlp = {n: sum(c.p * c.mlp[n] for c in cohort) for n in self.mlp}
        return super().server(cohort)

    def server_state(self) -> dict[str, Any]:
        return {"fedbr": {"projection": self.mlp, "pseudo": self.pseudo}}


ALL = {"momentum": 0.6, "weight_decay": 0.05, "clip": 0.9}
IMPRO = {"cut": "body", "weight": 0.8, "ramp": 2, "beta_m": 0.3, "beta_g": 0.4, "noise": 0.02}
CAPPED, FREE = IMPRO | {"s_max": 0.3}, IMPRO | {"s_max": 0.0}
PAPER = {"labels": "batch", "draws_from": "shared", "spread": "variance"}
BR = {"lam": 0.7, "mu": 0.6, "inv_temperature1": 1.5, "inv_temperature2": 2.5, "samples": 3}
BR |= {"width": 4, "out": 3}
CASES = [
    *by_both("fedimpro", FedImpro, CAPPED),
    Case("fedimpro", FedImpro, CAPPED | {"cap": False}, ALL),
    Case("fedimpro", FedImpro, FREE | PAPER | {"mix": "share", "ramp": 0}),
    Case("fedimpro", FedImpro, CAPPED | {"spread": "variance", "cut": "tanh"}),
    Case("fedimpro", FedImpro, CAPPED | {"beta_m": "by_dimension", "cut": "tanh"}),
    Case("fedimpro", FedImpro, CAPPED | {"count_weighted": True}),
    Case("fedimpro", FedImpro, FREE | {"count_weighted": True, "spread": "variance"}, ALL),
    *by_both("fedbr", FedBR, BR),
    Case("fedbr", FedBR, BR | {"rows": 6, "means": 2, "refresh": "once"}, ALL),
    Case("fedbr", FedBR, BR | {"rows": 6, "mixture": 2}),
    Case("fedbr", FedBR, BR | {"across": 3}),
    Case("fedbr", FedBR, BR | {"max_step": False}, norm=True),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_papers(case: Case, engine: str) -> None:
    compare(case, engine)
