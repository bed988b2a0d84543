"""What many identities share: the standard pair of quadratics, autograd by hand, comparisons.

Most identities run on quadratic clients :math:`f_k(w) = h_k(w - a_k)^2/2`, where :math:`\\tau`
gradient steps from w give :math:`a_k + r_k(w - a_k)` with :math:`r_k = (1 - \\eta h_k)^\\tau`, so
that fixed points are known in closed form. The standard pair is h = (1, 10), a = (0, 1),
:math:`\\eta` = 0.05, :math:`\\tau` = 10.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.check.oracles import Claim
from kedge.check.problems import Problem, minimum, position, quadratics
from kedge.core import tree
from kedge.core.method import Method
from kedge.core.part import Part
from kedge.core.task import Batch
from kedge.core.tree import Params, Tree, Weights
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


def updates(
    values: Sequence[float], h: float, lr: float, copies: tuple[int, ...] | None
) -> Problem:
    """Quadratic clients whose first updates are these values; each takes one step."""
    optima = tuple(u / (lr * h) for u in values)
    return quadratics((h,) * len(optima), optima, lr, steps=1, copies=copies)


def positions(run: Simulation, *expected: float) -> Iterator[Claim]:
    """Claims about w after each of the next rounds."""
    for w in expected:
        run.run_round()
        yield Claim(f"w at t = {run.round}", w, position(run))


def head(params: Tree) -> float:
    """The weight of the quadratics in a tree of parameters."""
    return float(params["head.weight"])


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
    model = run.bound.model
    return lambda p: F.cross_entropy(model.forward(Weights(p, {}), batch.x, "eval").logits, batch.y)


def first_batch(run: Simulation, client: int, t: int = 0) -> Batch:
    """A client's batch of step ``t`` of the current round."""
    return run.federation.clean(run.cohort([client]).batches[0, t])


def features_of(run: Simulation, x: Tensor, weights: Weights | None = None) -> Tensor:
    """Features in evaluation mode, at the global model by default."""
    features = run.bound.model.forward(weights or run.weights, x, "eval").features
    assert features is not None
    return features


def linear_of(params: Params, x: Tensor) -> Tensor:
    """Outputs of a linear model."""
    return F.linear(x.flatten(1), params["head.weight"], params["head.bias"])


def layers(p: Tree, z: Tensor) -> Tensor:
    """Linear layers weight0, bias0, weight1, ... with ReLU between them."""
    last = sum(name.startswith("weight") for name in p) - 1
    for i in range(last):
        z = torch.clamp(z @ p[f"weight{i}"].T + p[f"bias{i}"], min=0)
    return z @ p[f"weight{last}"].T + p[f"bias{last}"]
