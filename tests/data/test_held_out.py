"""Rows to choose by, and clients that never train."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kedge.core.task import Classification
from kedge.data.build import federate
from kedge.data.datasets import Dataset, load
from kedge.data.federation import Federation
from kedge.data.splits import split_data
from kedge.errors import DataError


def everything(data) -> list[set]:
    """The rows of each kind, all clients together."""
    kinds = (data.train.clients, data.held_out, data.validation)
    sets = [{int(r) for rows in kind for r in rows} for kind in kinds]
    return [*sets, {int(r) for r in (data.unseen if data.unseen is not None else ())}]


@pytest.mark.parametrize("split", ["given", "holdout(0.2)", "pooled(0.4, 0.3)"])
def test_no_row_has_two_uses_and_none_is_lost(split: str) -> None:
    digits = load("digits")
    plain = split_data(digits, "dirichlet(0.5)", 8, split, 3)
    data = split_data(digits, "dirichlet(0.5)", 8, split, 3, 0.1, 0.25)
    assert not len(plain.validation)
    assert plain.unseen is None
    used = everything(data)
    for i, one in enumerate(used):
        for other in used[i + 1 :]:
            assert not one & other
    total = set().union(*used)
    assert total == {int(r) for rows in plain.partition.clients for r in rows}
    assert len(data.train.clients) == len(data.validation) == 6
    unseen = sorted(set(range(8)) - set(data.seen))
    assert used[3] == {int(r) for k in unseen for r in plain.partition.clients[k]}


def test_without_the_options_the_rows_are_the_same() -> None:
    digits = load("digits")
    before = split_data(digits, "dirichlet(0.5)", 8, "holdout(0.2)", 3)
    validated = split_data(digits, "dirichlet(0.5)", 8, "holdout(0.2)", 3, 0.1)
    for test, same_test, train, rows, chosen in zip(
        before.held_out, validated.held_out, before.train.clients,
        validated.train.clients, validated.validation, strict=True,
    ):  # fmt: skip
        assert np.array_equal(test, same_test)  # the test rows do not depend on validation
        assert np.array_equal(np.sort(np.concatenate([rows, chosen])), train)


def test_validation_is_stratified() -> None:
    digits = load("digits")
    data = split_data(digits, "iid", 2, "given", 0, 0.25)
    for train, chosen in zip(data.train.clients, data.validation, strict=True):
        both = np.bincount(digits.y_train[train]) + np.bincount(digits.y_train[chosen])
        assert np.abs(np.bincount(digits.y_train[chosen]) - both * 0.25).max() <= 1


def silos(names: list[str]) -> Dataset:
    digits = load("digits")
    count = len(names)
    groups = np.arange(len(digits.y_train)) % count
    groups_test = np.arange(len(digits.y_test)) % count
    return dataclasses.replace(
        digits, groups=groups, groups_test=groups_test, group_names=tuple(names)
    )


def test_unseen_silos_are_drawn_by_name() -> None:
    names = ["north", "south", "east", "west", "centre"]
    first = split_data(silos(names), "silos", 5, "auto", 7, 0.0, 0.4)
    other = split_data(silos(names[::-1]), "silos", 5, "auto", 7, 0.0, 0.4)
    seen = {names[k] for k in first.seen}
    assert len(seen) == 3
    assert seen == {names[::-1][k] for k in other.seen}
    # their own test rows are unseen, too, and not part of the common test set
    assert first.test is None
    train = len(load("digits").y_train)
    assert (first.unseen >= train).any()
    assert not {int(r) for rows in first.held_out for r in rows} & set(first.unseen.tolist())


def test_other_seeds_leave_other_clients_out() -> None:
    digits = load("digits")
    seen = {tuple(split_data(digits, "iid", 10, "given", s, 0.0, 0.3).seen) for s in range(5)}
    assert len(seen) > 1


def test_at_least_one_client_is_unseen_and_one_trains() -> None:
    digits = load("digits")
    assert len(split_data(digits, "iid", 4, "given", 0, 0.0, 0.01).seen) == 3
    with pytest.raises(DataError, match="leaves none to train"):
        split_data(digits, "central", 1, "given", 0, 0.0, 0.2)


def test_shifted_features_stay_with_the_rows() -> None:
    """Unseen clients keep the rotation and noise that the partition gave them."""
    digits = load("digits")
    plain = federate(digits, "iid+noise(0.3)", clients=5)
    left_out = federate(digits, "iid+noise(0.3)", clients=5, unseen=0.4, validation=0.1)
    assert torch.equal(plain.x, left_out.x)
    assert left_out.num_clients == 3
    assert left_out.unseen is not None
    assert sum(left_out.sizes) + sum(map(len, left_out.validation)) + len(left_out.unseen) == sum(
        plain.sizes
    )


def test_too_few_samples_to_hold_out() -> None:
    x, y = torch.rand(4, 2), torch.tensor([0, 1, 0, 1])
    rows = [[0], [1], [2], [3]]
    with pytest.raises(DataError, match="no client has a sample to test on"):
        Federation(x, y, rows, Classification(2), held_out=[[], [], [], []])
    fed = Federation(x, y, rows, Classification(2), (x, y), held_out=[[], [], [], []])
    assert fed.held_out == []
    digits = load("digits")
    few = dataclasses.replace(digits, x_train=digits.x_train[:6], y_train=digits.y_train[:6])
    with pytest.raises(DataError, match="holds nothing out"):
        split_data(few, "iid", 6, "given", 0, 0.1)


def test_rows_to_validate_on_are_not_trained_on() -> None:
    x, y = torch.rand(4, 2), torch.tensor([0, 1, 0, 1])
    with pytest.raises(DataError, match="client 0 validates on rows that it also trains on"):
        Federation(x, y, [[0, 1]], Classification(2), validation=[[1]])


def test_pooled_data_are_one_client_with_the_same_tests() -> None:
    fed = federate(load("digits"), "dirichlet(0.5)", clients=4, split="holdout(0.2)")
    pooled = fed.pooled()
    assert pooled.sizes == [sum(fed.sizes)]
    assert torch.equal(pooled.rows, fed.rows)
    batches = zip(pooled.test_batches(), fed.test_batches(), strict=True)
    assert all(torch.equal(a.x, b.x) for a, b in batches)
