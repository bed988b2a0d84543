"""Trajectories of methods that keep layers or a whole model on the client.

Private leaves are ``self.own[k]``; :func:`problem.compare` compares them, personal weights too.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tests.trajectories.problem import ENGINES, Case, by_both, compare, statistics
from tests.trajectories.simulator import Client, FedAvg, Stats, Vector


class Private(FedAvg):
    """FedPer, FedBN, Local: the personal model is the global one with the client's own leaves."""

    def personal(self, k: int) -> Vector:
        return np.where(self.public, self.w, self.own[k])


class FedRep(Private):
    """The head's steps come first, then those of the body."""

    head_share: float

    def trainable(self, c: Client) -> Vector:
        head_steps = int(Fraction(str(self.head_share)) * c.steps)
        head = self.net.mask("head")
        return head if c.t < head_steps else 1 - head


class Ditto(FedAvg):
    """The personal model u takes plain SGD steps on the same batches."""

    lam: float

    def setup(self) -> None:
        self.u, self.u_stats, self.u_seen = [self.w] * self.N, [self.stats] * self.N, [0] * self.N

    def after_step(self, c: Client, w: Vector, x: Vector, target: Vector) -> Vector:
        u = self.u[c.k]
        if self.net.norm:
            self.u_stats[c.k] = self.moved(self.u_stats[c.k], self.net.linear(u, x))
            self.u_seen[c.k] += 1
        g = FedAvg.gradient(self, c, u, x, target) + self.lam * (u - c.anchor)
        self.u[c.k] = u - c.lr * g
        return w

    def client_state(self, k: int) -> dict[str, Any]:
        buffers = statistics(self.u_stats[k], self.u_seen[k])
        return {"ditto": {"params": self.u[k], "buffers": buffers}}

    def personal(self, k: int) -> Vector:
        return self.u[k]

    def personal_stats(self, k: int) -> Stats:
        return self.u_stats[k]

    def personal_seen(self, k: int) -> int:
        return self.u_seen[k]


class FineTune(FedAvg):
    """The personal model is the client's last trained one, or the global one before that."""

    def setup(self) -> None:
        self.first, self.last = (self.w, self.stats, 0), {}

    def reply(self, c: Client) -> None:
        self.last[c.k] = c.w, c.stats, self.seen + c.steps

    def client_state(self, k: int) -> dict[str, Any]:
        w, stats, seen = self.last.get(k, self.first)
        state = {"params": self.public * w, "buffers": statistics(stats, seen)}
        return {"finetune": state | {"seen": float(k in self.last)}}

    def personal(self, k: int) -> Vector:
        w, _, _ = self.last.get(k, (self.w, None, 0))
        return np.where(self.public, w, self.own[k])

    def personal_stats(self, k: int) -> Stats:
        return self.last[k][1] if k in self.last else self.stats

    def personal_seen(self, k: int) -> int:
        return self.last[k][2] if k in self.last else self.seen


ALL = {"momentum": 0.6, "weight_decay": 0.05, "clip": 0.9}
HEAD, BN = {"private": "head"}, {"private": "norm", "private_stats": True}
LOCAL = {"private": "", "private_stats": True}
CASES = [
    *by_both("fedper", Private, options=HEAD),
    Case("fedper", Private, optim=ALL, options=HEAD, norm=True),
    Case("fedrep", FedRep, {"head_share": 0.4}, options=HEAD, epochs=2),
    Case("fedrep", FedRep, {"head_share": 0.7}, ALL, options=HEAD, epochs=2),
    Case("fedbn", Private, optim=ALL, options=BN, norm=True),
    *by_both("fedbn", Private, options=BN, norm=True),
    Case("local", Private, options=LOCAL),
    Case("local", Private, optim=ALL, options=LOCAL, norm=True),
    Case("ditto", Ditto, {"lam": 0.3}),
    Case("ditto", Ditto, {"lam": 0.3}, ALL),
    Case("ditto", Ditto, {"lam": 0.3}, norm=True),
    Case("finetune", FineTune),
    Case("finetune", FineTune, optim=ALL, norm=True),
    Case("finetune", FineTune, plus="+fedper"),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_personal(case: Case, engine: str) -> None:
    compare(case, engine)
