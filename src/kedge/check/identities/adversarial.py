"""Identities of the methods in parts/adversarial.py."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.check.oracles import Claim, oracle
from kedge.check.problems import images
from kedge.core import tree
from kedge.core.tree import Params, Weights
from kedge.parts.adversarial import DANN

LR = 0.05


@oracle(DANN)
def three_steps_by_autograd(cls: type[DANN]) -> Iterator[Claim]:
    """Three full-batch steps of client 1. Simultaneous: D descends on CE(D(f(x)), 1), the model on
    CE(y) - lam CE(D(f(x)), 1), each at the other's old value. Alternating: D in steps 0 and 2, the
    model in step 1, against the new D. Detects a flipped sign on either side, lam on D's own step,
    a domain loss that reaches the head, another client's number, and a wrong order."""
    for alternate in (False, True):
        part = cls(lam=0.6, width=5, alternate=alternate)
        run = images(sizes=(5, 9, 14), batch=9, steps=3).simulate(part)
        batches, params, start = run.cohort([1]).batches[0], run.weights.params, cls.name + "/"
        for t in range(3):
            batch = run.federation.clean(batches[t])
            client = torch.ones(len(batch.y), dtype=torch.int64)
            leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
            own = {n.removeprefix(start): p for n, p in leaves.items() if n.startswith(start)}
            net = {n: p for n, p in leaves.items() if not n.startswith(start)}
            out = run.bound.model.forward(Weights(net, {}), batch.x)
            assert out.features is not None
            domain_loss = F.cross_entropy(_three_layers(own, out.features), client)
            model_loss = F.cross_entropy(out.logits, batch.y) - 0.6 * domain_loss
            grads = torch.autograd.grad(domain_loss, list(own.values()), retain_graph=True)
            domain_grads = dict(zip(own, grads, strict=True))
            grads = torch.autograd.grad(model_loss, list(net.values()))
            model_grads = dict(zip(net, grads, strict=True))
            if not alternate or t % 2 == 0:
                params = params | {
                    start + n: own[n].detach() - LR * g for n, g in domain_grads.items()
                }
            if not alternate or t % 2 == 1:
                params = params | {n: net[n].detach() - LR * g for n, g in model_grads.items()}
        run.run_round([1])
        what = "alternating" if alternate else "simultaneous"
        for name, is_own in (("discriminator", True), ("model", False)):
            names = [n for n in params if n.startswith(start) == is_own]
            gap = max(tree.gap(run.weights.params[n], params[n]) for n in names)
            yield Claim(f"error of the {name}, {what}", 0.0, gap, 1e-12)


@oracle(DANN)
def loss_of_an_uninformative_discriminator(cls: type[DANN]) -> Iterator[Claim]:
    """D has one output per client, so with tiny weights its loss is log N; the term is (1 - lam)
    times that."""
    part = cls(lam=0.25, width=5)
    run = images(sizes=(5, 9, 14), batch=5, steps=1).simulate(part)
    weight = run.weights.params[f"{cls.name}/weight2"]
    yield Claim("discriminator outputs", 3.0, float(len(weight)), 0.0)
    small = {n: 1e-9 * p if n.startswith(cls.name) else p for n, p in run.weights.params.items()}
    run.session.server = run.server._replace(weights=run.weights._replace(params=small))
    term = run.run_round([0]).losses[cls.name][0]
    yield Claim("value of the term", 0.75 * math.log(3), float(term), 1e-6)


def _three_layers(p: Params, z: Tensor) -> Tensor:
    hidden = torch.clamp(z @ p["weight0"].T + p["bias0"], min=0)
    hidden = torch.clamp(hidden @ p["weight1"].T + p["bias1"], min=0)
    return hidden @ p["weight2"].T + p["bias2"]
