"""Trees: the structure rules of map, and the comparisons that all other tests lean on."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.tree import Weights

NAN, INF = math.nan, math.inf


class Pair(NamedTuple):
    left: Any
    right: Any


def vec(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sample() -> dict[str, Any]:
    return {
        "w": vec(1, 2, 3),
        "deep": {"b": vec(4), "empty": {}},
        "pair": Pair(vec(5, 6), {"c": vec(7)}),
    }


# -- map and leaves ----------------------------------------------------------------------------


def test_map_keeps_dicts_named_tuples_and_order() -> None:
    found = tree.map(lambda x: x * 2, sample())
    assert list(found) == ["w", "deep", "pair"]
    assert type(found["pair"]) is Pair
    assert found["deep"]["empty"] == {}
    assert torch.equal(found["pair"].right["c"], vec(14))
    assert [x.tolist() for x in tree.leaves(found)] == [[2, 4, 6], [8], [10, 12], [14]]


def test_map_takes_its_structure_from_the_first_tree() -> None:
    small, large = {"a": vec(1)}, {"b": vec(9), "a": vec(2), "c": {"d": vec(3)}}
    assert tree.equal(tree.map(torch.add, small, large), {"a": vec(3)})
    with pytest.raises(KeyError):
        tree.map(torch.add, large, small)


def test_map_visits_in_the_order_of_the_first_tree() -> None:
    seen: list[float] = []
    tree.map(lambda x, y: seen.append(float(y)), {"a": 0, "b": 0}, {"b": 2, "a": 1})
    assert seen == [1, 2]


def test_map_of_a_leaf_and_of_nothing() -> None:
    assert torch.equal(tree.map(torch.neg, vec(1)), vec(-1))
    assert tree.map(torch.neg, {}) == {}
    assert list(tree.leaves({})) == []


def test_map_changes_no_argument() -> None:
    before, given = sample(), sample()
    versions = [x._version for x in tree.leaves(given)]
    tree.add(tree.scale(given, 2.0), given)
    assert tree.equal(given, before)
    assert [x._version for x in tree.leaves(given)] == versions


# -- arithmetic --------------------------------------------------------------------------------


def test_arithmetic_is_leafwise() -> None:
    a, b = {"x": vec(1, 2), "y": vec(3)}, {"x": vec(10, 20), "y": vec(30), "z": vec(9)}
    assert tree.equal(tree.add(a, b), {"x": vec(11, 22), "y": vec(33)})
    assert tree.equal(tree.sub(a, b), {"x": vec(-9, -18), "y": vec(-27)})
    assert tree.equal(tree.scale(a, 3.0), {"x": vec(3, 6), "y": vec(9)})
    assert tree.equal(tree.axpy(2.0, a, b), {"x": vec(12, 24), "y": vec(36)})
    assert tree.equal(tree.zeros_like(a), {"x": vec(0, 0), "y": vec(0)})
    assert tree.dot(a, b).item() == 10 + 40 + 90
    assert tree.sq_norm(a).item() == 1 + 4 + 9
    assert tree.sq_dist(a, b).item() == 81 + 324 + 729


def test_sq_dist_has_a_zero_gradient_at_zero_distance() -> None:
    a = {"x": vec(1, 2).requires_grad_()}
    (grad,) = torch.autograd.grad(tree.sq_dist(a, tree.detach(a)), a["x"])
    assert grad.tolist() == [0, 0]


@pytest.mark.parametrize("norm", [tree.sq_norm, lambda a: tree.dot(a, a)])
def test_the_norm_of_the_empty_tree_is_zero(norm: Any) -> None:
    assert norm({}).item() == 0


def test_detach_cuts_the_graph() -> None:
    a = {"x": vec(1).requires_grad_()}
    assert not next(tree.leaves(tree.detach(a))).requires_grad


def test_sizes() -> None:
    a = {"x": torch.zeros(3, 4), "n": torch.zeros((), dtype=torch.int64)}
    assert tree.numel(a) == 13
    assert tree.nbytes(a) == 12 * 4 + 8
    assert tree.numel({}) == tree.nbytes({}) == 0


def test_stack_take_and_concat_are_inverse() -> None:
    trees = [tree.scale(sample(), float(k)) for k in range(3)]
    stacked = tree.stack(trees)
    assert stacked["w"].shape == (3, 3)
    assert all(tree.equal(tree.take(stacked, k), trees[k]) for k in range(3))
    halves = [tree.take(stacked, slice(0, 1)), tree.take(stacked, slice(1, 3))]
    assert tree.equal(tree.concat(halves), stacked)
    assert tree.equal(tree.concat([stacked]), stacked)
    assert tree.equal(tree.take(stacked, [2, 0])["deep"], tree.stack([trees[2], trees[0]])["deep"])


def test_under_strips_exactly_one_prefix() -> None:
    leaves = {"moon/a": 1, "moon/b/c": 2, "moonlight/a": 3, "x": 4}
    assert tree.under(leaves, "moon") == {"a": 1, "b/c": 2}
    assert tree.under(leaves, "sun") == {}


# -- comparisons -------------------------------------------------------------------------------


def test_equal_looks_at_structure_type_shape_and_bits() -> None:
    assert tree.equal(sample(), sample())
    assert tree.equal({}, {})
    assert not tree.equal({"a": vec(1)}, {"b": vec(1)})
    assert not tree.equal({"a": vec(1)}, {"a": vec(1), "b": vec(1)})
    assert not tree.equal({"a": vec(1)}, vec(1))
    assert not tree.equal(Pair(vec(1), vec(2)), Weights(vec(1), vec(2)))  # type: ignore[arg-type]
    assert not tree.equal(vec(1), vec(1).float())
    assert not tree.equal(vec(1), vec(1).reshape(1, 1))
    assert not tree.equal(vec(1), vec(1 + 2**-52))
    assert tree.equal(torch.tensor([3, 4]), torch.tensor([3, 4]))
    assert tree.equal(torch.tensor([True]), torch.tensor([True]))


def test_equal_takes_nan_as_equal_to_nan_only() -> None:
    assert tree.equal(vec(NAN, 1), vec(NAN, 1))
    assert not tree.equal(vec(NAN, 1), vec(1, NAN))
    assert not tree.equal(vec(NAN), vec(0))  # what nan_to_num would make of it
    assert not tree.equal(vec(NAN, 1), vec(NAN, 2))


def test_equal_with_infinity() -> None:
    assert tree.equal(vec(INF, -INF), vec(INF, -INF))
    assert not tree.equal(vec(INF), vec(-INF))


def test_infinity_is_not_the_largest_number() -> None:
    assert not tree.equal(vec(INF), vec(torch.finfo(torch.float64).max))


def test_gap_is_absolute_below_one_and_relative_above() -> None:
    assert tree.gap({"a": vec(0.5, 0.25)}, {"a": vec(0.5, 0.375)}) == 0.125
    assert tree.gap(vec(99), vec(100)) == pytest.approx(0.01)
    assert tree.gap(sample(), sample()) == 0
    assert tree.gap({}, {}) == 0
    assert tree.gap({"a": torch.zeros(0)}, {"a": torch.zeros(0)}) == 0


def test_gap_is_the_worst_leaf() -> None:
    a = {"x": vec(1, 1), "y": vec(1)}
    b = {"x": vec(1, 1.5), "y": vec(1.1)}
    assert tree.gap(a, b) == pytest.approx(0.5 / 1.5)
    assert tree.gap({"n": torch.tensor([3])}, {"n": torch.tensor([4])}) == 0.25


@pytest.mark.parametrize(
    ("a", "b"),
    [(vec(NAN), vec(1)), (vec(1), vec(NAN)), (vec(INF), vec(1)), (vec(2, NAN), vec(2, 3))],
)
def test_gap_of_a_value_that_only_one_side_has_lost_is_infinite(a: Tensor, b: Tensor) -> None:
    assert tree.gap({"w": a, "v": vec(1)}, {"w": b, "v": vec(1)}) == INF


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (vec(1), vec(INF)),  # inf / inf
        (vec(NAN, 1), vec(NAN, -9)),  # a NaN on both sides must not hide the rest
        (vec(NAN, 1), vec(1, NAN)),
        (vec(INF), vec(-INF)),
    ],
)
def test_gap_does_not_overlook_what_is_not_finite(a: Tensor, b: Tensor) -> None:
    assert tree.gap(a, b) > 1


def test_gap_does_not_compare_leaves_of_different_shapes() -> None:
    assert tree.gap(torch.ones(3), torch.ones(1)) == INF


# -- the wire ----------------------------------------------------------------------------------


def test_the_wire_is_flat_and_comes_back() -> None:
    held = {
        "weights": Weights({"fc.weight": vec(1, 2), "moon/a": vec(3)}, {"n": torch.tensor(4)}),
        "slots": {"scaffold": {"c": vec(5)}, "none": {}},
        "round": torch.tensor(6),
    }
    flat = tree.to_wire(held)
    assert set(flat) == {
        "weights|params|fc.weight",
        "weights|params|moon/a",
        "weights|buffers|n",
        "slots|scaffold|c",
        "round",
    }
    assert all(isinstance(x, Tensor) for x in flat.values())
    assert tree.equal(tree.from_wire(flat, held), held)


def test_the_wire_of_weights_and_of_a_single_tensor() -> None:
    weights = Weights({"w": vec(1)}, {"b": vec(2)})
    assert tree.equal(tree.from_wire(tree.to_wire(weights), weights), weights)
    assert tree.equal(tree.from_wire(tree.to_wire(vec(3)), vec(0)), vec(3))
    assert tree.to_wire({}) == {}


def test_keys_with_the_separator_stay_apart() -> None:
    held = {"a|b": vec(1), "a": {"b": vec(2)}, "a%7Cb": vec(3)}
    flat = tree.to_wire(held)
    assert len(flat) == 3
    assert tree.equal(tree.from_wire(flat, held), held)


def test_from_wire_needs_every_array() -> None:
    with pytest.raises(KeyError, match=r"a\|b"):
        tree.from_wire({}, {"a": {"b": vec(1)}})


@pytest.mark.parametrize("leaf", [3.0, None, [1.0], "text"])
def test_only_tensors_cross_the_wire(leaf: Any) -> None:
    with pytest.raises(TypeError, match=r"slots\|x holds a .*only tensors"):
        tree.to_wire({"slots": {"x": leaf}})
