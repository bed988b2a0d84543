"""Measures of heterogeneity: bounds, symmetries and scales that hold for all counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kedge.diagnostics.data.features import squared_w2
from kedge.diagnostics.data.labels import (
    earth_movers,
    effective_classes,
    effective_clients,
    gini,
    jensen_shannon,
)

COUNTS = st.integers(2, 6).flatmap(
    lambda classes: arrays.arrays(np.int64, (3, classes), elements=st.integers(0, 50)).filter(
        lambda counts: bool((counts.sum(1) > 0).all())
    )
)
SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=20)
POINTS = st.lists(st.floats(-100, 100), min_size=1, max_size=12)


@given(COUNTS)
def test_label_measures_are_bounded_and_symmetric(counts: np.ndarray) -> None:
    a, b, c = counts
    present = (counts > 0).sum(1)
    assert (effective_classes(counts) <= present + 1e-9).all()
    assert (effective_classes(counts) >= 1 - 1e-9).all()
    for measure in (earth_movers, jensen_shannon):
        assert -1e-12 <= measure(a, b) <= 1 + 1e-12
        assert measure(a, b) == pytest.approx(measure(b, a), abs=1e-12)
        assert measure(a, 3 * a) == pytest.approx(0, abs=1e-12)
    assert earth_movers(a, c) <= earth_movers(a, b) + earth_movers(b, c) + 1e-12
    # Lin (1991): the Jensen-Shannon divergence in bits is at most the total variation
    assert jensen_shannon(a, b) <= earth_movers(a, b) + 1e-12


@given(SIZES, st.integers(2, 9))
def test_quantity_measures_do_not_depend_on_scale_or_order(sizes: list[int], by: int) -> None:
    clients = len(sizes)
    assert -1e-12 <= gini(sizes) <= 1 - 1 / clients + 1e-12
    assert gini([by * n for n in reversed(sizes)]) == pytest.approx(gini(sizes), abs=1e-12)
    assert 1 - 1e-9 <= effective_clients(sizes) <= clients + 1e-9
    assert gini(sizes * by) == pytest.approx(gini(sizes), abs=1e-9)  # of copies of all clients


@given(POINTS, POINTS)
def test_sorted_samples_are_transported_optimally(a: list[float], b: list[float]) -> None:
    left, right = np.sort(a), np.sort(b)
    copies = np.repeat(left, len(b)), np.repeat(right, len(a))  # of equal size
    expected = np.square(copies[0] - copies[1]).mean()
    assert squared_w2(left, right) == pytest.approx(expected, rel=1e-6, abs=1e-6)
