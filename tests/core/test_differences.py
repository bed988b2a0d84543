"""Differences of trees and parameters in words."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kedge.core.hooks import not_a_tree, params_gap, tree_gap, weights_gap
from kedge.core.tree import Weights


class Pair(NamedTuple):
    first: Tensor
    second: Any


ONE, THREE = torch.ones(()), torch.ones(3)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (ONE, ""),
        ({"a": {"b": Pair(ONE, ())}}, ""),
        (None, "None"),
        ({"a": 0.5}, "a float at 'a'"),
        ({"a": ONE, "b": {"c": {"d": [1]}}}, "a list at 'b/c/d'"),
        ({"a": Pair(ONE, {"b": 1})}, "an int at 'a/second/b'"),
        ({"a": {0: ONE}}, "a dict whose key 0 is no string at 'a'"),
        ((ONE,), "a tuple of 1"),
    ],
)
def test_the_first_item_that_is_no_tree_has_its_path(value: Any, words: str) -> None:
    assert not_a_tree(value) == words


@pytest.mark.parametrize(
    ("value", "like", "words"),
    [
        (THREE, 2 * THREE, ""),
        ({"a": Pair(ONE, {"b": THREE})}, {"a": Pair(-ONE, {"b": -THREE})}, ""),
        (ONE, THREE, "a tensor of shape [] in place of shape [3]"),
        (0.5, ONE, "a float in place of shape []"),
        (Weights({}, {}), ONE, "a Weights in place of shape []"),
        ({"a": {"b": None}}, {"a": {"b": THREE}}, "None at 'a/b' in place of shape [3]"),
        (ONE, {"a": ONE}, "a tensor of shape [] in place of a dict"),
        ({"a": {"b": ONE}}, {"a": {"b": {}}}, "a tensor of shape [] at 'a/b' in place of a dict"),
        ({"a": {}}, {"a": {"b": ONE, "c": ONE}}, "a dict without 'b', 'c' at 'a'"),
        ({"a": ONE, "bb": ONE}, {"a": ONE}, "a dict with the unknown name 'bb'"),
        ({"a": {}}, {"a": Pair(ONE, ONE)}, "a dict at 'a' in place of a Pair"),
        (
            Pair(ONE, ONE),
            Pair(ONE, THREE),
            "a tensor of shape [] at 'second' in place of shape [3]",
        ),
    ],
)
def test_the_first_difference_of_two_trees_has_its_path(value: Any, like: Any, words: str) -> None:
    assert tree_gap(value, like) == words


def test_parameters_may_be_some_or_must_be_all() -> None:
    params = {"head.bias": THREE, "head.weight": torch.ones(3, 2)}
    some = {"head.bias": -THREE}
    assert params_gap(some, params, whole=False) == ""
    assert params_gap(some, params, whole=True) == "a dict without 'head.weight'"
    assert params_gap(params, params, whole=True) == ""
    assert params_gap({"head.bais": THREE}, params, whole=False) == (
        "a dict with the unknown name 'head.bais' (like 'head.bias')"
    )
    assert params_gap({"head.bias": 1}, params, whole=False) == (
        "an int for 'head.bias' of shape [3]"
    )
    assert weights_gap(Weights(params, {}), Weights(params, {})) == ""
    assert weights_gap(Weights(params, {}), Weights(params, some)) == "a dict without 'head.bias'"
    assert weights_gap(params, Weights(params, {})) == "a dict"
