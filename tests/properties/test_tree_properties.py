"""Trees: structure is kept, rows are put together and taken apart, and arithmetic has its laws."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.properties.strategies import KEYS, same_bits, tensors, trees
from torch import Tensor

from kedge.core import tree
from kedge.core.tree import Weights

DOUBLE = torch.float64
# Whole numbers: sums and products are exact, so that the laws hold bit for bit.
WHOLE = tensors(dtypes=[DOUBLE], elements=st.integers(-99, 99))


class Pair(NamedTuple):
    left: Any
    right: Any


TREES = trees(WHOLE, Pair)


@st.composite
def alike(draw: st.DrawFn, count: int) -> list[Any]:
    """Several trees of one structure."""
    first = draw(TREES)
    seeds = draw(st.lists(st.integers(0, 2**30), min_size=count - 1, max_size=count - 1))
    others = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        others.append(
            tree.map(
                lambda x, g=generator: torch.randint(-99, 99, x.shape, generator=g).to(DOUBLE),
                first,
            )
        )
    return [first, *others]


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every leaf and of every empty branch, with the types of branches."""
    if isinstance(value, Tensor):
        return [prefix]
    items = value.items() if isinstance(value, dict) else value._asdict().items()
    inner = [paths(v, (*prefix, type(value).__name__, k)) for k, v in items]
    return list(itertools.chain(*inner)) or [(*prefix, "empty")]


# -- structure ---------------------------------------------------------------------------------


@given(TREES)
def test_map_keeps_the_structure_and_visits_leaves_in_order(value: Any) -> None:
    seen: list[Tensor] = []
    found = tree.map(lambda x: (seen.append(x), x + 1)[1], value)
    assert paths(found) == paths(value)
    assert [id(x) for x in seen] == [id(x) for x in tree.leaves(value)]
    for before, after in zip(tree.leaves(value), tree.leaves(found), strict=True):
        assert torch.equal(after, before + 1)
    assert tree.equal(tree.map(lambda x: x, value), value)


@given(alike(3))
def test_map_of_a_composition_is_the_composition_of_maps(values: list[Any]) -> None:
    a, b, c = values
    at_once = tree.map(lambda x, y, z: x * y - z, a, b, c)
    one_by_one = tree.map(torch.sub, tree.map(torch.mul, a, b), c)
    assert tree.equal(at_once, one_by_one)


@given(TREES)
def test_sizes_are_sums_over_leaves(value: Any) -> None:
    assert tree.numel(value) == sum(x.numel() for x in tree.leaves(value))
    assert tree.nbytes(value) == 8 * tree.numel(value)


@given(trees(tensors(), Pair))
def test_a_tree_equals_itself_and_no_tree_with_a_changed_leaf(value: Any) -> None:
    copy = tree.map(torch.clone, value)
    assert tree.equal(value, copy)
    assert tree.gap(value, copy) == 0
    for i, leaf in enumerate(tree.leaves(value)):
        assert not tree.equal(value, with_leaf(value, i, leaf[None]))
        other = DOUBLE if leaf.dtype != DOUBLE else torch.float32
        assert not tree.equal(value, with_leaf(value, i, leaf.to(other)))
        if leaf.numel():
            flat = leaf.clone().reshape(-1)
            flat[-1] = 1 if bool(flat[-1] == 0) else 0
            changed = with_leaf(value, i, flat.reshape(leaf.shape))
            assert not tree.equal(value, changed)
            wide = leaf.double().abs().reshape(-1)
            assert tree.gap(value, changed) > 0 or float(wide[-1] / wide.max()) == 0  # subnormal


def with_leaf(value: Any, at: int, leaf: Tensor) -> Any:
    """The tree with leaf number ``at`` replaced."""
    counter = itertools.count()
    return tree.map(lambda x: leaf if next(counter) == at else x, value)


# -- rows --------------------------------------------------------------------------------------


@given(alike(4), st.permutations(range(4)), st.integers(1, 3))
def test_stack_take_and_concat_are_inverse(values: list[Any], order: list[int], cut: int) -> None:
    stacked = tree.stack(values)
    assert [tree.equal(tree.take(stacked, k), values[k]) for k in range(4)] == [True] * 4
    halves = [tree.take(stacked, slice(0, cut)), tree.take(stacked, slice(cut, 4))]
    assert tree.equal(tree.concat(halves), stacked)
    assert tree.equal(tree.concat([stacked]), stacked)
    index = torch.tensor(order)
    moved = tree.take(stacked, index)
    assert tree.equal(moved, tree.stack([values[k] for k in order]))
    assert tree.equal(tree.take(moved, torch.argsort(index)), stacked)
    assert paths(stacked) == paths(values[0])


# -- arithmetic --------------------------------------------------------------------------------


@given(alike(3), st.integers(-9, 9), st.integers(-9, 9))
def test_trees_are_a_vector_space(values: list[Any], r: int, s: int) -> None:
    a, b, c = values
    zero = tree.zeros_like(a)
    assert tree.equal(tree.add(a, b), tree.add(b, a))
    assert tree.equal(tree.add(tree.add(a, b), c), tree.add(a, tree.add(b, c)))
    assert tree.equal(tree.add(a, zero), a)
    assert tree.equal(tree.sub(a, a), zero)
    assert tree.equal(tree.add(tree.sub(a, b), b), a)
    assert tree.equal(tree.scale(tree.add(a, b), r), tree.add(tree.scale(a, r), tree.scale(b, r)))
    assert tree.equal(tree.scale(a, r + s), tree.add(tree.scale(a, r), tree.scale(a, s)))
    assert tree.equal(tree.axpy(r, a, b), tree.add(tree.scale(a, r), b))


@given(alike(3), st.integers(-9, 9))
def test_the_inner_product_is_one(values: list[Any], r: int) -> None:
    a, b, c = values
    dot = tree.dot
    assert dot(a, b) == dot(b, a)
    assert dot(tree.axpy(r, a, b), c) == r * dot(a, c) + dot(b, c)
    assert tree.sq_norm(a) == dot(a, a)
    assert tree.sq_dist(a, b) == tree.sq_norm(tree.sub(a, b))
    assert dot(a, b) ** 2 <= tree.sq_norm(a) * tree.sq_norm(b)
    flat = [torch.cat([x.reshape(-1) for x in tree.leaves(t)] or [torch.zeros(0)]) for t in (a, b)]
    assert float(dot(a, b)) == float((flat[0] * flat[1]).sum())


@given(alike(3))
def test_the_gap_is_a_distance(values: list[Any]) -> None:
    a, b, c = (tree.scale(v, 0.005) for v in values)  # below 1, where it is absolute
    assert tree.gap(a, b) == tree.gap(b, a)
    assert tree.gap(a, c) <= tree.gap(a, b) + tree.gap(b, c) + 1e-15
    assert (tree.gap(a, b) == 0) == tree.equal(a, b)
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    largest = [float((x - y).abs().max()) for x, y in pairs if x.numel()]
    assert tree.gap(a, b) == max(largest, default=0)


# -- the wire ----------------------------------------------------------------------------------


@example({"a|b": torch.zeros(1), "a": {"b": torch.ones(1)}, "a%7Cb": torch.ones(2)})
@given(trees(tensors(), Weights))
def test_the_flat_form_comes_back_bit_for_bit(value: Any) -> None:
    flat = tree.to_wire(value)
    assert len(flat) == len(list(tree.leaves(value)))
    assert all(isinstance(x, Tensor) for x in flat.values())
    assert same_bits(tree.from_wire(flat, value), value)
    assert paths(tree.from_wire(dict(reversed(flat.items())), value)) == paths(value)


@given(st.dictionaries(KEYS, st.integers(), max_size=4), KEYS, KEYS)
def test_under_finds_what_a_prefix_was_put_before(
    leaves: dict[str, int], prefix: str, other: str
) -> None:
    named = {f"{prefix}/{k}": v for k, v in leaves.items()}
    others = {f"{other}/{k}": v for k, v in leaves.items() if not other.startswith(prefix)}
    assert tree.under({**others, **named}, prefix) == leaves
