"""p-values by random draws."""

from __future__ import annotations

import numpy as np
import pytest

from kedge.diagnostics.data.sample import p_of_largest, p_value


def test_p_values_by_hand() -> None:
    assert p_value(5.0, np.array([1.0, 5.0, 7.0, 2.0])) == pytest.approx(3 / 5)
    assert p_value(9.0, np.zeros(99)) == 0.01


def test_the_largest_of_many_is_no_surprise() -> None:
    """20 values at random: in some 5 of 100 cases one of them has p <= 0.05, not in 64."""
    rng, cases = np.random.default_rng(0), []
    for _ in range(100):
        drawn = rng.exponential(size=(100, 20)) - 1
        cases.append(p_of_largest(drawn[0], drawn[1:]).min() <= 0.05)
    assert sum(cases) <= 11


def test_values_are_compared_in_units_of_their_noise() -> None:
    rng = np.random.default_rng(0)
    drawn = rng.normal(size=(99, 2)) * [1.0, 100.0]
    found = p_of_largest(np.array([8.0, 8.0]), drawn)
    assert found[0] == 0.01
    assert found[1] > 0.5
