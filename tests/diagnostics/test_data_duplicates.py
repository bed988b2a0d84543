"""Duplicates: equal samples are counted, near ones are found, and distinct ones are not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kedge.data.build import federate
from kedge.data.datasets import load
from kedge.diagnostics.data.features import features_of
from kedge.diagnostics.data.outliers import (
    EXPECTED_FALSE,
    equal_samples,
    hashes,
    intrinsic_dimension,
    near_samples,
    threshold,
)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_hashes_are_equal_for_equal_rows_only() -> None:
    x = torch.tensor([[0.0, 1.0], [-0.0, 1.0], [1.0, 0.0]])
    codes = hashes(x)
    assert codes[0] == codes[1] != codes[2]
    assert hashes(x, torch.tensor([2, 0])).tolist() == [codes[2], codes[0]]
    images = torch.randint(0, 256, (50, 1, 8, 8), dtype=torch.uint8)
    assert len(np.unique(hashes(images))) == 50


def test_equal_samples_by_hand() -> None:
    """Input a: clients 0, 0, 1. Input b: clients 1, 2. Input c: client 2 twice. d: once."""
    codes = np.array([1, 1, 1, 2, 2, 3, 3, 4])
    owner = np.array([0, 0, 1, 1, 2, 2, 2, 0])
    found = equal_samples(codes, owner, np.array([0, 0, 0, 0, 1, 0, 0, 0]))
    assert (found.across, found.within, found.conflicts) == (5, 2, 2)
    assert found.clients == ((0, 1, 1), (1, 2, 1))
    assert equal_samples(np.arange(3), np.arange(3), np.zeros(3)).across == 0


def test_the_threshold_keeps_its_promise(rng: np.random.Generator) -> None:
    """Uniform points on a torus of 3 dimensions: their dimension is found, and the ratio of
    neighbour distances exceeds t as often as Beta(1, 9) says."""
    x = torch.from_numpy(rng.random((1500, 3)))
    gaps = (x[:, None] - x).abs()
    distance = torch.minimum(gaps, 1 - gaps).norm(dim=-1).fill_diagonal_(torch.inf)
    few = distance.topk(10, largest=False).values.numpy()
    dimension = intrinsic_dimension(few[:, 0], few[:, 9])
    assert dimension == pytest.approx(3.0, rel=0.1)
    t = 4.0
    expected = 1 - (1 - t**-3.0) ** 9
    assert (few[:, 9] / few[:, 0] > t).mean() == pytest.approx(expected, rel=0.15)
    limit = threshold(3000, 3.0)
    assert 3000 * (1 - (1 - limit**-3.0) ** 9) == pytest.approx(EXPECTED_FALSE)


def test_near_duplicates_are_found_and_others_are_not(rng: np.random.Generator) -> None:
    x = rng.normal(size=(1000, 6))
    owner = np.arange(1000) % 5
    codes = np.arange(1000)
    found = near_samples(x, owner, codes)
    assert found is not None
    assert found.number == 0
    x[1] = x[0] + 1e-4  # on clients 0 and 1
    x[7] = x[2] + 1e-4  # both on client 2: not across
    found = near_samples(x, owner, codes)
    assert found is not None
    assert sorted(found.pairs) == [(0, 1), (1, 0)]
    assert found.dimension == pytest.approx(6, rel=0.3)


def test_several_copies_are_found_as_well(rng: np.random.Generator) -> None:
    """Five copies: the tenth neighbour is still a stranger."""
    x = rng.normal(size=(500, 6))
    x[1:5] = x[0] + 1e-4 * rng.normal(size=(4, 6))
    found = near_samples(x, np.arange(500) % 5, np.arange(500))
    assert found is not None
    assert {i for i, _ in found.pairs} == {0, 1, 2, 3, 4}


def test_equal_samples_do_not_count_as_near_ones(rng: np.random.Generator) -> None:
    x, codes = rng.normal(size=(200, 6)), np.arange(200)
    x[1], codes[1] = x[0], codes[0]
    found = near_samples(x, np.arange(200) % 2, codes)
    assert found is not None
    assert (found.number, found.samples) == (0, 199)


@pytest.mark.parametrize("dim", [1, 2])
def test_few_dimensions_or_samples_tell_nothing(rng: np.random.Generator, dim: int) -> None:
    x = rng.normal(size=(400, dim)).round(1)
    assert near_samples(x, np.arange(400) % 2, np.arange(400)) is None
    assert near_samples(x[:20], np.arange(20) % 2, np.arange(20)) is None


def test_digits_have_none_until_they_are_copied() -> None:
    federation = federate(load("digits"), "iid", clients=5)
    rows, owner = federation.rows, np.repeat(np.arange(5), federation.sizes)
    values = features_of(federation, rows).values
    found = near_samples(values, owner, hashes(federation.x, rows))
    assert found is not None
    assert found.number == 0
    federation.x = federation.x.clone()
    source, copy = rows[0], rows[federation.offsets[1]]
    federation.x[copy] = federation.x[source]
    federation.x[copy, 0, 4, 4] += 1  # one pixel by one grey value
    values = features_of(federation, rows).values
    found = near_samples(values, owner, hashes(federation.x, rows))
    assert found is not None
    assert sorted(found.pairs) == [(0, federation.offsets[1]), (federation.offsets[1], 0)]
