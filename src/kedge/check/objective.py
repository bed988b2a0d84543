"""The law *objective*: at its fixed point a drift correction minimises the run's objective.

The objective of a run is the mean of the clients' losses with the run's client weights. FedAvg with
several local steps has another fixed point. A part that declares ``solves`` claims that its own is
the minimum, or (``solves_for = "head"``) the minimum in the head and FedAvg's fixed point in the
layers before it.

Problems are small enough for a closed form. All samples of a client are equal, so that every batch
has the client's full gradient, and a fixed point exists under partial participation. Five clients
have 1 to 6 samples and take as many steps, three of them in each round.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kedge.check.oracles import Claim
from kedge.check.problems import (
    DOUBLE,
    Problem,
    fedavg_point,
    federation_of,
    linear,
    minimum,
    position,
    quadratics,
)
from kedge.core import tree
from kedge.core.method import Method
from kedge.core.optim import SGD
from kedge.core.part import Part
from kedge.core.work import LocalWork
from kedge.session.sampler import Uniform
from kedge.sim.simulation import Simulation

SIZES = (1, 2, 3, 4, 6)
PER_ROUND = 3
CURVATURES = ((1.0, 8.0, 3.0, 5.0, 2.0), (6.0, 1.0, 4.0, 2.0, 7.0))  # of body and head
OPTIMA = ((0.0, 1.0, -0.5, 2.0, 0.7), (1.0, -1.0, 0.5, 0.0, 1.5))
LABELS = (0, 1, 2, 0, 1)  # of the clients, in the problem of classification
PAIR = (1, 3)  # samples of the clients in the table of python -m bench.conformance
TOLERANCE = 1e-8
MAX_ROUNDS, CHECK_EVERY = 1000, 20


def fixed_points(part: Part, engine: str, weighting: str) -> list[Claim]:
    """Run a part that declares ``solves`` until it settles, and compare with closed forms."""
    part = dataclasses.replace(part, **part.solves or {})
    if "regression" not in part.tasks:
        return _of_classes(part, engine, weighting)
    lr = 0.05
    run = blocks(lr).simulate(part, engine, per_round=PER_ROUND, weighting=weighting)
    if part.solves_for != "all":  # the mean of biased updates settles with all clients only
        run.session.sampler = Uniform()
    settle(run)
    points = []
    for i, (name, what) in enumerate((("body.weight", "the body"), ("head.weight", "the head"))):
        biased = part.solves_for == "head" and name == "body.weight"
        h, a, weights = CURVATURES[i], OPTIMA[i], client_weights(SIZES, weighting)
        expected = fedavg_point(h, a, lr, SIZES, weights) if biased else minimum(h, a, weights)
        points.append(Claim(what, expected, float(run.weights.params[name]), TOLERANCE))
    return points


def _of_classes(part: Part, engine: str, weighting: str) -> list[Claim]:
    """All clients have the same input and client k only the label y_k: at the minimum the softmax
    is the mean of the labels with the run's client weights."""
    run = one_label_each().simulate(part, engine, per_round=PER_ROUND, weighting=weighting)
    settle(run)
    softmax = run.weights.params["head.weight"][:, 0].softmax(0).tolist()
    weights = client_weights(SIZES, weighting)
    points = []
    for c in range(3):
        expected = sum(p for p, y in zip(weights, LABELS, strict=True) if y == c) / sum(weights)
        points.append(Claim(f"the probability of class {c}", expected, softmax[c], TOLERANCE))
    return points


def settle(run: Simulation) -> None:
    """Run rounds until the model does not change over so many that all clients took part."""
    for _ in range(MAX_ROUNDS // CHECK_EVERY):
        before = run.weights
        for _ in range(CHECK_EVERY):
            run.run_round()
        if tree.gap(before, run.weights) < TOLERANCE / 100:
            return


def solved(method: Part | Method) -> tuple[str, float]:
    """Which objective a method solves on two quadratics of 1 and 3 samples: ``(name, final w)``."""
    run = quadratics(copies=PAIR).simulate(method)
    settle(run)
    return name_objective(position(run)), position(run)


def name_objective(w: float, tolerance: float = 1e-4) -> str:
    """``weighted`` or ``unweighted`` if w is the minimum of that sum of the two quadratics, else
    ``neither``."""
    h, a = (1.0, 10.0), (0.0, 1.0)
    for name, weights in (("weighted", PAIR), ("unweighted", (1, 1))):
        if abs(w - minimum(h, a, weights)) <= tolerance:
            return name
    return "neither"


class _Column(nn.Module):
    """Multiply one column of the input by a weight, from 0."""

    def __init__(self, column: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=DOUBLE))
        self.column = column

    def forward(self, x: Tensor) -> Tensor:
        scaled = x[:, self.column] * self.weight
        return torch.stack([scaled, x[:, 1]] if self.column == 0 else [x[:, 0], scaled], 1)


def blocks(lr: float) -> Problem:
    r"""Quadratics in two separable blocks, :math:`f_k(u, v) = (h_k (u - a_k)^2 + h'_k (v -
    a'_k)^2)/2`: u in the body, v in the head, both from 0."""
    owner = torch.repeat_interleave(torch.tensor(SIZES))
    x = torch.tensor(CURVATURES, dtype=DOUBLE).T[owner].sqrt()  # [samples, 2]
    y = x * torch.tensor(OPTIMA, dtype=DOUBLE).T[owner]
    module = nn.Sequential(OrderedDict(body=_Column(0), head=_Column(1)))
    data = federation_of(x, y, SIZES, "regression", 2)
    return Problem(data, module, LocalWork(batch=1), SGD(lr=lr))


def one_label_each() -> Problem:
    """Softmax regression on a constant input; every client has samples of one class only."""
    y = torch.repeat_interleave(torch.tensor(LABELS), torch.tensor(SIZES))
    return linear(torch.ones(len(y), 1), y, SIZES, torch.zeros(3, 1), steps=None, lr=0.5)


def client_weights(sizes: Sequence[int], weighting: str) -> list[float]:
    """Client weights, not normalised."""
    return [float(n) if weighting == "size" else 1.0 for n in sizes]
