"""Two clients with linear classifiers :math:`\\omega(x) = Wx + b` of 8x8 images, and their server.

For methods that distil on the server: the gradients are known in closed form.
"""

from __future__ import annotations

import torch
from torch import nn

from kedge.check.problems import DOUBLE, Problem
from kedge.core import rng, tree
from kedge.core.optim import SGD
from kedge.core.part import Part
from kedge.core.round import Round
from kedge.core.task import make_task
from kedge.core.tree import Weights
from kedge.core.update import Stacked, Totals
from kedge.core.work import LocalWork
from kedge.data.federation import Federation
from kedge.sim.simulation import Simulation

COUNTS = torch.tensor([[6.0, 1.0, 0.0], [2.0, 3.0, 0.0]], dtype=DOUBLE)  # class 2 is absent


def linear_clients() -> Problem:
    """Two clients with the same six images each, a linear classifier, one full-batch step."""
    keys = rng.split(rng.key(5), 4)
    x = rng.normal(keys[0], (6, 1, 8, 8), DOUBLE)
    y = torch.tensor([0, 0, 0, 1, 1, 0])
    rows = torch.arange(6)
    federation = Federation(x, y, [rows, rows], make_task("classification", 3), dtype=DOUBLE)
    module = nn.Sequential()
    module.add_module("stage1", nn.Flatten())
    module.add_module("head", nn.Linear(64, 3, dtype=DOUBLE))
    with torch.no_grad():
        for key, weight in zip(keys[2:], module.parameters(), strict=True):
            weight.copy_(0.5 * rng.normal(key, tuple(weight.shape), DOUBLE))
    return Problem(federation, module, LocalWork(batch=6, steps=1), SGD(lr=0.05))


def server_round_of(part: Part, round: int = 0) -> tuple[Round, Weights]:
    """``(round, global model)`` on a server with two linear clients; the model is not their
    mean."""
    run: Simulation = linear_clients().simulate(part)
    first = run.weights.params
    clients = {
        n: torch.stack(
            [rng.normal(rng.fold(rng.key(k), n), tuple(p.shape), DOUBLE) for k in (1, 2)]
        )
        for n, p in first.items()
    }
    r = Round(
        part=part,
        model=run.bound.model,
        spec=run.bound.spec,
        round=round,
        lr=0.05,
        key=rng.key(9),
        phase="",
        anchor=run.weights,
        server=run.server.slots[part.name],
        uploads={"counts": COUNTS},
        totals=Totals({0: round, 1: round}, stacked=Stacked(weights=Weights(clients, {}))),
    )
    return r, Weights(tree.map(lambda c, w: c.mean(0) + 0.3 * w, clients, first), {})
