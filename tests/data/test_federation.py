"""The federation on the device: which rows make which batch, sweeps, counts, errors."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kedge.core import rng
from kedge.core.task import Classification, MultiLabel, Regression
from kedge.core.work import LocalWork, batch_indices
from kedge.data import federation
from kedge.data.federation import Federation
from kedge.errors import DataError, FieldError
from kedge.sim.simulation import Simulation


def keys_of(clients: int, seed: int = 0) -> Tensor:
    return rng.fold(rng.key(seed), torch.arange(clients))


def flat(plan: Tensor, client: int, steps: int) -> list[int]:
    """What a client sees in its own steps, one sample after the other."""
    return plan[client, :steps].flatten().tolist()


def passes(seen: list[int], size: int) -> list[list[int]]:
    return [seen[i : i + size] for i in range(0, len(seen), size)]


# -- batches without replacement ---------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4, 7, 32])
def test_every_epoch_of_every_client_is_a_permutation(batch: int) -> None:
    sizes = [10, 1, 33, 7, 64]
    steps = [math.ceil(3 * n / batch) for n in sizes]  # ragged: three epochs each, rounded up
    plan = batch_indices(keys_of(5), sizes, steps, batch, replacement=False)
    assert plan.shape == (5, max(steps), batch)
    assert plan.dtype == torch.int64
    for k, size in enumerate(sizes):
        seen = flat(plan, k, steps[k])
        assert len(seen) == steps[k] * batch
        *whole, last = passes(seen, size)
        assert len(whole) >= 2
        for epoch in whole:
            assert sorted(epoch) == list(range(size))
        assert len(set(last)) == len(last)  # the epoch that was begun
        assert set(last) <= set(range(size))


def test_a_client_with_fewer_samples_than_a_batch_repeats_them_evenly() -> None:
    plan = batch_indices(keys_of(2), [3, 5], [4, 4], 8, replacement=False)
    for k, size in enumerate([3, 5]):
        counts = Counter(flat(plan, k, 4))
        assert set(counts) == set(range(size))
        assert max(counts.values()) - min(counts.values()) <= 1
        for row in plan[k].tolist():
            assert len(row) == 8
            assert max(Counter(row).values()) <= math.ceil(8 / size) + 1


def test_epochs_differ_and_clients_differ() -> None:
    plan = batch_indices(keys_of(2), [50, 50], [4, 4], 50, replacement=False)
    orders = [tuple(plan[k, t].tolist()) for k in range(2) for t in range(4)]
    assert len(set(orders)) == 8
    assert all(o != tuple(range(50)) for o in orders)


def test_a_clients_batches_do_not_depend_on_the_cohort() -> None:
    sizes, steps, keys = [10, 3, 25], [5, 9, 2], keys_of(3)
    together = batch_indices(keys, sizes, steps, 4, replacement=False)
    for k in range(3):
        alone = batch_indices(keys[k : k + 1], sizes[k : k + 1], steps[k : k + 1], 4, False)
        assert torch.equal(alone[0], together[k, : steps[k]])
    order = [2, 0, 1]
    turned = batch_indices(
        keys[order], [sizes[i] for i in order], [steps[i] for i in order], 4, False
    )
    for new, old in enumerate(order):
        assert torch.equal(turned[new, : steps[old]], together[old, : steps[old]])


def test_more_steps_go_on_where_fewer_stopped() -> None:
    short = batch_indices(keys_of(1), [10], [3], 4, False)
    long = batch_indices(keys_of(1), [10], [9], 4, False)
    assert torch.equal(long[:, :3], short)


def test_a_batch_size_only_cuts_the_same_stream() -> None:
    one = batch_indices(keys_of(1), [10], [12], 2, False)
    other = batch_indices(keys_of(1), [10], [3], 8, False)
    assert torch.equal(one.flatten(), other.flatten())


def test_orders_are_uniform() -> None:
    clients = 6000
    plan = batch_indices(keys_of(clients), [3] * clients, [2] * clients, 3, False)
    for epoch in range(2):
        counts = Counter(tuple(order) for order in plan[:, epoch].tolist())
        assert len(counts) == 6
        chi2 = sum((c - 1000) ** 2 / 1000 for c in counts.values())
        assert chi2 < 5 + 5 * math.sqrt(10)
    pairs = Counter((tuple(a), tuple(b)) for a, b in plan.tolist())  # the epochs are independent
    expected = clients / 36
    chi2 = sum((pairs[p] - expected) ** 2 / expected for p in pairs)
    assert len(pairs) == 36
    assert chi2 < 35 + 5 * math.sqrt(70)


def test_a_plan_is_a_function_of_its_keys() -> None:
    a = batch_indices(keys_of(2), [9, 5], [4, 4], 3, False)
    assert torch.equal(a, batch_indices(keys_of(2), [9, 5], [4, 4], 3, False))
    assert not torch.equal(a, batch_indices(keys_of(2, seed=1), [9, 5], [4, 4], 3, False))


# -- batches with replacement ------------------------------------------------------------------


def test_with_replacement_every_sample_is_drawn_afresh() -> None:
    sizes, steps = [10, 3], [2000, 1000]
    plan = batch_indices(keys_of(2), sizes, steps, 10, replacement=True)
    assert plan.shape == (2, 2000, 10)
    for k, size in enumerate(sizes):
        seen = torch.tensor(flat(plan, k, steps[k]))
        counts = torch.bincount(seen, minlength=size).double()
        assert len(counts) == size
        expected = len(seen) / size
        chi2 = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi2 - (size - 1)) < 5 * math.sqrt(2 * (size - 1))
    repeats = [len(set(row)) < 10 for row in plan[0].tolist()]
    assert np.mean(repeats) > 0.99  # ten draws of ten are almost never all different


def test_with_replacement_a_client_does_not_depend_on_the_cohort() -> None:
    keys = keys_of(3)
    together = batch_indices(keys, [10, 3, 25], [5, 9, 2], 4, replacement=True)
    alone = batch_indices(keys[1:2], [3], [9], 4, replacement=True)
    assert torch.equal(alone[0], together[1])


# -- local work --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("work", "size", "steps"),
    [
        (LocalWork(batch=32), 64, 2),
        (LocalWork(batch=32), 65, 3),
        (LocalWork(batch=32), 1, 1),
        (LocalWork(batch=32, epochs=5), 100, 16),
        (LocalWork(batch=10, epochs=0.1), 100, 1),
        (LocalWork(batch=10, epochs=0.3), 100, 3),  # 0.3 * 100 / 10 is a little above 3
        (LocalWork(batch=10, epochs=0.7), 10, 1),
        (LocalWork(batch=32, steps=7), 5, 7),
        (LocalWork(batch=32, steps=7, epochs=3), 5000, 7),
    ],
)
def test_epochs_are_a_way_to_write_steps(work: LocalWork, size: int, steps: int) -> None:
    assert work.steps_for(size) == steps


@pytest.mark.parametrize(
    "values", [{"batch": 0}, {"batch": -1}, {"steps": 0}, {"epochs": 0}, {"epochs": -1}]
)
def test_local_work_without_work_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(FieldError):
        LocalWork(**values)


# -- the federation ----------------------------------------------------------------------------

Y = torch.tensor([0, 0, 1, 2, 2, 2, 1, 0, 1, 1])
CLIENTS = [[9, 0, 4], [1], [2, 3, 5, 6, 7, 8]]


def make(y: Any = Y, clients: Any = CLIENTS, task: Any = None, **options: Any) -> Federation:
    x = torch.arange(10.0)[:, None].repeat(1, 2)
    return Federation(x, y, clients, task or Classification(3), **options)


def test_sizes_and_types() -> None:
    fed = make()
    assert (fed.num_clients, fed.sizes, fed.offsets) == (3, [3, 1, 6], [0, 3, 4])
    assert fed.input_shape == (2,)
    assert fed.rows.tolist() == [9, 0, 4, 1, 2, 3, 5, 6, 7, 8]
    assert (fed.x.dtype, fed.y.dtype) == (torch.float32, torch.int64)
    assert make(dtype=torch.float64).x.dtype == torch.float64
    assert make(y=Y.float() / 2, task=Regression()).y.dtype == torch.float32
    assert not fed.has_test


def test_clients_may_be_arrays_ranges_or_lists() -> None:
    forms = [np.array([9, 0, 4]), range(1, 2), torch.tensor([2, 3, 5, 6, 7, 8])]
    assert make(clients=forms).rows.tolist() == make().rows.tolist()


def test_a_batch_is_a_gather() -> None:
    fed = make()
    batch = fed.clean(torch.tensor([[2, 9], [0, 5]]))
    assert batch.x[..., 0].tolist() == [[2, 9], [0, 5]]
    assert batch.y.tolist() == [[1, 1], [0, 2]]
    assert batch.target is None


def test_a_plan_names_rows_of_the_federation() -> None:
    fed, work = make(), LocalWork(batch=4, epochs=2)
    clients = [2, 0]
    model = nn.Sequential(nn.Flatten(), nn.Linear(fed.x[0].numel(), 3))
    sim = Simulation(fed, model, work=work)
    plan, steps = sim.cohort(clients).batches, sim.cohort(clients).steps
    assert steps == [work.steps_for(fed.sizes[k]) for k in clients]
    assert plan.shape == (2, 3, 4)
    for i, k in enumerate(clients):
        seen = flat(plan, i, steps[i])
        assert Counter(seen[: fed.sizes[k]]) == Counter(CLIENTS[k])
        assert set(seen) == set(CLIENTS[k])
    alone = sim.cohort([0]).batches
    assert torch.equal(alone[0], plan[1, : steps[1]])


def test_label_counts() -> None:
    counts = make().label_counts()
    assert counts.tolist() == [[1, 1, 1], [1, 0, 0], [1, 3, 2]]
    assert counts.dtype == torch.float32
    bits = torch.stack([Y == 0, Y > 0], 1).int()
    assert make(y=bits, task=MultiLabel(2)).label_counts().tolist() == [[1, 2], [1, 0], [1, 5]]


@pytest.mark.parametrize("size", [2, 4, 256])
def test_chunks_hold_every_row_once_under_the_mask(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(federation, "SWEEP_ROWS", size)
    fed, clients = make(), [2, 1, 0]
    index, mask = fed.sweep_pieces(clients)
    assert index.shape == mask.shape == (3, math.ceil(6 / size), size)
    assert set(mask.unique().tolist()) <= {0.0, 1.0}
    for i, k in enumerate(clients):
        kept = index[i][mask[i] == 1].tolist()
        assert Counter(kept) == Counter(CLIENTS[k])
        assert set(index[i].flatten().tolist()) == set(CLIENTS[k])  # fillers are its own rows
        times = Counter(index[i].flatten().tolist()).values()
        assert max(times) - min(times) <= 1  # all alike: batch statistics stay as they are
    one = fed.sweep_pieces([1])
    assert one.mask.sum() == 1


def test_wrong_data_is_refused() -> None:
    with pytest.raises(DataError, match="10 inputs but 9 labels"):
        make(y=Y[:9])
    with pytest.raises(DataError, match="client 1 has no samples; give it some or leave it out"):
        make(clients=[[0], []])
    with pytest.raises(DataError, match=r"client 0 names a row outside 0\.\.9"):
        make(clients=[[10]])
    with pytest.raises(DataError, match=r"client 1 names a row outside 0\.\.9"):
        make(clients=[[0], [-1]])


@pytest.mark.parametrize(
    "options",
    [
        {"clients": []},
        {"clients": [torch.tensor([True] * 5 + [False] * 5)]},  # a mask, taken for rows 0 and 1
        {"clients": [[0.5, 1.5]]},
        {"y": Y + 1},  # label 3 of 3 classes
        {"y": Y - 1},
        {"y": Y + 0.5},
        {"y": Y, "task": MultiLabel(3)},  # not one column per label
        {"test": (torch.zeros(3, 2), torch.zeros(2))},
        {"test": (torch.zeros(3, 5), torch.zeros(3))},  # another shape of inputs
        {"held_out": [[0]]},  # one list for three clients
        {"held_out": [[0], [], []]},  # row 0 is trained on as well
    ],
    ids=[
        *("none", "mask", "fraction", "high", "low", "real", "flat", "lengths", "shape"),
        *("held-lists", "held-trained"),
    ],
)
def test_more_wrong_data_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        make(**options)


# -- inputs as models see them -----------------------------------------------------------------

IMAGES = np.arange(10 * 12, dtype=np.uint8).reshape(10, 3, 2, 2)


def of_images(x: Any = IMAGES, **options: Any) -> Federation:
    return Federation(x, np.asarray(Y), CLIENTS, Classification(3), **options)


def test_images_stay_bytes_until_they_are_gathered() -> None:
    fed = of_images()
    assert fed.x.dtype == torch.uint8
    assert fed.input_shape == (3, 2, 2)
    batch = fed.clean(torch.tensor([2, 9]))
    assert batch.x.dtype == torch.float32
    torch.testing.assert_close(batch.x, torch.from_numpy(IMAGES[[2, 9]]) / 255)


def test_inputs_are_normalised_by_the_moments_of_their_channel_or_column() -> None:
    mean, std = [0.1, 0.2, 0.3], [1.0, 2.0, 4.0]
    index = torch.tensor([5, 0])
    found = of_images(moments=(mean, std)).clean(index).x
    expected = torch.from_numpy(IMAGES[[5, 0]]) / 255
    for c in range(3):
        torch.testing.assert_close(found[:, c], (expected[:, c] - mean[c]) / std[c])
    table = make(moments=([1.0, 2.0], [2.0, 4.0])).clean(index).x
    torch.testing.assert_close(table, torch.tensor([[2.0, 0.75], [-0.5, -0.5]]))


def test_without_augmentation_a_batch_is_the_clean_one() -> None:
    fed, index = of_images(moments=([0.5] * 3, [0.5] * 3)), torch.tensor([1, 2, 3])
    assert not fed.is_random
    assert torch.equal(fed.batch(index, rng.key(0)).x, fed.clean(index).x)


def test_augmentation_is_a_function_of_the_key_and_leaves_labels_and_clean_samples_alone() -> None:
    fed, plain = of_images(augment="crop(1)+flip"), of_images()
    index = torch.arange(10)
    assert fed.is_random
    first = fed.batch(index, rng.key(0))
    assert torch.equal(first.x, fed.batch(index, rng.key(0)).x)
    assert not torch.equal(first.x, fed.batch(index, rng.key(1)).x)
    assert torch.equal(first.y, Y)
    assert torch.equal(fed.clean(index).x, plain.clean(index).x)
    with pytest.raises(DataError, match="for images"):
        make(augment="flip")


def test_a_test_set_comes_in_pieces_and_in_the_same_types() -> None:
    fed = make(test=(np.arange(10.0).reshape(5, 2), [0, 1, 2, 0, 1]), moments=([1, 1], [2, 2]))
    assert fed.has_test
    pieces = list(fed.test_batches(rows=2))
    assert [len(b.x) for b in pieces] == [2, 2, 1]
    assert (pieces[0].x.dtype, pieces[0].y.dtype) == (torch.float32, torch.int64)
    whole = torch.cat([b.x for b in pieces])
    torch.testing.assert_close(whole, (torch.arange(10.0).reshape(5, 2) - 1) / 2)
    assert torch.cat([b.y for b in pieces]).tolist() == [0, 1, 2, 0, 1]


def test_what_clients_hold_out_is_the_test_set_where_there_is_none() -> None:
    fed = make(clients=[[0, 1], [2, 3]], held_out=[[4], [5, 6]])
    assert fed.has_test
    assert [b.x[:, 0].tolist() for b in fed.test_batches()] == [[4, 5, 6]]
    assert [b.x[:, 0].tolist() for b in fed.held_out_batches(1, rows=1)] == [[5], [6]]
    assert fed.rows.tolist() == [0, 1, 2, 3]
    with pytest.raises(DataError, match=r"client 1 names a held-out row outside 0\.\.9"):
        make(held_out=[[0], [10], []])
    with pytest.raises(DataError, match="nothing to test on"):
        next(make().test_batches())


def test_a_turned_test_set() -> None:
    square = torch.rand(4, 1, 5, 5, generator=torch.Generator().manual_seed(0))
    test = (square, [0, 1, 2, 0])
    fed = Federation(square, [0, 1, 2, 0], [range(4)], Classification(3), test, angles=(0, 90))
    (turned,) = fed.test_batches(angle=90.0)
    torch.testing.assert_close(turned.x, torch.rot90(square, 1, (2, 3)), rtol=0, atol=1e-5)
    (plain,) = fed.test_batches()
    assert torch.equal(plain.x, square)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_test_inputs_must_be_finite(bad) -> None:
    x, y = torch.rand(6, 4), torch.tensor([0, 1, 0, 1, 0, 1])
    wrong = x.clone()
    wrong[3, 1] = bad
    with pytest.raises(DataError, match="test inputs are NaN or infinite, first in row 3"):
        Federation(x, y, [[0, 1], [2, 3]], Classification(2), (wrong, y))
    with pytest.raises(DataError, match="^inputs are NaN or infinite, first in row 3"):
        Federation(wrong, y, [[0, 1], [2, 3]], Classification(2))


def test_token_ids_stay_whole_numbers() -> None:
    x, y = torch.tensor([[1, 2**40 + 1], [3, 4], [5, 6]]), torch.tensor([0, 1, 0])
    fed = Federation(x, y, [[0, 1]], Classification(2), (x, y), moments=([3.0], [2.0]), tokens=True)
    key = torch.tensor([1, 2], dtype=torch.int32)
    rows = torch.tensor([0, 2])
    assert torch.equal(fed.batch(rows, key).x, x[rows])
    assert torch.equal(fed.clean(rows).x, x[rows])
    assert torch.equal(next(iter(fed.test_batches())).x, x)
    assert fed.x.dtype == torch.int64
    plain = Federation(x, y, [[0, 1]], Classification(2))
    assert plain.x.dtype == torch.float32
    with pytest.raises(DataError, match="not whole numbers"):
        Federation(x + 0.5, y, [[0, 1]], Classification(2), tokens=True)
