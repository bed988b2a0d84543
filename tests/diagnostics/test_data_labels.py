"""Label and quantity skew: values by hand, and order of partitions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.spatial.distance import jensenshannon
from scipy.stats import wasserstein_distance

from kedge.data.build import federate
from kedge.data.datasets import load
from kedge.diagnostics.data.labels import (
    each_label,
    earth_movers,
    effective_classes,
    effective_clients,
    gini,
    jensen_shannon,
    label_skew,
    largest_to_smallest,
    shares,
    skew_of_classes,
    skew_of_labels,
    skew_of_targets,
    target_distance,
)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


# -- by hand ----------------------------------------------------------------------------------


def test_effective_classes_by_hand() -> None:
    found = effective_classes([[5, 5, 0, 0], [7, 0, 0, 0], [1, 1, 1, 1], [2, 1, 1, 0]])
    # H(1/2, 1/4, 1/4) = 3/2 log 2
    assert found == pytest.approx([2.0, 1.0, 4.0, 2**1.5], abs=1e-12)


def test_earth_movers_distance_by_hand() -> None:
    # |0.5 - 0.25| + |0.5 - 0.25| + |0 - 0.5| = 1, halved
    assert earth_movers([2, 2, 0], [1, 1, 2]) == pytest.approx(0.5)
    assert earth_movers([[4, 0], [0, 9]], [1, 0]) == pytest.approx([0.0, 1.0])


def test_earth_movers_distance_is_optimal_transport_of_nominal_classes(
    rng: np.random.Generator,
) -> None:
    p, q = shares(rng.integers(0, 9, 6)), shares(rng.integers(1, 9, 6))
    sums = np.concatenate([np.kron(np.eye(6), np.ones(6)), np.kron(np.ones(6), np.eye(6))])
    moved = linprog(1.0 - np.eye(6).ravel(), A_eq=sums, b_eq=np.concatenate([p, q])).fun
    assert earth_movers(p, q) == pytest.approx(moved, abs=1e-9)


def test_jensen_shannon_by_hand_and_by_scipy(rng: np.random.Generator) -> None:
    assert jensen_shannon([3, 0], [0, 5]) == pytest.approx(1.0)
    # H(3/4) = 2 - 3/4 log2(3); minus 0 and half of 1 bit
    assert jensen_shannon([4, 0], [2, 2]) == pytest.approx(2 - 0.75 * np.log2(3) - 0.5)
    p, q = rng.integers(0, 9, 7), rng.integers(0, 9, 7)
    assert jensen_shannon(p, q) == pytest.approx(jensenshannon(p, q, base=2) ** 2, abs=1e-12)


def test_several_labels_are_averaged() -> None:
    # rates 1 and 0.5 against 0.5 and 0.25: both labels move by 0.5 and 0.25
    assert each_label([1.0, 0.5], [0.5, 0.25], earth_movers) == pytest.approx(0.375)


def test_targets_are_moved_along_the_line(rng: np.random.Generator) -> None:
    assert target_distance([0.0, 1.0], [5.0, 6.0]) == pytest.approx(5.0)
    a, b = rng.normal(size=11), rng.normal(1, 2, size=7)
    assert target_distance(a, b) == pytest.approx(wasserstein_distance(a, b), abs=1e-12)
    both = np.stack([a, a + 3], 1)
    assert target_distance(both, both + np.array([1.0, 0.0])) == pytest.approx(
        0.5
    )  # mean of 1 and 0


def test_quantity_by_hand() -> None:
    # pairs of 1, 2, 5: |1-2| + |1-5| + |2-5| = 8, counted twice, over 2 * 3 * 8
    assert gini([1, 2, 5]) == pytest.approx(16 / 48)
    assert gini([4, 4, 4]) == 0.0
    assert gini([0, 0, 0, 9]) == pytest.approx(0.75)
    assert largest_to_smallest([2, 8, 4]) == 4.0
    assert largest_to_smallest([2, 0]) == np.inf
    assert effective_clients([3, 1]) == pytest.approx(16 / 10)


# -- corrected for chance ----------------------------------------------------------------------


def test_clients_of_one_class_have_an_index_of_one() -> None:
    found = skew_of_classes(np.repeat([0, 1, 2], 40), np.array([40, 40, 40]), 3)
    assert found.index == pytest.approx(1.0)
    assert found.effective == pytest.approx([1.0, 1.0, 1.0])
    assert found.distance == pytest.approx([2 / 3] * 3)
    assert found.p == 0.005
    assert found.counts is not None
    assert found.counts.tolist() == [[40, 0, 0], [0, 40, 0], [0, 0, 40]]


def test_chance_is_the_mean_over_all_deals() -> None:
    """Two clients of one sample each: both classes are dealt to either, so all deals look alike."""
    found = skew_of_classes(np.array([0, 1]), np.array([1, 1]), 2)
    assert found.chance == pytest.approx([0.5, 0.5])
    assert found.index == 0.0
    assert found.p == 1.0


def test_small_clients_that_are_dealt_out_at_random_are_not_skewed(
    rng: np.random.Generator,
) -> None:
    """40 clients with 8 samples of 10 classes: they lack many classes, by chance alone."""
    found = [skew_of_classes(rng.permutation(320) % 10, np.full(40, 8), 10) for _ in range(20)]
    assert all(one.effective.mean() < 6.5 for one in found)
    assert all(one.distance.mean() > 0.35 for one in found)
    assert np.mean([one.index for one in found]) < 0.1
    assert sum(one.p <= 0.05 for one in found) <= 3


def test_several_labels_and_targets_are_corrected_likewise(rng: np.random.Generator) -> None:
    sizes = np.full(6, 50)
    labels = (rng.random((300, 4)) < 0.3).astype(float)
    by_label = labels[np.argsort(labels[:, 0], kind="stable")]
    assert skew_of_labels(labels, sizes).p > 0.01
    sorted_labels = skew_of_labels(by_label, sizes)
    assert sorted_labels.p == 0.005
    assert sorted_labels.index > 0.2  # one of four labels is fully skewed
    targets = rng.normal(size=(300, 1))
    assert skew_of_targets(targets, sizes).index < 0.1
    apart = skew_of_targets(np.sort(targets, axis=0), sizes)
    assert apart.p == 0.005
    assert 0.8 < apart.index < 1.2  # standard deviations
    assert np.isnan(apart.effective).all()


def test_permuted_targets_have_the_level_that_is_measured_exactly(rng: np.random.Generator) -> None:
    """The permutations go by bins, the distance itself does not: they agree for random targets."""
    targets, sizes = rng.exponential(size=(400, 1)), np.full(8, 50)
    found = skew_of_targets(targets, sizes)
    exact = []
    for _ in range(30):
        drawn = rng.permutation(targets) / targets.std()
        exact.append([target_distance(own, drawn) for own in np.split(drawn, 8)])
    assert found.chance.mean() == pytest.approx(np.mean(exact), rel=0.1)


def test_partitions_of_digits_are_in_order() -> None:
    data = load("digits")
    found = [
        label_skew(federate(data, text, clients=10))
        for text in ("iid", "dirichlet(1)", "dirichlet(0.1)")
    ]
    for low, high in pairwise(found):
        assert low.index < high.index
        assert low.distance.mean() < high.distance.mean()
        assert low.divergence.mean() < high.divergence.mean()
        assert low.effective.mean() > high.effective.mean()
    assert found[0].index < 0.1
    assert 0.25 < found[1].index < 0.5
    assert found[2].index > 0.6


def test_the_distance_to_the_other_clients_leaves_the_client_out() -> None:
    """Samples of class 1: 2 of 10, 6 of 12 and 9 of 18; the rest of client 0 have a half."""
    y = np.concatenate([np.arange(n) < ones for n, ones in ((10, 2), (12, 6), (18, 9))]).astype(int)
    found = skew_of_classes(y, np.array([10, 12, 18]), 2)
    rest = [15 / 30, 11 / 28, 8 / 22]
    by_hand = np.abs(np.array([0.2, 0.5, 0.5]) - rest)
    exact = found.to_others * found.distance / np.where(found.excess > 0, found.excess, np.nan)
    known = ~np.isnan(exact)
    assert known[0]
    assert exact[known] == pytest.approx(by_hand[known])
