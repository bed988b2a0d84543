"""Two clients with linear classifiers :math:`\\omega(x) = Wx + b` of 8x8 images, and their server.

For methods that distil on the server: the gradients are known in closed form.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kedge.check.identities.common import close, server_round
from kedge.check.oracles import Claim
from kedge.check.problems import DOUBLE, Problem, linear
from kedge.core import rng, tree
from kedge.core.part import Part
from kedge.core.round import Round
from kedge.core.tree import Params, Weights
from kedge.core.update import Stacked, Totals
from kedge.sim.simulation import Simulation

SMALL: dict[str, Any] = {"batch": 6, "noise": 3, "width": 4}  # settings of a generator
COUNTS = torch.tensor([[6.0, 1.0, 0.0], [2.0, 3.0, 0.0]], dtype=DOUBLE)  # class 2 is absent
SHARE = torch.tensor([[0.75, 0.25, 0.0], [0.25, 0.75, 0.0]], dtype=DOUBLE)  # a_{k,y}


def linear_clients() -> Problem:
    """Two clients with the same six images each, a linear classifier, one full-batch step."""
    keys = rng.split(rng.key(5), 4)
    x = rng.normal(keys[0], (6, 1, 8, 8), DOUBLE)
    weight = 0.5 * rng.normal(keys[2], (3, 64), DOUBLE)
    bias = 0.5 * rng.normal(keys[3], (3,), DOUBLE)
    y = torch.tensor([0, 0, 0, 1, 1, 0])
    return linear(x.repeat(2, 1, 1, 1), y.repeat(2), (6, 6), weight, bias, batch=6)


def server_round_of(part: Part, round: int = 0) -> tuple[Round, Weights]:
    """``(round, global model)`` on a server with two linear clients; the model is not their
    mean."""
    run: Simulation = linear_clients().simulate(part)
    first = run.weights.params
    clients = {
        n: torch.stack([rng.normal(rng.fold(rng.key(k), n), p.shape, DOUBLE) for k in (1, 2)])
        for n, p in first.items()
    }
    totals = Totals({0: round, 1: round}, stacked=Stacked(weights=Weights(clients, {})))
    r = server_round(run, {"counts": COUNTS}, totals, round)
    return r, Weights(tree.map(lambda c, w: c.mean(0) + 0.3 * w, clients, first), {})


def equals_fedavg(part: Part) -> Iterator[Claim]:
    """The claim that a round of clients with the same data is FedAvg's."""
    plain, run = (linear_clients().trained(method).weights for method in ("fedavg", part))
    yield close("difference from FedAvg's model", plain.params, run.params)


def teachers(r: Round) -> list[Params]:
    """The models of the two clients."""
    return [tree.take(r.clients.params, k) for k in range(2)]


def head_gradient(of_logits: Tensor, x: Tensor, params: Params, decay: float) -> Params:
    """Gradient of a mean over samples in a linear model, with weight decay."""
    mean = {"head.weight": of_logits.T @ x / len(x), "head.bias": of_logits.mean(0)}
    return tree.axpy(decay, params, mean)


def pairwise_diversity(z: Tensor, x: Tensor) -> Tensor:
    """The loss of diversity of generated samples, summed pair by pair."""
    total, flat = torch.zeros((), dtype=DOUBLE), x.flatten(1)
    for i in range(len(z)):
        for j in range(len(z)):
            total = total + ((z[i] - z[j]) ** 2).mean() * (flat[i] - flat[j]).abs().mean()
    return torch.exp(-total / len(z) ** 2)
