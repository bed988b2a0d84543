"""Wasserstein distances: values by hand, closed forms of Gaussians, and two solvers that agree."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.linalg import sqrtm
from scipy.spatial.distance import cdist
from scipy.stats import wasserstein_distance

from kedge.diagnostics.data import distances
from kedge.diagnostics.data.distances import (
    conditional_wasserstein,
    sliced_wasserstein,
    squared_w2,
    transport,
    transport_by_pot,
    unit_directions,
    wasserstein,
)
from kedge.diagnostics.data.gaussian import bures_wasserstein, fit_gaussian


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_transport_by_hand() -> None:
    # 0 -> 0.5 and 4 -> 3: (0.5 + 1) / 2
    assert wasserstein([[0.0], [4.0]], [[3.0], [0.5]]) == pytest.approx(0.75)
    assert wasserstein([[0.0], [4.0]], [[3.0], [0.5]], power=2) == pytest.approx(
        np.sqrt((0.25 + 1) / 2)
    )
    # half of the mass at 0 goes to 0, the other half to 3
    assert wasserstein([[0.0]], [[0.0], [3.0]]) == pytest.approx(1.5)


def test_pot_and_the_linear_program_agree(rng: np.random.Generator) -> None:
    pytest.importorskip("ot")
    a, b = rng.normal(size=(13, 3)), rng.normal(1, 2, size=(8, 3))
    cost = cdist(a, b)
    assert transport_by_pot(cost) == pytest.approx(transport(cost), abs=1e-9)


@pytest.mark.parametrize("is_installed", [True, False])
def test_samples_of_unequal_size_with_and_without_pot(
    rng: np.random.Generator, is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_installed:
        pytest.importorskip("ot")
    else:
        monkeypatch.setattr(distances, "find_spec", lambda name: None)
    a, b = rng.normal(size=(12, 1)), rng.normal(1, 2, size=(7, 1))
    expected = wasserstein_distance(a[:, 0], b[:, 0])
    assert wasserstein(a, b) == pytest.approx(expected, abs=1e-9)


def test_equal_sizes_are_the_same_problem(rng: np.random.Generator) -> None:
    a, b = rng.normal(size=(9, 2)), rng.normal(size=(9, 2))
    assert wasserstein(a, b) == pytest.approx(transport(cdist(a, b)), abs=1e-9)
    assert wasserstein(a, a + np.array([3.0, 4.0])) == pytest.approx(5.0)


def test_one_dimension_exactly() -> None:
    """3 samples against 2: quantile functions meet at thirds and halves."""
    a, b = np.array([0.0, 1.0, 5.0]), np.array([1.0, 2.0])
    # [0, 1/3]: 0-1, [1/3, 1/2]: 1-1, [1/2, 2/3]: 1-2, [2/3, 1]: 5-2
    assert squared_w2(a, b) == pytest.approx(1 / 3 + 0 + 1 / 6 + 9 / 3)
    assert squared_w2(a, b) == pytest.approx(wasserstein(a[:, None], b[:, None], power=2) ** 2)


def test_a_shift_is_sliced_to_its_length_over_the_root_of_the_dimension(
    rng: np.random.Generator,
) -> None:
    """Along unit directions u, a shift s moves all quantiles by u s; the mean of (u s)^2 is
    |s|^2 / d over all directions."""
    x, shift = rng.normal(size=(20, 4)), np.array([3.0, 0.0, 4.0, 0.0])
    axes = np.eye(4)
    assert sliced_wasserstein(x, x + shift, axes) == pytest.approx(5 / 2)
    many = unit_directions(4000, 4)
    assert np.linalg.norm(many, axis=1) == pytest.approx(np.ones(4000))
    assert sliced_wasserstein(x, x + shift, many) == pytest.approx(5 / 2, rel=0.03)


def test_sliced_distance_agrees_with_pot(rng: np.random.Generator) -> None:
    ot = pytest.importorskip("ot")
    a, b = rng.normal(size=(30, 5)), rng.normal(0.5, 2, size=(21, 5))
    lines = unit_directions(16, 5)
    expected = ot.sliced_wasserstein_distance(a, b, projections=lines.T, p=2)
    assert sliced_wasserstein(a, b, lines) == pytest.approx(expected, rel=1e-9)


# -- Gaussians ---------------------------------------------------------------------------------


def test_gaussians_by_hand() -> None:
    # commuting covariances: |m|^2 + (2 - 1)^2 + (5 - 3)^2
    found = bures_wasserstein([0, 0], np.diag([1.0, 9.0]), [2, 0], np.diag([4.0, 25.0]))
    assert found == pytest.approx(3.0)
    assert bures_wasserstein([0, 0], [1.0, 9.0], [2, 0], [4.0, 25.0]) == pytest.approx(3.0)
    assert bures_wasserstein([1.0], [[4.0]], [1.0], [[4.0]]) == 0.0


def test_gaussians_by_the_formula_of_matrices(rng: np.random.Generator) -> None:
    def covariance() -> np.ndarray:
        factor = rng.normal(size=(4, 4))
        return factor @ factor.T

    a, b, mean = covariance(), covariance(), rng.normal(size=4)
    root = sqrtm(a)
    spread = np.trace(a + b - 2 * sqrtm(root @ b @ root)).real
    assert bures_wasserstein(np.zeros(4), a, mean, b) == pytest.approx(
        np.sqrt(mean @ mean + spread)
    )
    assert bures_wasserstein(mean, b, np.zeros(4), a) == pytest.approx(
        bures_wasserstein(np.zeros(4), a, mean, b)
    )


def test_samples_of_gaussians_approach_the_closed_form(rng: np.random.Generator) -> None:
    a = rng.normal(size=(400, 2))
    b = rng.normal(size=(400, 2)) * [2.0, 1.0] + [3.0, 0.0]
    exact = bures_wasserstein([0, 0], np.eye(2), [3, 0], np.diag([4.0, 1.0]))
    assert wasserstein(a, b, power=2) == pytest.approx(exact, rel=0.05)
    assert bures_wasserstein(*fit_gaussian(a), *fit_gaussian(b)) == pytest.approx(exact, rel=0.05)


def test_a_linear_map_of_samples_is_at_the_distance_of_their_gaussians(
    rng: np.random.Generator,
) -> None:
    """x -> A x + m with a positive definite A is an optimal map, so both distances are equal."""
    x = rng.normal(size=(40, 3))
    factor = rng.normal(size=(3, 3))
    moved = x @ (factor @ factor.T + np.eye(3)) + [1.0, 2.0, 3.0]
    closed = bures_wasserstein(*fit_gaussian(x), *fit_gaussian(moved))
    assert wasserstein(x, moved, power=2) == pytest.approx(closed, rel=1e-9)


# -- conditional (FedImpro, Definition 4.1) -----------------------------------------------------


def test_conditional_distance_by_hand() -> None:
    """Class 0 is at distance 1, class 1 at 4. D has shares 3/4 and 1/4, D' has 1/2 each."""
    x, y = [[0.0], [0.0], [0.0], [0.0]], [0, 0, 0, 1]
    other, y_other = [[1.0], [4.0]], [0, 1]
    found = conditional_wasserstein(x, y, other, y_other)
    assert found.value == pytest.approx((0.75 * 1 + 0.25 * 4) / 2 + (0.5 * 1 + 0.5 * 4) / 2)
    assert found.covered == 1.0
    back = conditional_wasserstein(other, y_other, x, y)
    assert back.value == pytest.approx(found.value)


def test_classes_that_one_side_lacks_are_left_out_and_said() -> None:
    found = conditional_wasserstein([[0.0], [0.0]], [0, 1], [[2.0], [9.0]], [0, 2])
    assert (found.value, found.covered) == (2.0, 0.5)
    none = conditional_wasserstein([[0.0]], [0], [[2.0]], [1])
    assert np.isnan(none.value)
    assert none.covered == 0.0


def test_label_skew_alone_has_no_conditional_distance() -> None:
    x = np.array([[0.0, 0.0], [0.0, 0.0], [3.0, 1.0]])
    found = conditional_wasserstein(x, [0, 0, 1], x[[0, 2, 2]], [0, 1, 1])
    assert found.value == 0.0


def test_conditional_distance_with_gaussians(rng: np.random.Generator) -> None:
    def gaussian(a: np.ndarray, b: np.ndarray) -> float:
        return bures_wasserstein(*fit_gaussian(a), *fit_gaussian(b))

    x, y = rng.normal(size=(30, 2)), np.arange(30) % 3
    found = conditional_wasserstein(x, y, x + np.array([3.0, 4.0]), y, gaussian)
    assert found.value == pytest.approx(5.0)
