"""Identities of the methods in parts/personal.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from kedge.check.identities.common import LR
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import images
from kedge.core.tree import Weights
from kedge.parts.personal import FedRep


@oracle(FedRep)
def head_first_then_body(cls: type[FedRep]) -> Iterator[Claim]:
    """Two full-batch steps: the head takes a gradient step with the old body, then the body with
    the new head; the server's head is unchanged."""
    run = images(sizes=(5, 5), batch=5, steps=2).simulate(cls(head_share=0.5))
    start = run.weights.params
    batch = run.federation.clean(run.federation.rows[:5])
    head = set(run.bound.model.head_names())
    params = dict(start)
    for names in (head, set(start) - head):
        leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
        out = run.bound.model.forward(Weights(leaves, {}), batch.x, "eval").logits
        grads = torch.autograd.grad(F.cross_entropy(out, batch.y), list(leaves.values()))
        step = dict(zip(leaves, grads, strict=True))
        params = {n: p - LR * step[n] if n in names else p for n, p in params.items()}
    run.run_round([0])
    own = run.store.rows["private"]["params"]
    moved = max(float((run.weights.params[n] - start[n]).abs().max()) for n in head)
    yield Claim("change of the server's head", 0.0, moved, 0.0)
    yield Claim(
        "error of the client's head",
        0.0,
        max(float((own[n][0] - params[n]).abs().max()) for n in head),
        1e-12,
    )
    body = max(float((run.weights.params[n] - params[n]).abs().max()) for n in set(start) - head)
    yield Claim("error of the body", 0.0, body, 1e-12)
