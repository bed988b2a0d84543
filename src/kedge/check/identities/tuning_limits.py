"""Identities of the limits on FLBoost's fine-tuning: start, warm-up, bound, confidence, statistics.

Most of them play one iteration on the server with two linear clients, as in
:mod:`kedge.check.identities.flboost`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from kedge.check.identities.flboost import ONE, SMALL
from kedge.check.identities.two_linear import COUNTS, server_round_of
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import DOUBLE, images
from kedge.core import tree
from kedge.core.tree import Weights
from kedge.parts.flboost import FLBoost


@oracle(FLBoost)
def start_and_warmup(cls: type[FLBoost]) -> Iterator[Claim]:
    """With start = 3 and warmup = 2, round 2 changes neither player, rounds 3 and 4 train the
    generator as if there were no student's steps, and round 5 is like one without the two."""
    part = cls(**ONE, start=3, warmup=2)
    r, weights = server_round_of(part, round=2)
    new, slot = part.server_step(r, weights)
    yield Claim("change before the start", 0.0, _changes(new, weights, slot, r.server), 0.0)
    for round, other in (
        (3, cls(**ONE | {"student_steps": 0})),
        (4, cls(**ONE | {"student_steps": 0})),
        (5, cls(**ONE)),
    ):
        r, weights = server_round_of(part, round=round)
        new, slot = part.server_step(r, weights)
        expected, other_slot = other.server_step(r, weights)
        gap = _changes(new, expected, slot, other_slot)
        yield Claim(f"error of round {round}", 0.0, gap, 0.0)
    yield Claim("the student moves in round 5", 1.0, float(tree.gap(new, weights) > 1e-4), 0.0)


@oracle(FLBoost)
def bounded_fine_tuning(cls: type[FLBoost]) -> Iterator[Claim]:
    """Let d be the fine-tuning and u the round's update. A bound of |d| / 2|u| halves d, and one of
    2 |d| / |u| leaves it; 0 keeps the aggregated model. Detects norms of the weights themselves, a
    bound per leaf, and squared norms."""
    r, weights = server_round_of(cls(**ONE))
    free = tree.sub(cls(**ONE).server_step(r, weights)[0].params, weights.params)
    update = tree.sub(weights.params, r.anchor.params)
    norms = [torch.cat([x.flatten() for x in t.values()]).norm() for t in (free, update)]
    ratio = float(norms[0] / norms[1])
    for times, expected in ((0.0, 0.0), (0.5, 0.5), (2.0, 1.0)):
        new = cls(**ONE, bound=times * ratio).server_step(r, weights)[0].params
        gap = tree.gap(tree.sub(new, weights.params), tree.scale(free, expected))
        yield Claim(f"error of a fine-tuning bounded at {times} of its norm", 0.0, gap, 1e-13)


@oracle(FLBoost)
def doubtful_samples_do_not_count(cls: type[FLBoost]) -> Iterator[Claim]:
    """Let q_b = sum_k a_{k,y} t_k(y) of each of six samples. With a confidence between two of them,
    the gradient is the mean over those above. Above all q_b there is no step, and no weight decay.
    Detects a mean over the batch, and clients that are not weighted."""
    r, weights = server_round_of(cls(**ONE))
    z, y = (drawn[0] for drawn in cls(**ONE)._draw(r.key, COUNTS.sum(0), DOUBLE))
    generator = Weights(**cls(**ONE).server_step(r, weights)[1])
    x = cls(**ONE)._generator(r.spec)(generator, z, y, train=False)[0].flatten(1)
    a = (COUNTS / COUNTS.sum(0).clamp_min(1))[:, y]
    w = weights.params
    taught = torch.zeros(len(y), 3, dtype=DOUBLE)
    for k in range(2):
        c = tree.take(r.clients.params, k)
        taught += a[k][:, None] * torch.softmax(F.linear(x, c["head.weight"], c["head.bias"]), 1)
    q = taught[torch.arange(len(y)), y]
    gaps = (torch.softmax(F.linear(x, w["head.weight"], w["head.bias"]), 1) - taught) / 3  # over C
    ordered = q.sort().values
    for number in range(1, 6):
        confidence = float(ordered[-number - 1 :][:2].mean())
        kept = q >= confidence
        expected = {
            "head.weight": gaps[kept].T @ x[kept] / number + 1e-3 * w["head.weight"],
            "head.bias": gaps[kept].sum(0) / number + 1e-3 * w["head.bias"],
        }
        new = cls(**ONE, confidence=confidence).server_step(r, weights)[0].params
        gap = tree.gap(tree.axpy(-0.05, expected, w), new)
        yield Claim(f"error of a step with {number} trusted samples", 0.0, gap, 1e-13)
    none = cls(**ONE, confidence=min(1.0, float(q.max()) + 1e-6)).server_step(r, weights)[0]
    yield Claim("change without a trusted sample", 0.0, tree.gap(none, weights), 0.0)
    every = cls(**ONE, confidence=0.0).server_step(r, weights)[0]
    gap = tree.gap(every, cls(**ONE).server_step(r, weights)[0])
    yield Claim("error of a step on all samples", 0.0, gap, 1e-13)


@oracle(FLBoost)
def statistics_of_the_clients(cls: type[FLBoost]) -> Iterator[Claim]:
    """Normalisation by the batch does not read running statistics. With a fixed generator,
    student_bn = batch therefore gives the parameters of student_bn = train, and the statistics of
    FedAvg. Detects evaluation mode, and statistics of generated images."""
    options: dict[str, Any] = SMALL | {"steps": 2, "student_steps": 2, "generator_steps": 0}
    runs = [
        images(norm="bn").simulate(m)
        for m in ("fedavg", cls(**options, student_bn="batch"), cls(**options, student_bn="train"))
    ]
    for run in runs:
        run.run_round()
    plain, batch, train = (run.weights for run in runs)
    gap = tree.gap(batch.params, train.params)
    yield Claim("difference of the parameters from those of training mode", 0.0, gap, 0.0)
    gap = tree.gap(batch.buffers, plain.buffers)
    yield Claim("difference of the statistics from FedAvg's", 0.0, gap, 0.0)
    moved = float(tree.gap(train.buffers, plain.buffers) > 1e-3)
    yield Claim("training mode moves the statistics", 1.0, moved, 0.0)


def _changes(new: Weights, weights: Weights, slot: Any, other: Any) -> float:
    """Largest change of the global model or of the generator."""
    return max(tree.gap(new, weights), tree.gap(slot, other))
