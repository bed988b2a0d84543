"""Batch plans: every epoch is a permutation, and a client's plan is its own."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kedge.core import rng
from kedge.core.optim import SGD
from kedge.core.work import Lane, LocalWork, batch_indices, batches, client_keys, round_key
from kedge.errors import FieldError

SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=5)
SEEDS = st.integers(0, 2**40)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Tensor, list[int], list[int], int]:
    """``(keys, sizes, steps, batch)`` of clients of unequal size and work."""
    sizes = draw(SIZES)
    steps = draw(st.lists(st.integers(1, 6), min_size=len(sizes), max_size=len(sizes)))
    keys = rng.fold(rng.key(draw(SEEDS)), torch.arange(len(sizes)))
    return keys, sizes, steps, draw(st.integers(1, 7))


def used(found: Tensor, k: int, steps: list[int]) -> list[int]:
    """The samples of client ``k`` in the order of its steps; rows beyond them are not used."""
    return found[k, : steps[k]].flatten().tolist()


@given(plans())
def test_every_epoch_is_a_permutation(plan: tuple) -> None:
    keys, sizes, steps, batch = plan
    found = batch_indices(keys, sizes, steps, batch, replacement=False)
    assert found.shape == (len(sizes), max(steps), batch)
    assert found.dtype == torch.int64
    for k, size in enumerate(sizes):
        order = used(found, k, steps)
        epochs = [order[i : i + size] for i in range(0, len(order), size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs[:-1])
        assert len(set(epochs[-1])) == len(epochs[-1])  # the last one may be cut short
        assert set(order) <= set(range(size))
        assert 0 <= int(found[k].min()) <= int(found[k].max()) < size  # unused rows as well


@given(plans())
def test_epochs_are_the_permutations_of_their_keys(plan: tuple) -> None:
    """What a remote client can draw alone: epoch e of client k is the permutation of (key k, e)."""
    keys, sizes, steps, batch = plan
    found = batch_indices(keys, sizes, steps, batch, replacement=False)
    for k, size in enumerate(sizes):
        needed = math.ceil(steps[k] * batch / size)
        epochs = [_permutation(rng.fold(keys[k], e), size) for e in range(needed)]
        assert used(found, k, steps) == list(itertools.chain(*epochs))[: steps[k] * batch]


def _permutation(key: Tensor, n: int) -> list[int]:
    """The order of the draws as unsigned numbers."""
    draws = [int(b) & 0xFFFFFFFF for b in rng.bits(key, (n,))]
    return sorted(range(n), key=draws.__getitem__)


@given(plans(), st.booleans(), st.data())
def test_a_plan_does_not_depend_on_the_other_clients(
    plan: tuple, replacement: bool, data: st.DataObject
) -> None:
    keys, sizes, steps, batch = plan
    together = batch_indices(keys, sizes, steps, batch, replacement)
    order = data.draw(st.permutations(range(len(sizes))))
    turned = batch_indices(
        keys[order], [sizes[k] for k in order], [steps[k] for k in order], batch, replacement
    )
    for place, k in enumerate(order):
        alone = batch_indices(keys[k : k + 1], [sizes[k]], [steps[k]], batch, replacement)
        assert used(alone, 0, [steps[k]]) == used(together, k, steps)
        assert used(turned, place, [steps[j] for j in order]) == used(together, k, steps)


@given(plans(), st.booleans(), st.integers(1, 5))
def test_more_steps_continue_the_same_plan(plan: tuple, replacement: bool, more: int) -> None:
    keys, sizes, steps, batch = plan
    short = batch_indices(keys, sizes, steps, batch, replacement)
    long = batch_indices(keys, sizes, [t + more for t in steps], batch, replacement)
    for k in range(len(sizes)):
        assert used(long, k, steps) == used(short, k, steps)


@given(plans())
def test_with_replacement_every_draw_is_in_range_and_one_of_the_key(plan: tuple) -> None:
    keys, sizes, steps, batch = plan
    found = batch_indices(keys, sizes, steps, batch, replacement=True)
    for k, size in enumerate(sizes):
        expected = rng.integers(keys[k], (max(steps) * batch,), size)
        assert torch.equal(found[k].flatten(), expected)
        assert int(found[k].max()) < size


@given(SEEDS, st.integers(2, 8))
def test_every_sample_is_first_equally_often(seed: int, size: int) -> None:
    """Over 2000 clients, within six standard deviations; neighbouring epochs are unrelated."""
    clients = 2000
    keys = client_keys(round_key(rng.key(seed), 3), range(clients))
    found = batch_indices(keys, [size] * clients, [2] * clients, size, replacement=False)
    bound = 6 * math.sqrt(clients / size * (1 - 1 / size))
    for t in range(2):
        counts = torch.bincount(found[:, t, 0], minlength=size)
        assert float((counts - clients / size).abs().max()) < bound
    same = int((found[:, 0, 0] == found[:, 1, 0]).sum())
    assert abs(same - clients / size) < bound


@given(plans(), st.data())
def test_lanes_of_several_kinds_are_drawn_as_if_alone(plan: tuple, data: st.DataObject) -> None:
    keys, sizes, steps, batch = plan
    flags = [data.draw(st.booleans()) for _ in sizes]
    lanes = [
        Lane(k, n, t, LocalWork(batch=batch, replacement=flag), 0.1, SGD(), 0.0, n, 1.0)
        for k, (n, t, flag) in enumerate(zip(sizes, steps, flags, strict=True))
    ]
    together = batches(keys, lanes)
    for k, lane in enumerate(lanes):
        alone = batches(keys[k : k + 1], [lane])
        assert used(alone, 0, [steps[k]]) == used(together, k, steps)


@given(
    st.integers(1, 64), st.integers(1, 1000),
    st.one_of(st.integers(1, 20), st.floats(0.01, 20)),
)  # fmt: skip
def test_epochs_become_steps_that_cover_them(batch: int, size: int, epochs: float) -> None:
    steps = LocalWork(batch=batch, epochs=epochs).steps_for(size)
    assert steps >= 1
    assert steps * batch >= epochs * size - 1e-6 * batch  # every sample as often as asked for
    assert steps == 1 or (steps - 1) * batch < epochs * size  # and no step more
    assert LocalWork(batch=batch, steps=7).steps_for(size) == 7


@given(
    st.sampled_from(["batch", "steps", "epochs"]),
    st.one_of(st.integers(-3, 0), st.just(math.nan), st.just(math.inf), st.text("a1 ", max_size=2)),
)
def test_work_out_of_range_is_refused(field: str, value: object) -> None:
    with pytest.raises(FieldError, match=f"^{field} = "):
        LocalWork(**{field: value})  # type: ignore[arg-type]
