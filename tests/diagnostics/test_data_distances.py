"""Wasserstein distances: values by hand, and what scipy finds in one dimension."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import wasserstein_distance

from kedge.diagnostics.data.features import (
    squared_w2,
    unit_directions,
    wasserstein,
    weighted,
)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_transport_by_hand() -> None:
    # 0 -> 0.5 and 4 -> 3: (0.5 + 1) / 2
    assert wasserstein([[0.0], [4.0]], [[3.0], [0.5]]) == pytest.approx(0.75)


def test_one_dimension_is_a_matter_of_order(rng: np.random.Generator) -> None:
    a, b = rng.normal(size=(12, 1)), rng.normal(1, 2, size=(12, 1))
    expected = wasserstein_distance(a[:, 0], b[:, 0])
    assert wasserstein(a, b) == pytest.approx(expected, abs=1e-9)


def test_a_shift_is_at_its_length(rng: np.random.Generator) -> None:
    a = rng.normal(size=(9, 2))
    assert wasserstein(a, a + np.array([3.0, 4.0])) == pytest.approx(5.0)


def test_one_dimension_exactly() -> None:
    """3 samples against 2: quantile functions meet at thirds and halves."""
    a, b = np.array([0.0, 1.0, 5.0]), np.array([1.0, 2.0])
    # [0, 1/3]: 0-1, [1/3, 1/2]: 1-1, [1/2, 2/3]: 1-2, [2/3, 1]: 5-2
    assert squared_w2(a, b) == pytest.approx(1 / 3 + 0 + 1 / 6 + 9 / 3)


def test_directions_are_units_and_uniform(rng: np.random.Generator) -> None:
    """Along unit directions u, a shift s moves all quantiles by u s; the mean of (u s)^2 is
    |s|^2 / d over all directions."""
    x, shift = rng.normal(size=(20, 4)), np.array([3.0, 0.0, 4.0, 0.0])
    many = unit_directions(4000, 4)
    assert np.linalg.norm(many, axis=1) == pytest.approx(np.ones(4000))
    left, right = (np.sort(v @ many.T, axis=0).T for v in (x, x + shift))
    assert squared_w2(left, right).mean() == pytest.approx(25 / 4, rel=0.06)


# -- conditional (FedImpro, Definition 4.1) -----------------------------------------------------


def test_the_mean_within_classes_is_scaled_up_to_the_classes_that_are_known() -> None:
    """Class 0 is at distance 1, class 1 at 4; a third class is on one side only."""
    found = weighted(np.array([0.5, 0.25]), np.array([1.0, 4.0]))
    assert (found.value, found.covered) == (2.0, 0.75)
    none = weighted(np.array([]), np.array([]))
    assert np.isnan(none.value)
    assert none.covered == 0.0
