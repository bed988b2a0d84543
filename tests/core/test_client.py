"""Local steps: which leaves move, and the optimiser's state beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kedge.check.problems import images
from kedge.core import client, tree
from kedge.core.client import Carry
from kedge.core.optim import SGD, Adam, Optimizer
from kedge.core.part import Part
from kedge.core.tree import Params
from kedge.core.view import View
from kedge.core.work import take_jobs

BIAS = "head.bias"


class FreezeLater(Part):
    """The head's bias moves in the first step only."""

    name = "freezelater"

    def trainable(self, v: View, params: Params) -> dict[str, Tensor | bool]:
        return {BIAS: v.step < 1}


@dataclass(frozen=True)
class Counting(SGD):
    """SGD whose state is one tensor, the number of its steps."""

    def init(self, params: Params) -> Any:
        return torch.zeros(())

    def update(self, params: Params, grads: Params, state: Any, lr: Tensor, *ops: Any) -> Any:
        return super().update(params, grads, {}, lr, *ops)[0], state + 1


def two_steps(method: Part | str, optim: Optimizer) -> tuple[Carry, Carry]:
    """A client's state after one local step and after two."""
    run = images(optim=optim).simulate(method)
    cohort = run.cohort([1])
    job, bound = take_jobs(cohort.jobs, 0), run.bound.at(0)
    first = client.step(bound, job, client.begin(bound, job), cohort.batches[0, 0])
    return first, client.step(bound, job, first, cohort.batches[0, 1])


def test_a_frozen_leaf_keeps_its_moments_while_the_count_of_steps_goes_on() -> None:
    optim = Adam(lr=0.1, weight_decay=0.1)
    (once, twice), (plain_once, plain) = (two_steps(m, optim) for m in (FreezeLater(), "fedavg"))
    assert tree.equal(once.optim, plain_once.optim)
    assert twice.optim["count"] == 2
    for got, before, other in (
        (twice.weights.params, once.weights.params, plain.weights.params),
        (twice.optim["m"], once.optim["m"], plain.optim["m"]),
        (twice.optim["v"], once.optim["v"], plain.optim["v"]),
    ):
        assert not torch.equal(other[BIAS], before[BIAS])
        assert tree.equal(got, other | {BIAS: before[BIAS]})


def test_the_state_of_an_optimiser_may_be_a_single_tensor() -> None:
    _, counted = two_steps("fedavg", Counting(lr=0.1))
    _, plain = two_steps("fedavg", SGD(lr=0.1))
    assert counted.optim == 2
    assert tree.equal(counted.weights, plain.weights)
