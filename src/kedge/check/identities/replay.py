"""Identities of the methods in parts/replay.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.check.identities.common import LR, close, gradient, logits_of
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import DOUBLE, Problem, images, linear
from kedge.core import tree
from kedge.core.tree import Params
from kedge.parts.replay import FedReg
from kedge.sim.simulation import Simulation


@oracle(FedReg)
def one_step_by_hand(cls: type[FedReg]) -> Iterator[Claim]:
    """Two classes, p(w x) = sigmoid(w x) for class 0, one sample x = 1 of class 0, w = 1: a step
    leads to some v > w. One ascent step of eta_s = 2 leads to x = -1, as the derivative of -log p(w
    x) in x is negative; w labels it q = p(-1), and the derivative of its loss in w at m = (v + w)/2
    is q - p(-m) > 0. It has the sign of D = v - w, so that k_2 g_2, in one dimension all of D, is
    removed and the model is unchanged. With eta_s = 0 the sample itself is labelled p(1), and the
    derivative p(m) - p(1) > 0 has the same effect. Detects a true label, a derivative at w (which
    is 0), and a flipped sign."""
    for eta_s in (2.0, 0.0):
        run = _sigmoid().simulate(cls(gamma=0.5, ascents=1, eta_s=eta_s, eta_p=0.0))
        start = run.weights.params
        run.run_round()
        yield close(f"change of the model at eta_s = {eta_s:g}", run.weights.params, start)


@oracle(FedReg)
def three_steps_by_autograd(cls: type[FedReg]) -> Iterator[Claim]:
    """All steps on a small network: data by sign-gradient ascent at w with soft labels of w, the
    gradient at gamma v + (1 - gamma) w, both replay gradients at (v + w)/2, the second after the
    first is removed. k_2 is positive; k_3 is positive in some steps and clamped in others."""
    size, ups = {"s": 0.4, "p": 1.0}, 2
    used: set[tuple[str, bool]] = set()
    for k, gamma in ((0, 0.3), (1, 0.7)):
        part = cls(gamma=gamma, ascents=ups, eta_s=size["s"], eta_p=size["p"])
        run = images(sizes=(5, 14), batch=5, steps=3).simulate(part)
        w, batches = run.weights.params, run.cohort([k]).batches[0]
        v = w
        for t in range(3):
            batch = run.federation.clean(batches[t])
            own = F.one_hot(batch.y, 3).to(DOUBLE)
            data = {}
            for kind, eta in size.items():
                x = batch.x
                for _ in range(ups):
                    leaf = x.clone().requires_grad_()
                    loss = F.cross_entropy(logits_of(run, leaf, w), own)
                    grad = torch.autograd.grad(loss, leaf)[0]
                    x = x + eta * grad.sign()
                probs = torch.softmax(logits_of(run, x, w), 1)
                data[kind] = (x, probs if kind == "s" else own)
            v = tree.axpy(-LR, _gradient(run, _between(v, w, gamma), batch.x, own), v)
            delta, midpoint = tree.sub(v, w), _between(v, w, 0.5)
            for kind, (x, y) in data.items():
                grads = _gradient(run, midpoint, x, y)
                share = float(tree.dot(delta, grads) / tree.sq_norm(grads))
                used.add((kind, share > 0))
                taken = tree.scale(grads, max(0.0, share))
                v, delta = tree.sub(v, taken), tree.sub(delta, taken)
        run.run_round([k])
        yield close(f"error of the model of client {k}", run.weights.params, v, 1e-11)
    yield Claim("sign cases of k_2 and k_3", 3.0, float(len(used)), 0.0)


def _gradient(run: Simulation, params: Params, x: Tensor, target: Tensor) -> Params:
    return gradient(params, lambda p: F.cross_entropy(logits_of(run, x, p), target))[1]


def _between(v: Params, w: Params, share: float) -> Params:
    return {n: share * v[n] + (1 - share) * w[n] for n in v}


def _sigmoid() -> Problem:
    """Logits (x/2, -x/2), so p = sigmoid(x); a gradient changes both rows by half each."""
    return linear(torch.ones(1, 1), torch.tensor([0]), [1], torch.tensor([[0.5], [-0.5]]))
