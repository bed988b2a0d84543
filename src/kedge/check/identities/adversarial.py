"""Identities of the methods in parts/adversarial.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.check.identities.common import (
    close,
    cross_entropy,
    descended,
    features_of,
    layers,
    picked,
)
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import images
from kedge.core import tree
from kedge.core.task import Batch
from kedge.core.tree import Params
from kedge.parts.adversarial import DANN
from kedge.sim.simulation import Simulation


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
            own = tree.under(params, cls.name)
            net = {n: p for n, p in params.items() if not n.startswith(start)}
            new: Params = {}
            if not alternate or t % 2 == 0:
                step = descended(own, partial(_domain_loss, run, batch, net))
                new |= {start + n: p for n, p in step.items()}
            if not alternate or t % 2 == 1:
                new |= descended(net, partial(_model_loss, run, batch, own))
            params = params | new
        run.run_round([1])
        what = "alternating" if alternate else "simultaneous"
        domain = {n for n in params if n.startswith(start)}
        for name, names in (("discriminator", domain), ("model", set(params) - domain)):
            found, expected = (picked(w, names) for w in (run.weights.params, params))
            yield close(f"error of the {name}, {what}", found, expected)


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


def _domain_loss(run: Simulation, batch: Batch, net: Params, own: Params) -> Tensor:
    """Cross-entropy of the discriminator's answer, client 1."""
    features = features_of(run, batch.x, net)
    return F.cross_entropy(layers(own, features), torch.ones(len(batch.y), dtype=torch.int64))


def _model_loss(run: Simulation, batch: Batch, own: Params, net: Params) -> Tensor:
    return cross_entropy(run, batch)(net) - 0.6 * _domain_loss(run, batch, net, own)
