"""Nearest neighbours by hand, in chunks, and with copies among them."""

from __future__ import annotations

import math

import torch

from kedge.core import rng
from kedge.diagnostics.privacy.copies import closeness, nearest


def test_by_hand() -> None:
    base = torch.tensor([[0.0, 0.0], [6.0, 8.0], [10.0, 0.0]])
    found = nearest(torch.tensor([[2.0, 2.0], [9.0, 1.0]]), [base])
    assert found.places.tolist() == [0, 2]
    assert found.distance.tolist() == [2.0, 1.0]  # root of (4 + 4) / 2, of (1 + 1) / 2


def test_chunks_change_nothing_and_own_rows_are_skipped() -> None:
    x = rng.normal(rng.key(0), (20, 5), torch.float64)
    distance = (x[:, None] - x).square().mean(-1).sqrt()
    distance.fill_diagonal_(torch.inf)
    own = torch.arange(20)
    for size in (20, 7, 1):
        found = nearest(x, torch.split(x, size), own=own)
        assert torch.equal(found.places, distance.argmin(1))
        assert torch.allclose(found.distance, distance.min(1).values)


def test_a_copy_is_at_distance_zero() -> None:
    x = 100 + rng.normal(rng.key(1), (50, 300))  # float32, far from 0: squares cancel badly
    found = nearest(x[7:9], [x])
    assert found.places.tolist() == [7, 8]
    assert found.distance.tolist() == [0.0, 0.0]


def test_closeness_counts_copies() -> None:
    usual = torch.tensor([1.0, 2.0, 3.0])
    close = closeness(torch.tensor([0.0, 0.5, 0.51, 8.0, 9.0]), usual)
    assert math.isclose(close.distance, 0.51, rel_tol=1e-6)
    assert (close.usual, close.copies, close.samples) == (2.0, 2, 5)
    assert math.isclose(close.ratio, 0.255, rel_tol=1e-6)


def test_training_samples_that_repeat_each_other() -> None:
    close = closeness(torch.tensor([0.0, 1.0, 1.0]), torch.zeros(3))
    assert math.isinf(close.ratio)
    assert close.copies == 1
