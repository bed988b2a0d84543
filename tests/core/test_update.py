"""Totals: a sum over clients does not depend on how the clients were grouped."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor

from kedge.check.problems import images
from kedge.core import ops, rng, tree
from kedge.core.bound import Bound
from kedge.core.ops import Ops
from kedge.core.part import Mean, Part, Stack, Sum
from kedge.core.tree import Weights
from kedge.core.update import ZERO, Totals, Update, add, total, total_of
from kedge.engines.ops import FOREACH, MAPPED
from kedge.engines.torch_private import foreach_add_

DOUBLE = torch.float64
GROUPS = ([4, 0], [7], [2, 9, 1])
CLIENTS = [k for group in GROUPS for k in group]


class Everything(Part):
    """Needs all that totals may have."""

    name = "everything"
    needs_sum = needs_share_sum = needs_clients = True


ANCHOR = Weights(
    {"own": torch.ones(2, dtype=DOUBLE), "w": torch.tensor([3.0, -1.0], dtype=DOUBLE)},
    {"mean": torch.full((3,), 2.0, dtype=DOUBLE), "n": torch.tensor(4)},
)


@pytest.fixture(scope="module")
def bound() -> Bound:
    return images().simulate(Everything()).bound


def update_of(client: int, whole: bool) -> Update:
    """An update of whole numbers, whose sums are exact, or of normal numbers."""

    def draw(leaf: int, *shape: int) -> Tensor:
        key = rng.fold(rng.fold(rng.key(3), client), leaf)
        x = rng.normal(key, shape, DOUBLE)
        return (4 * x).round() if whole else x

    return Update(
        Weights({"w": draw(0, 2)}, {"mean": draw(1, 3), "n": draw(2)}),
        {"d": draw(3, 2), "a": draw(4)},
        {
            "everything": {
                "sum": Sum(draw(5, 2)),
                "deep": {"mean": Mean({"x": draw(6, 2), "y": draw(7)})},
                "each": Stack(draw(8, 2)),
            },
            "bare": Sum(draw(9)),
        },
        {"task": draw(10), "everything": draw(11)},
        torch.tensor(float(client + 1), dtype=DOUBLE),
        draw(12).abs() + 1,
    )


def total_together(bound: Bound, clients: list[int], whole: bool, arithmetic: Ops) -> Totals:
    stacked = tree.stack([update_of(k, whole) for k in clients])
    return total(bound, stacked, ANCHOR, arithmetic).of(clients, 5)


def same_bits(a: Totals, b: Totals) -> bool:
    """Bit for bit, the sign of zero included, with the clients in order."""
    pairs = [*zip(tree.leaves(a.summed), tree.leaves(b.summed), strict=True)]
    pairs += zip(tree.leaves(a.stacked), tree.leaves(b.stacked), strict=True)
    equal = all(x.dtype == y.dtype and _bits(x) == _bits(y) for x, y in pairs)
    known = list(a.clients.items()) == list(b.clients.items()) and a.up_bytes == b.up_bytes
    return equal and known and tree.equal(a.summed, b.summed) and tree.equal(a.stacked, b.stacked)


def _bits(x: Tensor) -> bytes:
    return x.contiguous().numpy().tobytes()


ARITHMETIC = {"core": ops.REFERENCE, "loop": FOREACH, "vector": MAPPED}


@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_adding_is_associative_and_agrees_with_all_at_once(bound: Bound, arithmetic: str) -> None:
    """Bit for bit where sums are exact, and up to rounding elsewhere."""
    for whole in (True, False):
        a, b, c = (total_together(bound, g, whole, ARITHMETIC[arithmetic]) for g in GROUPS)
        left, right = add(add(a, b), c), add(a, add(b, c))
        at_once = total_together(bound, CLIENTS, whole, ARITHMETIC[arithmetic])
        singles = [total_together(bound, [k], whole, ARITHMETIC[arithmetic]) for k in CLIENTS]
        for found in (right, at_once, reduce(add, singles), reduce(add, singles, ZERO)):
            assert list(found.clients) == CLIENTS
            assert found.up_bytes == left.up_bytes
            assert tree.equal(found.stacked, left.stacked)
            if whole:
                assert tree.equal(found.summed, left.summed)
            assert tree.gap(found.summed, left.summed) < 1e-12


def test_zero_is_neutral_bit_for_bit(bound: Bound) -> None:
    some = total_together(bound, GROUPS[0], False, ops.REFERENCE)
    negative = tree.map(lambda x: -0.0 * x.abs(), some.summed)  # 0 + -0 is 0
    some = some._replace(summed=negative)
    assert any(bool(torch.signbit(x).any()) for x in tree.leaves(some.summed))
    for into in (None, foreach_add_):
        for found in (add(ZERO, some, into), add(some, ZERO, into)):
            assert same_bits(found, some)
    assert add(ZERO, ZERO) == ZERO
    assert ZERO.uploads == {}


def test_clients_of_both_groups_in_order(bound: Bound) -> None:
    a = total_together(bound, [4, 0], True, ops.REFERENCE)
    b = total_together(bound, [2], True, ops.REFERENCE).of([2], 6)
    found = add(a, b)
    assert list(found.clients.items()) == [(4, 5), (0, 5), (2, 6)]
    assert found.stacked.weight.tolist() == [5.0, 1.0, 3.0]
    for i, k in enumerate(found.clients):
        alone = total_together(bound, [k], True, ops.REFERENCE).stacked
        assert tree.equal(tree.take(found.stacked, [i]), alone)
    private = found.stacked.weights.params["own"]  # of leaves that were not sent
    assert torch.equal(private, ANCHOR.params["own"].expand(3, 2))


def test_in_place_gives_the_same_bits(bound: Bound) -> None:
    a, b, c = (total_together(bound, g, False, ops.REFERENCE) for g in GROUPS)
    inputs = {"a": a.summed, "b": b.summed, "rows": a.stacked, "more": b.stacked}
    before = tree.map(torch.clone, inputs)
    wanted = add(add(a, b), c)
    assert tree.equal(inputs, before)
    assert not any(x is y for x in tree.leaves(wanted.summed) for y in tree.leaves(a.summed))
    found = add(add(a, b, foreach_add_), c, foreach_add_)
    assert same_bits(found, wanted)
    assert all(x is y for x, y in zip(*map(tree.leaves, (found.summed, a.summed)), strict=True))
    assert all(tree.equal(inputs[name], before[name]) for name in ("b", "rows", "more"))


def test_single_updates_are_added_one_by_one(bound: Bound) -> None:
    """As a server does that reads them from messages; each one is freed before the next is read."""
    alive: list[int] = []

    def updates() -> Any:
        for k in CLIENTS:
            alive.append(k)
            yield k, update_of(k, False)

    found = total_of(bound, updates(), 5, ANCHOR)
    singles = [total_together(bound, [k], False, ops.REFERENCE) for k in CLIENTS]
    assert alive == CLIENTS
    assert same_bits(found, reduce(add, singles))
    assert total_of(bound, iter(()), 5, ANCHOR) == ZERO


def test_totals_by_hand(bound: Bound) -> None:
    """Clients 0 and 2 with weights 1 and 3, and updates as drawn."""
    one, two = update_of(0, True), update_of(2, True)
    found = total_together(bound, [0, 2], True, ops.REFERENCE)
    w, u = found.summed, found.uploads
    assert w.weight.item() == 4
    assert torch.equal(w.delta.params["w"], one.delta.params["w"] + 3 * two.delta.params["w"])
    assert torch.equal(w.delta.buffers["n"], one.delta.buffers["n"] + 3 * two.delta.buffers["n"])
    squares = [float(x.delta.params["w"].square().sum()) for x in (one, two)]
    assert float(w.sq_norm) == squares[0] + 3 * squares[1]
    assert torch.equal(w.contribution["d"], one.contribution["d"] + two.contribution["d"])
    assert torch.equal(w.plain_delta["w"], one.delta.params["w"] + two.delta.params["w"])
    shared = one.share * one.delta.params["w"] + two.share * two.delta.params["w"]
    assert torch.equal(w.share_delta["w"], shared)
    assert list(u) == [
        ("everything", "sum"), ("everything", "deep", "mean"), ("bare",), ("everything", "each"),
    ]  # fmt: skip
    assert [type(x) for x in u.values()] == [Sum, Mean, Sum, Stack]
    own = [x.uploads["everything"] for x in (one, two)]
    assert torch.equal(u["everything", "sum"].value, own[0]["sum"].value + own[1]["sum"].value)
    means = [x["deep"]["mean"].value["x"] for x in own]
    assert torch.equal(u["everything", "deep", "mean"].value["x"], means[0] + 3 * means[1])
    rows = torch.stack([x["each"].value for x in own])
    assert torch.equal(u["everything", "each"].value, rows)
    losses = torch.stack([one.losses["task"], two.losses["task"]])
    assert torch.equal(found.stacked.losses["task"], losses)
    # 6 numbers of the update, 3 of the contribution, 8 uploaded, of two clients
    assert found.up_bytes == 2 * 8 * (6 + 3 + 8)


def test_what_no_part_needs_is_not_kept() -> None:
    plain = images().simulate("fedavg").bound
    found = total_together(plain, [0, 2], True, ops.REFERENCE)
    assert (found.summed.plain_delta, found.summed.share_delta) == ({}, {})
    assert found.stacked.weights == Weights({}, {})


def test_clients_that_send_no_weights_have_those_of_the_server(bound: Bound) -> None:
    """After training, if all leaves are private; an answer to a survey has no weights at all."""
    alone = update_of(0, True)._replace(delta=Weights({}, {}))
    stacked = tree.stack([alone, alone])
    trained = total(bound, stacked, ANCHOR).stacked.weights
    assert tree.equal(trained, tree.map(lambda x: x.expand(2, *x.shape), ANCHOR))
    surveyed = total(bound, stacked._replace(losses={}), ANCHOR).stacked.weights
    assert surveyed == Weights({}, {})
