"""The reference arithmetic of a round, by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.ops import REFERENCE
from kedge.core.tree import Params


def vec(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_gradient_is_zero_where_the_objective_does_not_use_a_leaf() -> None:
    params = {"used": vec(2, 3), "unused": vec(5, 7)}

    def objective(p: Params) -> tuple[Tensor, Tensor]:
        value = (p["used"] ** 2).sum()
        return value, 10 * value

    grads, aux = REFERENCE.gradient(objective, params)
    assert tree.equal(grads, {"used": vec(4, 6), "unused": vec(0, 0)})
    assert aux.item() == 130
    assert not aux.requires_grad
    assert not any(p.requires_grad for p in params.values())


def test_squared_norms_are_summed_over_all_leaves_of_each_client() -> None:
    deltas = {"w": torch.stack([vec(1, 2), vec(3, 4)])[:, None], "b": vec(2, 10)}
    assert REFERENCE.sq_norms(deltas, vec(7, 8)).tolist() == [1 + 4 + 4, 9 + 16 + 100]


def test_weighted_sums_of_one_client_of_several_and_of_integers() -> None:
    x = torch.stack([vec(1, 2), vec(3, 4)])
    assert REFERENCE.weighted_sum(x, vec(10, 100)).tolist() == [310, 420]
    assert REFERENCE.weighted_sum(x[:1], vec(10)).tolist() == [10, 20]
    counts = REFERENCE.weighted_sum(torch.tensor([1, 2]), vec(0.5, 0.25))
    assert counts.dtype == torch.float64
    assert counts.item() == 1.0
