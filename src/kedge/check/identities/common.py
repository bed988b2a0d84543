"""What many identities share: the standard pair of quadratics, autograd by hand, comparisons.

Most identities run on quadratic clients :math:`f_k(w) = h_k(w - a_k)^2/2`, where :math:`\\tau`
gradient steps from w give :math:`a_k + r_k(w - a_k)` with :math:`r_k = (1 - \\eta h_k)^\\tau`, so
that fixed points are known in closed form. The standard pair is h = (1, 10), a = (0, 1),
:math:`\\eta` = 0.05, :math:`\\tau` = 10.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.check.oracles import Claim
from kedge.check.problems import Problem, minimum, position, quadratics
from kedge.core import rng, tree
from kedge.core.method import Method
from kedge.core.model import Mode, Pass
from kedge.core.part import Part
from kedge.core.round import Round
from kedge.core.task import Batch
from kedge.core.tree import Params, Tree, Weights
from kedge.core.update import Totals
from kedge.sim.simulation import Simulation

H, A, LR, STEPS = (1.0, 10.0), (0.0, 1.0), 0.05, 10
BEST = minimum(H, A)  # 10/11


def pair(steps: int | None = 1, copies: tuple[int, ...] | None = None) -> Problem:
    """The standard pair of quadratics, by default with one step."""
    return quadratics(H, A, LR, steps, copies)


def run_quadratics(method: Part | Method | str, rounds: int = 60) -> Simulation:
    """A simulation of the standard pair of quadratics, after ``rounds`` rounds."""
    return pair(STEPS).trained(method, rounds=rounds)


def after_steps(k: int, w: float, steps: int = STEPS) -> float:
    """Where client ``k`` of the standard pair ends its gradient steps from w."""
    return A[k] + (1 - LR * H[k]) ** steps * (w - A[k])


def updating(
    values: Sequence[float], h: float, lr: float, copies: tuple[int, ...] | None
) -> Problem:
    """Quadratic clients whose first updates are these values; each takes one step."""
    optima = tuple(u / (lr * h) for u in values)
    return quadratics((h,) * len(optima), optima, lr, steps=1, copies=copies)


def moved(run: Simulation, clients: Sequence[int] | None = None) -> Weights:
    """The change of the global model in one round."""
    before = run.weights
    run.run_round(clients)
    change: Weights = tree.sub(run.weights, before)
    return change


def positions(run: Simulation, *expected: float) -> Iterator[Claim]:
    """Claims about w after each of the next rounds."""
    for w in expected:
        run.run_round()
        yield Claim(f"w at t = {run.round}", w, position(run))


def head(params: Tree) -> float:
    """The weight of the quadratics in a tree of parameters."""
    return float(params["head.weight"])


def picked(params: Tree, names: Iterable[str]) -> Tree:
    """The leaves of these names."""
    return {n: params[n] for n in names}


def close(what: str, a: Tree, b: Tree, tolerance: float = 1e-12) -> Claim:
    """The claim that two trees are equal; it shows their largest difference."""
    return Claim(what, 0.0, tree.gap(a, b), tolerance)


def leaves_of(params: Params) -> Params:
    """Copies of parameters that autograd differentiates."""
    return {n: p.detach().clone().requires_grad_() for n, p in params.items()}


def gradient(params: Params, loss: Callable[[Params], Tensor]) -> tuple[Tensor, Params]:
    """A loss of named parameters and its gradient, by autograd."""
    leaves = leaves_of(params)
    value = loss(leaves)
    grads = torch.autograd.grad(value, list(leaves.values()))
    return value.detach(), dict(zip(leaves, grads, strict=True))


def descended(params: Params, *losses: Callable[[Params], Tensor], lr: float = LR) -> Params:
    """The parameters after one gradient step on a sum of losses."""
    grads = gradient(params, lambda p: torch.stack([loss(p) for loss in losses]).sum())[1]
    return tree.map(lambda p, g: p - lr * g, params, grads)


def cross_entropy(run: Simulation, batch: Batch) -> Callable[[Params], Tensor]:
    """The loss on a batch of a network without BatchNorm."""
    return lambda params: F.cross_entropy(logits_of(run, batch.x, params), batch.y)


def first_batch(run: Simulation, client: int, t: int = 0) -> Batch:
    """A client's batch of step ``t`` of the current round."""
    return run.federation.clean(run.cohort([client]).batches[0, t])


def samples_of(run: Simulation, client: int) -> Batch:
    """All samples of a client."""
    return run.federation.clean(run.federation.rows.split(run.federation.sizes)[client])


def features_of(
    run: Simulation, x: Tensor, weights: Weights | Params | None = None, mode: Mode = "eval"
) -> Tensor:
    """Features, by default in evaluation mode and at the global model."""
    features = _forward(run, x, weights, mode).features
    assert features is not None
    return features


def logits_of(run: Simulation, x: Tensor, weights: Weights | Params | None = None) -> Tensor:
    """Logits in evaluation mode, at the global model by default."""
    return _forward(run, x, weights).logits


def _forward(
    run: Simulation, x: Tensor, weights: Weights | Params | None, mode: Mode = "eval"
) -> Pass:
    weights = Weights(weights, {}) if isinstance(weights, dict) else weights or run.weights
    return run.bound.model.forward(weights, x, mode)


def linear_of(params: Params, x: Tensor) -> Tensor:
    """Outputs of a linear model."""
    return F.linear(x.flatten(1), params["head.weight"], params["head.bias"])


def layers(p: Tree, z: Tensor) -> Tensor:
    """Linear layers weight0, bias0, weight1, ... with ReLU between them."""
    last = sum(name.startswith("weight") for name in p) - 1
    for i in range(last):
        z = torch.clamp(z @ p[f"weight{i}"].T + p[f"bias{i}"], min=0)
    return z @ p[f"weight{last}"].T + p[f"bias{last}"]


def server_round(run: Simulation, uploads: Tree, totals: Totals, round: int = 0) -> Round:
    """What the only part of a method receives on the server."""
    part = run.bound.parts[0]
    return Round(
        part=part,
        model=run.bound.model,
        spec=run.bound.spec,
        round=round,
        lr=LR,
        key=rng.key(9),
        phase="",
        anchor=run.weights,
        server=run.server.slots.get(part.name, {}),
        uploads=uploads,
        totals=totals,
    )
