"""Paired tests and Holm's correction, against scipy and values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from kedge.history.compare import holm, paired


@pytest.mark.parametrize("n", [2, 3, 5, 20])
def test_the_paired_test_is_that_of_scipy(n: int) -> None:
    rng = np.random.default_rng(n)
    first, other = rng.normal(80, 2, n), rng.normal(81, 2, n)
    found, expected = paired(other - first), stats.ttest_rel(other, first)
    interval = expected.confidence_interval(0.95)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-10)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-10)
    assert found.is_clear == (interval.low > 0 or interval.high < 0)


def test_two_pairs_by_hand() -> None:
    """With one degree of freedom t is Cauchy's: differences 1 and 3 give t = 2 and
    p = 1 - 2 atan(2) / pi."""
    found = paired([1.0, 3.0])
    assert found.mean == 2.0
    assert found.p == pytest.approx(1 - 2 * math.atan(2) / math.pi)


def test_one_seed_has_neither_interval_nor_p_value() -> None:
    assert paired([4.0]) == (4.0, None, 1, None, None, None)
    assert not paired([4.0]).is_clear


def test_a_run_that_diverged_has_no_p_value() -> None:
    assert paired([1.0, math.nan]).p is None


def test_equal_differences_leave_nothing_to_estimate() -> None:
    assert paired([0.0, 0.0]).p == 1.0
    assert paired([0.1 + 0.2, 0.3]).p == 0.0  # equal but for rounding


def test_holm_by_hand() -> None:
    """Sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1: 0.02, 0.03, 0.06, 0.04 -> 0.06."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_holm_never_exceeds_one_and_leaves_out_what_is_unknown() -> None:
    assert holm([0.9, None, 0.8]) == [1.0, None, 1.0]
    assert holm([]) == []
    assert holm([0.2]) == [0.2]
