"""Identities of the methods in parts/logits.py.

They run on a linear model that starts at zero, with no inputs but its bias, so that all logits are
zero and what a method adds to them is all there is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from kedge.check.oracles import Claim, oracle
from kedge.check.problems import DOUBLE, Problem
from kedge.core.optim import SGD
from kedge.core.part import Part
from kedge.core.task import make_task
from kedge.core.work import LocalWork
from kedge.data.federation import Federation
from kedge.parts.logits import FedLC, LogitAdjust


@oracle(FedLC)
def margins_by_hand(cls: type[FedLC]) -> Iterator[Claim]:
    """With 16, 1 and 81 samples the margins are tau (1/2, 1, 1/3). At zero logits the softmax is
    that of the negative margins, the loss is its mean -log over the samples, and one full-batch
    step at learning rate 1 changes the bias by class shares - softmax. Detects a flipped sign,
    another power, margins from shares instead of counts, and a margin of the true class alone."""
    for tau in (1.0, 0.3):
        q = _softmax([-tau / 2, -tau, -tau / 3])
        yield from _claims(cls(tau=tau), (16, 1, 81), q, f"tau = {tau:g}")


@oracle(FedLC)
def absent_class_gets_no_gradient(cls: type[FedLC]) -> Iterator[Claim]:
    """n = 0 has an infinite margin: the class drops out of the softmax, and its bias is
    unchanged."""
    q = _softmax([-1 / 2, -1])
    yield from _claims(cls(tau=1.0), (16, 1, 0), [*q, 0.0], "two classes of three")


@oracle(LogitAdjust)
def softmax_of_the_log_prior(cls: type[LogitAdjust]) -> Iterator[Claim]:
    """At zero logits and tau = 1 the softmax of log pi is pi: the bias gets no gradient, and the
    loss is the labels' entropy. At tau = 2 it is pi^2/sum pi^2. Detects a flipped sign, a factor,
    and the prior of another client or of all clients."""
    counts = (16, 1, 81)
    prior = [n / sum(counts) for n in counts]
    yield from _claims(cls(tau=1.0), counts, prior, "tau = 1")
    q = [p**2 / sum(p**2 for p in prior) for p in prior]
    yield from _claims(cls(tau=2.0), counts, q, "tau = 2")
    run = _biased(counts).simulate(cls(tau=1.0))
    run.run_round([0])
    moved = float(run.weights.params["head.bias"].abs().max())
    yield Claim("change of the bias", 0.0, moved, 1e-12)


@oracle(LogitAdjust)
def absent_class_drops_out(cls: type[LogitAdjust]) -> Iterator[Claim]:
    """A class with share 0 drops out of the softmax."""
    yield from _claims(cls(tau=1.0), (3, 1, 0), [0.75, 0.25, 0.0], "two classes of three")


def _claims(part: Part, counts: tuple[int, ...], q: list[float], what: str) -> Iterator[Claim]:
    """Claims about the first client's loss and one full-batch step at learning rate 1, for the
    softmax q."""
    run, total = _biased(counts).simulate(part), sum(counts)
    loss = run.run_round([0])["terms"]["task"][0]
    expected = -sum(n / total * math.log(p) for n, p in zip(counts, q, strict=True) if n)
    yield Claim(f"loss, {what}", expected, float(loss))
    moved = run.weights.params["head.bias"].tolist()
    for c, (n, p) in enumerate(zip(counts, q, strict=True)):
        yield Claim(f"bias of class {c}, {what}", n / total - p, moved[c])


def _softmax(logits: list[float]) -> list[float]:
    total = sum(math.exp(f) for f in logits)
    return [math.exp(f) / total for f in logits]


def _biased(counts: tuple[int, ...]) -> Problem:
    """One client with the given class counts, and one with balanced classes."""
    y = torch.cat([torch.repeat_interleave(torch.tensor(counts)), torch.arange(3).repeat(4)])
    clients = [range(sum(counts)), range(sum(counts), len(y))]
    task, x = make_task("classification", 3), torch.zeros((len(y), 1), dtype=DOUBLE)
    module = nn.Sequential()
    head = nn.Linear(1, 3, dtype=DOUBLE)
    module.add_module("head", head)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    work = LocalWork(batch=sum(counts), steps=1)
    return Problem(Federation(x, y, clients, task, dtype=DOUBLE), module, work, SGD(lr=1.0))
