"""Statistics over silos are those of all values together, though no function sees two silos."""

from __future__ import annotations

import numpy as np
import pytest

from kedge.data.datasets.tables import encoding as fit

RNG = np.random.default_rng(3)


def test_the_mean_is_the_sum_of_sums():
    silos = [RNG.normal(size=n) for n in (3, 50, 1)]
    assert fit.mean(silos) == sum(v.sum() for v in silos) / 54
    assert fit.mean(silos) == pytest.approx(np.concatenate(silos).mean(), rel=1e-12)


@pytest.mark.parametrize("sizes", [(1,), (2, 3), (4, 4), (7, 1, 500)])
def test_the_median_of_few_distinct_values_is_exact(sizes):
    silos = [RNG.integers(0, 40, n).astype(float) for n in sizes]
    assert fit.median(silos) == np.median(np.concatenate(silos))


@pytest.mark.parametrize("draw", [RNG.normal, RNG.standard_cauchy])
def test_the_median_of_many_values_is_within_its_bound(draw):
    silos = [draw(size=3000), draw(size=2001) + 2]
    every = np.concatenate(silos)
    bound = (every.max() - every.min()) / 2000
    error = abs(fit.median(silos) - np.median(every))
    assert 0 < error <= bound


def test_an_empty_silo_changes_no_median():
    assert fit.median([np.array([1.0, 5.0]), np.array([])]) == 3


def test_shares_are_counts_over_silos():
    silos = [np.array([0, 0, 1]), np.array([], np.int64), np.array([2])]
    assert fit.word_shares(silos, 4).tolist() == [0.5, 0.25, 0.25, 0]
