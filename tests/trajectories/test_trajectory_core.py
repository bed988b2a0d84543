"""Trajectories of the loop itself: keys, frozen leaves, second gradients, what hooks receive.

The parts here are made for these tests: each puts one promise of the core into the update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kedge.core import rng, tree
from kedge.core.part import Mean, Out, Part, Sum, parse
from kedge.core.round import Round
from kedge.core.task import Batch
from kedge.core.tree import Params, Tree, Weights
from kedge.core.view import Spec, View
from tests.trajectories.problem import DOUBLE, ENGINES, Case, by_both, compare
from tests.trajectories.simulator import Client, FedAvg, Vector
from tests.trajectories.test_trajectory_drift import SCAFFOLD

HEAD = "head.weight"


@dataclass(frozen=True)
class Noise(Part):
    """Draws in every hook: a key belongs to (seed, round, client, part, hook, step)."""

    size: float = 0.1

    def server_init(self, spec: Spec) -> Tree:
        return {"drawn": torch.zeros(2, dtype=DOUBLE)}

    def client_init(self, spec: Spec) -> Tree:
        return {"drawn": torch.zeros(2, dtype=DOUBLE)}

    def transform(self, v: View, batch: Batch) -> Batch:
        noise = rng.normal(v.key, tuple(batch.x.shape), DOUBLE)
        return batch._replace(x=batch.x + self.size * noise)

    def term(self, v: View, params: Params, batch: Batch, out: Out) -> Tensor:
        noise = rng.normal(v.key, tuple(params[HEAD].shape), DOUBLE)
        return self.size * (noise * params[HEAD]).sum()

    def reply(self, v: View, weights: Weights) -> tuple[Tree, Tree]:
        return {"drawn": rng.normal(v.key, (2,), DOUBLE)}, {}

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        return weights, {"drawn": rng.normal(r.key, (2,), DOUBLE)}


class NoiseOracle(FedAvg):
    size = 0.1

    def setup(self) -> None:
        self.drawn, self.drawn_by = np.zeros(2), np.zeros((self.N, 2))

    def batch(self, c: Client, x: Vector, target: Vector) -> tuple[Vector, Vector]:
        noise = rng.normal(c.key("noise", "transform", c.t), x.shape, DOUBLE).numpy()
        return x + self.size * noise, target

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        noise = rng.normal(c.key("noise", "term", c.t), self.net.shapes[HEAD], DOUBLE)
        return super().gradient(c, w, x, target) + self.size * self.net.join({HEAD: noise.numpy()})

    def reply(self, c: Client) -> None:
        self.drawn_by[c.k] = rng.normal(c.key("noise", "reply"), (2,), DOUBLE).numpy()

    def server(self, cohort: list[Client]) -> Vector:
        key = self.world.server_key(self.round_number, "noise")
        self.drawn = rng.normal(key, (2,), DOUBLE).numpy()
        return super().server(cohort)

    def server_state(self) -> dict[str, Any]:
        return {"noise": {"drawn": self.drawn}}

    def client_state(self, k: int) -> dict[str, Any]:
        return {"noise": {"drawn": self.drawn_by[k]}}


class Flipped(FedAvg):
    """Augmentation: each image mirrored with probability 1/2, drawn anew in every step."""

    def batch(self, c: Client, x: Vector, target: Vector) -> tuple[Vector, Vector]:
        key = rng.fold(c.key("data", c.t), 0)  # 0: the first augmentation
        mirrored = rng.uniform(key, (len(x), 1, 1, 1)).numpy() < 0.5
        return np.where(mirrored, x[..., ::-1], x), target


@dataclass(frozen=True)
class FreezeSome(Part):
    """Freezes a bias always, and the body in odd steps."""

    def trainable(self, v: View, params: Params) -> dict[str, Tensor | bool]:
        return {"body.weight": v.step % 2 == 0, "head.bias": False}


@dataclass(frozen=True)
class FreezeMore(Part):
    """Freezes the body in every third step."""

    def trainable(self, v: View, params: Params) -> dict[str, Tensor | bool]:
        return {"body.weight": v.step % 3 != 2}


class Frozen(FedAvg):
    def trainable(self, c: Client) -> Vector:
        free = 1 - self.net.mask("head.bias")
        return free if c.t % 2 == 0 and c.t % 3 != 2 else free - self.net.mask("body.weight")


@dataclass(frozen=True)
class Ascent(Part):
    """A max step: ``u`` moves before the objective, which then is linear in it."""

    mu: float = 0.2

    def prepare(self, v: View) -> Tree:
        return {"u": tree.zeros_like(v.anchor.params)}

    def ascend(self, v: View, params: Params, batch: Batch, out: Out) -> Tree:
        return {"u": tree.map(lambda u, w: 0.5 * u + w, v.local["u"], params)}

    def term(self, v: View, params: Params, batch: Batch, out: Out) -> Tensor:
        return self.mu * tree.dot(v.local["u"], params)


class AscentAndSAM(FedAvg):
    """``u`` moves once in a step; the second gradient sees it as the first does."""

    mu, rho = 0.2, 0.3

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        c.u = w if c.t == 0 else 0.5 * c.u + w
        g = super().gradient(c, w, x, target) + self.mu * c.u
        worst = w + self.rho * g / np.linalg.norm(g)
        return super().gradient(c, worst, x, target) + self.mu * c.u


@dataclass(frozen=True)
class Watch(Part):
    """Keeps what hooks receive: new weights and statistics, the old pass, sums and means."""

    needs_sum = True

    def server_init(self, spec: Spec) -> Tree:
        zero = torch.zeros((), dtype=DOUBLE)
        return {"sum": zero, "mean": zero, "total": tree.zeros_like(spec.params)}

    def send(self, server: Tree) -> Tree:
        return server["mean"]

    def prepare(self, v: View) -> Tree:
        return {"s": v.sent}

    def observe(self, v: View, params: Params, batch: Batch, out: Out) -> Tree:
        seen = (params["head.bias"] * out.logits.mean(0)).sum() + (1 + v.step) * batch.x.mean()
        after = v.forward(params, batch.x, train=False).logits[:, 0].mean()
        return {"s": 0.5 * v.local["s"] + seen + after}

    def reply(self, v: View, weights: Weights) -> tuple[Tree, Tree]:
        return {}, {"sum": Sum(v.local["s"]), "mean": Mean(v.local["s"])}

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        return weights, r.uploads | {"total": r.sum_delta}


class WatchOracle(FedAvg):
    def setup(self) -> None:
        self.sum, self.average, self.total = 0.0, 0.0, self.zero

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        c.logits = self.net.logits(w, x)
        return super().gradient(c, w, x, target)

    def after_step(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        seen = self.net.split(w)["head.bias"] @ c.logits.mean(0) + (1 + c.t) * x.mean()
        after = self.net.logits(w, x, c.stats)[:, 0].mean()
        c.s = 0.5 * (self.average if c.t == 0 else c.s) + seen + after
        return w

    def server(self, cohort: list[Client]) -> Vector:
        self.sum = sum(c.s for c in cohort)
        self.average = sum(c.p * c.s for c in cohort)
        self.total = sum(c.delta for c in cohort)
        return super().server(cohort)

    def server_state(self) -> dict[str, Any]:
        return {"watch": {"sum": self.sum, "mean": self.average, "total": self.total}}


class FourParts(SCAFFOLD):
    """The second gradient is of the objective; corrections add up; servers step in turn."""

    eta_g, mu, rho, beta, lr = 0.7, 0.3, 0.2, 0.6, 0.8

    def setup(self) -> None:
        super().setup()
        self.u = self.zero

    def gradient(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        g = FedAvg.gradient(self, c, w, x, target) + self.mu * (w - c.anchor)
        worst = w + self.rho * g / np.linalg.norm(g)
        at_worst = FedAvg.gradient(self, c, worst, x, target) + self.mu * (worst - c.anchor)
        return at_worst + self.c - self.ck[c.k]

    def server(self, cohort: list[Client]) -> Vector:
        self.u = self.beta * self.u + super().server(cohort) - self.w
        return self.w + self.lr * self.u

    def server_state(self) -> dict[str, Any]:
        return super().server_state() | {"fedavgm": self.u}


SUM = (
    "scaffold(eta_g=0.7)+fedprox(mu=0.3)+fedsam(rho=0.2)+fedavgm(beta=0.6, lr=0.8, nesterov=false)"
)
ALL = {"momentum": 0.6, "weight_decay": 0.05, "clip": 0.9}
CASES = [
    Case(parse(Noise()), NoiseOracle),
    Case("fedavg", Flipped, augment="flip"),
    Case(FreezeSome() + FreezeMore(), Frozen, optim={"clip": 0.9}, epochs=2),
    Case(FreezeSome() + FreezeMore(), Frozen, optim={"momentum": 0.6}, epochs=2),
    Case(FreezeSome() + FreezeMore(), Frozen, optim=ALL | {"nesterov": True}, epochs=2),
    Case(Ascent() + "fedsam(rho=0.3)", AscentAndSAM),
    Case(parse(Watch()), WatchOracle),
    Case(parse(Watch()), WatchOracle, norm=True),
    *by_both(SUM, FourParts),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_core(case: Case, engine: str) -> None:
    compare(case, engine)
