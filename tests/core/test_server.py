"""The server's side of a round, by hand: totals of clients, their union, and what parts see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kedge.check.problems import images
from kedge.core import rng, server, tree
from kedge.core.bound import Bound, Server
from kedge.core.part import Mean, Part, Stack, Sum
from kedge.core.tree import Weights
from kedge.core.update import Update, total


def vec(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def part_with(**members: Any) -> Part:
    """A part named ``ridge`` with these members."""
    return type("Ridge", (Part,), {"name": "ridge", **members})()


def bound_to(part: Part) -> Bound:
    return images().simulate(part).bound


def test_clients_have_the_servers_values_of_leaves_that_were_not_sent() -> None:
    bound = bound_to(part_with(needs_clients=True))
    anchor = Weights({"own": vec(8, 9), "w": vec(1)}, {"kept": vec(5), "n": torch.tensor([4])})
    delta = Weights({"w": vec(10, 20)[:, None]}, {"n": vec(1, 1.6)[:, None]})
    losses = {"task": vec(0, 0)}
    updates = Update(delta, losses=losses, weight=vec(1, 3), share=vec(0.5, 1.5))
    clients = total(bound, updates, anchor).stacked.weights
    expected = Weights(
        {"own": vec(8, 9).expand(2, 2), "w": vec(11, 21)[:, None]},
        {"kept": vec(5).expand(2, 1), "n": torch.tensor([[5], [6]])},
    )
    assert tree.equal(clients, expected)


def test_uploads_are_reduced_as_declared_and_nested_as_returned() -> None:
    def survey(self: Part, v: Any) -> Any:
        raise NotImplementedError

    def absorb(self: Part, r: Any, weights: Weights) -> tuple[Weights, Any]:
        return weights, r.uploads

    part = part_with(needs_clients=True, survey=survey, absorb=absorb)
    bound, rows = bound_to(part), torch.stack([vec(1, 2), vec(5, 10)])
    answers = {
        "deep": {"er": {"mean": Mean({"x": rows}), "sum": Sum(rows)}, "n": Sum(vec(2, 3))},
        "each": Stack(rows),
    }
    updates = Update(uploads={"ridge": answers}, weight=vec(1, 3), share=vec(0.5, 1.5))
    totals = total(bound, updates, bound.initial).of([4, 2], round=3)
    assert list(totals.clients.items()) == [(4, 3), (2, 3)]
    assert totals.summed.weight.item() == 4
    assert totals.up_bytes == 8 * (4 + 4 + 2 + 4)
    before = Server(bound.initial, {"other": vec(1)})
    after = server.absorb(bound, before, part, totals, round=0, key=rng.key(0))
    uploads = {
        "deep": {"er": {"mean": {"x": vec(4, 8)}, "sum": vec(6, 12)}, "n": vec(5).sum()},
        "each": rows,
    }
    assert tree.equal(after.slots, {"other": vec(1), "ridge": uploads})
