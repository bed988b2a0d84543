"""Whether values can be read now."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad, vmap

from kedge.core.eager import is_eager, is_unwrapped, set_predicate


def test_values_cannot_be_read_inside_of_transforms() -> None:
    seen = []

    def note(x: Tensor) -> Tensor:
        seen.append(is_unwrapped(x))
        return x.sum()

    x = torch.ones(2, 3)
    note(x)
    note(x.clone().requires_grad_())
    vmap(note)(x)
    grad(note)(x)
    grad(lambda x: vmap(note)(x).sum())(x)
    assert seen == [True, True, False, False, False]


def test_a_predicate_can_be_replaced_and_put_back() -> None:
    x = torch.ones(2)

    def never(x: Tensor) -> bool:
        return False

    before = set_predicate(never)
    try:
        assert before is not never
        assert not is_eager(x)
    finally:
        assert set_predicate(before) is never
    assert is_eager(x)
