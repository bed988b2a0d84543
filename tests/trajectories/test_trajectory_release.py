"""Trajectories of methods that change what leaves a client, or what the server sees.

Normal numbers come from ``kedge.core.rng``, one key for each leaf, in the order of the leaves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import Tensor

from kedge.core import rng
from tests.trajectories.problem import DOUBLE, ENGINES, WIDTH, Case, by_both, compare
from tests.trajectories.simulator import Client, FedAvg, Vector
from tests.trajectories.test_trajectory_drift import SCAFFOLD


class Noise(FedAvg):
    """Normal numbers in the shapes of the leaves that travel."""

    def names(self) -> list[str]:
        travel = self.net.split(self.public)
        return [name for name in self.net.shapes if travel[name].all()]

    def leaves(self, key: Tensor, first: int) -> Vector:
        """For a vector of weights; its leaves have the numbers from ``first`` on."""
        shapes = ((i, n, self.net.shapes[n]) for i, n in enumerate(self.names(), first))
        return self.net.join({n: normal(key, i, *shape) for i, n, shape in shapes})


def normal(key: Tensor, leaf: int, *shape: int) -> Vector:
    drawn: Vector = rng.normal(rng.fold(key, leaf), shape, DOUBLE).numpy()
    return drawn


class Clip(FedAvg):
    """The update and the change of BatchNorm's statistics are one vector of norm S at most."""

    norm: float

    def setup(self) -> None:
        super().setup()
        self.factors: list[float] = []

    def clip(self, c: Client, uploaded: Vector | float = 0.0) -> float:
        """Clip what the client sends; the factor, which is that of an upload, too."""
        moved = [] if self.stats is None else [c.stats[i] - self.stats[i] for i in (0, 1)]
        squares = [np.sum(v**2) for v in (c.delta, uploaded, *moved)]
        factor = min(1.0, self.norm / np.sqrt(sum(squares)))
        self.factors.append(factor)
        c.delta = factor * c.delta
        if self.stats is not None:
            c.stats = tuple(old + factor * m for old, m in zip(self.stats, moved, strict=True))
        return factor

    def reply(self, c: Client) -> None:
        super().reply(c)
        self.clip(c)

    def finish(self) -> None:
        assert min(self.factors) < 1
        assert np.ptp(self.factors) > 0.1, "every client is clipped alike"


class Gauss(Noise):
    """The client adds noise to its update and to BatchNorm's statistics."""

    std: float

    def add_noise(self, c: Client) -> None:
        key, count = c.key("gauss", "release"), len(self.names())
        c.delta = c.delta + self.std * self.leaves(key, 0)
        if self.stats is not None:
            z = [normal(key, count + i, WIDTH) for i in (0, 1)]
            c.stats = tuple(old + self.std * z[i] for i, old in enumerate(c.stats))

    def reply(self, c: Client) -> None:
        super().reply(c)
        self.add_noise(c)


class ClipGauss(Gauss, Clip):
    """Clips, then adds noise."""


class GaussClip(Clip, Gauss):
    """Adds noise, then clips it, too."""


class ScaffoldClipGauss(ClipGauss, SCAFFOLD):
    """The change of c_k is uploaded times the client's share; c_k itself stays as it is."""

    def reply(self, c: Client) -> None:
        SCAFFOLD.reply(self, c)
        factor = self.clip(c, c.share * c.change)
        self.add_noise(c)
        z = self.leaves(c.key("gauss", "release"), len(self.names()))
        c.change = factor * c.change + self.std * z / c.share


class CentralGauss(Noise):
    """The server adds noise to the sums; leaf 0 is the sum of the client weights."""

    std: float
    clients = 0.0

    def server(self, cohort: list[Client]) -> Vector:
        key = rng.fold(self.world.server_key(self.round_number, "receive"), "centralgauss")
        weight, count = sum(c.weight for c in cohort), len(self.names())
        if self.stats is not None:  # the mean of the statistics is that of those who came
            first = cohort[0]
            z = [self.std * normal(key, 1 + count + i, WIDTH) / first.weight for i in (0, 1)]
            first.stats = tuple(old + z[i] for i, old in enumerate(first.stats))
        self.spread(cohort, key, 2 + count)
        if self.clients:
            weight = weight * self.clients / len(cohort)
        total = sum(c.weight * c.delta for c in cohort) + self.std * self.leaves(key, 1)
        return self.w + total / weight

    def spread(self, cohort: list[Client], key: Tensor, first: int) -> None:
        """Noise on what clients upload; its leaves have the numbers from ``first`` on."""


class ScaffoldCentral(CentralGauss, SCAFFOLD):
    def spread(self, cohort: list[Client], key: Tensor, first: int) -> None:
        total = sum(c.share * c.change for c in cohort) + self.std * self.leaves(key, first)
        self.c = self.c + total / self.N


BOTH: dict[str, Any] = {"norm": 0.9, "std": 0.05}
TEXT = "clip(norm=0.9)+gauss(std=0.05)"
CASES = [
    *by_both("clip", Clip, {"norm": 0.6}),
    Case("clip", Clip, {"norm": 0.6}, {"momentum": 0.6}),
    Case("clip", Clip, {"norm": 0.9}, norm=True),
    Case("clip", Clip, {"norm": 0.6}, plus="+fedper"),
    *by_both("gauss", Gauss, {"std": 0.05}),
    Case("gauss", Gauss, {"std": 0.02}, norm=True),
    Case("gauss", Gauss, {"std": 0.05}, plus="+fedper"),
    Case(TEXT, ClipGauss, options=BOTH),
    Case("gauss(std=0.05)+clip(norm=0.9)", GaussClip, options=BOTH),
    *by_both(f"scaffold+{TEXT}", ScaffoldClipGauss, options=BOTH),
    *by_both("centralgauss", CentralGauss, {"std": 0.05}),
    *by_both("centralgauss", CentralGauss, {"std": 0.05, "clients": 2.5}),
    Case("centralgauss", CentralGauss, {"std": 0.05}, norm=True),
    Case("centralgauss", CentralGauss, {"std": 0.05}, plus="+fedper"),
    Case("scaffold+centralgauss(std=0.05)", ScaffoldCentral, options={"std": 0.05}),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_release(case: Case, engine: str) -> None:
    compare(case, engine)
