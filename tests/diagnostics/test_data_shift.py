"""Feature shift: the extractor is fixed, chance is taken off, and rotations are in order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kedge
from kedge.core.task import Classification, MultiLabel, Regression
from kedge.data.build import federate
from kedge.data.datasets import load
from kedge.data.federation import Federation
from kedge.diagnostics.data.features import (
    Cells,
    Shift,
    conditional_distances,
    feature_shift,
    features_of,
    principal_components,
)
from kedge.diagnostics.data.labels import label_skew
from kedge.diagnostics.data.outliers import robust_scores, shifted_columns, stand_apart
from kedge.diagnostics.data.sample import (
    FeatureGroup,
    Sample,
    class_shares,
    draw_sample,
    even_cap,
    given_labels,
    groups_of,
)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def measured(federation: Federation, seed: int = 0) -> Shift:
    sample = draw_sample(federation, 20_000, seed)
    groups, _ = groups_of(federation, sample)
    values = features_of(federation, sample.rows).values
    return feature_shift(Cells(values, sample.owner, groups, federation.num_clients, seed))


def table(x: np.ndarray, clients: int, y: np.ndarray | None = None) -> Federation:
    rows = np.split(np.arange(len(x)), clients)
    labels = np.zeros(len(x), int) if y is None else y
    return Federation(x, labels, rows, Classification(max(2, int(labels.max()) + 1)))


# -- features ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        ((5,), False),
        ((2, 30), False),
        ((1, 8, 8), False),
        ((3, 40, 36), False),
        ((1, 6, 7, 5), False),
        ((12,), True),
    ],
)
def test_features_are_fixed_and_finite(shape: tuple[int, ...], tokens: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, *shape, generator=generator)
    if tokens:
        x = torch.randint(0, 50, (60, *shape), generator=generator)
    state = torch.random.get_rng_state()
    federation = Federation(
        x, torch.zeros(60, dtype=torch.int64), [range(60)], Classification(2), tokens=tokens
    )
    found = features_of(federation, federation.rows)
    assert found.values.shape[0] == 60
    assert found.values.shape[1] <= 32
    assert np.isfinite(found.values).all()
    assert found.values.std() > 0
    assert np.array_equal(found.values, features_of(federation, federation.rows).values)
    assert torch.equal(state, torch.random.get_rng_state())


def test_features_of_a_table_are_its_standardised_columns(rng: np.random.Generator) -> None:
    """A rotation of them: distances are those of the columns in units of their deviations."""
    x = rng.normal(size=(50, 3)) * [1.0, 10.0, 100.0]
    values = features_of(table(x, 1), torch.arange(50)).values
    expected = (x - x.mean(0)) / x.std(0)
    gaps = [v[0] - v[1] for v in (values.astype(float), expected)]
    assert np.linalg.norm(gaps[0]) == pytest.approx(np.linalg.norm(gaps[1]), rel=1e-5)


def test_documents_are_at_hellinger_distances() -> None:
    """Words a, words b, and half of each: 2 - 2 sqrt(1/2) over 2, in squares."""
    x = torch.tensor([[1, 1], [2, 2], [1, 2]])
    federation = Federation(x, torch.zeros(3), [range(3)], Classification(2), tokens=True)
    values = features_of(federation, torch.arange(3)).values.astype(float)
    both, half = (((values[0] - values[i]) ** 2).sum() for i in (1, 2))
    assert half / both == pytest.approx(1 - np.sqrt(0.5), rel=1e-5)


def test_a_constant_input_has_no_features() -> None:
    values = features_of(table(np.ones((10, 4)), 1), torch.arange(10)).values
    assert np.array_equal(values, np.zeros((10, 1)))


def test_principal_components_keep_the_directions_that_vary(rng: np.random.Generator) -> None:
    line = rng.normal(size=(40, 1)) @ [[3.0, 4.0, 0.0]]
    found = principal_components(line)
    assert found.shape == (40, 1)
    assert np.abs(found[:, 0]) == pytest.approx(np.linalg.norm(line - line.mean(0), axis=1))


# -- shift ---------------------------------------------------------------------------------------


def test_a_shift_of_one_column_has_its_length(rng: np.random.Generator) -> None:
    """One column, one class: client 0 is moved by 2 deviations, and the others are not."""
    x = rng.normal(size=(4000, 1))
    x[:1000] += 2.0
    federation = table(x, 4)
    unit = np.sqrt(1 + 4 * 3 / 16)  # deviation of the mixture: 1 + 2^2 (1/4)(3/4)
    assert measured(federation).client[0] * unit == pytest.approx(2.0, rel=0.1)


def test_a_wider_spread_is_a_shift_too(rng: np.random.Generator) -> None:
    x = rng.normal(size=(900, 2))
    x[:300] *= 3.0
    found = measured(table(x, 3))
    assert found.client.argmax() == 0
    assert found.p == 0.005


def test_what_is_dealt_out_at_random_is_not_shifted(rng: np.random.Generator) -> None:
    """Cells of 4 samples lie far apart by chance; 20 deals have p-values as if uniform."""
    shifts = []
    for seed in range(20):
        y = rng.integers(0, 3, 120)
        shifts.append(measured(table(rng.normal(size=(120, 6)) + 3 * y[:, None], 10, y), seed))
    assert all(np.nanmean(one.raw) > 0.5 for one in shifts)
    assert np.mean([one.overall for one in shifts]) < 0.15
    assert sum(one.p <= 0.05 for one in shifts) <= 3
    assert sum(one.p <= 0.5 for one in shifts) in range(4, 17)


def test_small_shifts_of_many_clients_add_up(rng: np.random.Generator) -> None:
    """No client is far off, but all are a little: chance is averaged over clients, too."""
    moves = 0.25 * rng.normal(size=(30, 1, 4))
    found = measured(table((rng.normal(size=(30, 20, 4)) + moves).reshape(600, 4), 30))
    assert found.p == 0.005
    assert (found.client_p > 0.01).sum() > 20
    assert found.overall == pytest.approx(0.25, abs=0.1)


def test_label_skew_is_no_feature_shift() -> None:
    found = measured(federate(load("digits"), "dirichlet(0.1)", clients=10))
    assert found.overall < 0.2
    assert found.p > 0.01


def test_rotations_are_in_order() -> None:
    data = load("digits")
    found = [
        measured(federate(data, f"iid+rotation(step={step})", clients=4)).overall
        for step in (0, 5, 15)  # up to 0, 15 and 45 degrees
    ]
    assert found[0] < 0.15
    assert found[0] + 0.2 < found[1]
    assert found[1] + 0.1 < found[2]


def test_a_class_on_one_client_cannot_be_compared() -> None:
    x = np.random.default_rng(0).normal(size=(40, 3))
    found = measured(table(x, 2, np.repeat([0, 1], 20)))
    assert np.isnan(found.client).all()
    assert np.isnan(found.cells).all()
    assert found.overall == 0.0


def test_conditional_distances_of_clients(rng: np.random.Generator) -> None:
    """Client 2 is moved by 5 class radii; by chance the distance is that of random halves."""
    y = np.tile([0, 1], 90)
    x = rng.normal(size=(180, 2)) / np.sqrt(2) + 100 * y[:, None]
    x[120:] += 50.0
    groups = [FeatureGroup("0", np.flatnonzero(y == 0)), FeatureGroup("1", np.flatnonzero(y == 1))]
    owner = np.repeat([0, 1, 2], 60)
    cells = Cells(x, owner, groups, 3)
    found = conditional_distances(cells, np.full((3, 2), 0.5))
    within = sum(((x[g.members] - x[g.members].mean(0)) ** 2).sum() for g in groups)
    radius = np.sqrt(within / 180)
    assert found.value[2] * radius == pytest.approx(np.hypot(50, 50), rel=0.02)
    assert found.value[2] > 1.5 * found.chance[2]
    assert found.covered == pytest.approx([1.0, 1.0, 1.0])


# -- samples and groups --------------------------------------------------------------------------


def test_samples_are_drawn_evenly_and_the_same_each_time() -> None:
    x = np.arange(1200.0)[:, None]
    rows = [range(0, 1000), range(1000, 1150), range(1150, 1200)]
    federation = Federation(x, np.zeros(1200, int), rows, Classification(2))
    sample = draw_sample(federation, 300, seed=3)
    assert np.bincount(sample.owner).tolist() == [125, 125, 50]
    assert np.array_equal(sample.positions, draw_sample(federation, 300, seed=3).positions)
    assert even_cap(np.array([1000, 150, 50]), 300) == 125
    assert len(draw_sample(federation, 10**6).positions) == 1200


def test_of_many_clients_some_are_drawn() -> None:
    federation = Federation(
        np.zeros((500, 1)), np.zeros(500, int), [[k] for k in range(500)], Classification(2)
    )
    assert draw_sample(federation, 1000).clients == 200


def test_groups_of_several_labels_go_by_the_rarest(rng: np.random.Generator) -> None:
    y = np.array([[1, 0], [1, 1], [1, 0], [0, 0]], float)
    federation = Federation(np.eye(4), y, [range(4)], MultiLabel(2))
    groups, word = groups_of(federation, draw_sample(federation, 10))
    assert word == "rarest label"
    assert {g.name: g.members.tolist() for g in groups} == {
        "no label": [3],
        "0": [0, 2],
        "1": [1],
    }


def test_groups_of_targets_are_fifths(rng: np.random.Generator) -> None:
    y = rng.permutation(50).astype(float)
    federation = Federation(np.ones((50, 2)), y, [range(50)], Regression())
    sample = draw_sample(federation, 100)
    groups, _ = groups_of(federation, sample)
    assert [len(g.members) for g in groups] == [10] * 5
    assert y[groups[0].members].max() < y[groups[1].members].min()
    values = np.column_stack([3 * y + 1, -y])
    assert np.abs(given_labels(federation, sample, values)).max() < 1e-9


def test_class_shares_are_halves_of_both_sides() -> None:
    y = np.array([0, 0, 0, 1, 0, 1, 1, 1])
    federation = Federation(np.ones((8, 1)), y, [range(4), range(4, 8)], Classification(2))
    sample = draw_sample(federation, 10)
    shares = class_shares(federation, sample, groups_of(federation, sample)[0])
    assert shares == pytest.approx(np.full((2, 2), 0.5))  # (3/4 + 1/4) / 2
    assert isinstance(sample, Sample)


# -- who stands apart ------------------------------------------------------------------------------


def test_robust_scores_by_hand() -> None:
    # median 3, absolute deviations 2, 1, 0, 1, 7: their median is 1
    found = robust_scores([1.0, 2.0, 3.0, 4.0, 10.0])
    assert found == pytest.approx(np.array([-2, -1, 0, 1, 7]) / 1.4826)
    noisy = robust_scores([1.0, 2.0, 3.0, 4.0, 10.0], noise=2.0)
    assert noisy[-1] == pytest.approx(7 / np.hypot(1.4826, 2.0))
    assert np.isnan(robust_scores([1.0, np.nan, 1.0])[1])


@pytest.mark.parametrize("reason", ["labels", "features"])
def test_a_client_stands_apart_by_its_labels_or_features(reason: str) -> None:
    rng = np.random.default_rng(1)
    y = rng.integers(0, 4, 600)
    if reason == "labels":
        y[240:300] = 0
    x = rng.normal(size=(600, 5)) + 2 * np.eye(5)[y]
    if reason == "features":
        x[240:300, 4] += 2.5
    federation = table(x, 10, y)
    found = stand_apart(label_skew(federation), measured(federation))
    assert found.found == ((4, reason),)


def test_one_of_five_with_another_prevalence_stands_apart(rng: np.random.Generator) -> None:
    """A client is a fifth of the pooled labels, which hides some of its distance to them."""
    y = (rng.random(1500) < np.repeat([0.46, 0.50, 0.07, 0.45, 0.52], 300)).astype(int)
    federation = table(rng.normal(size=(1500, 3)), 5, y)
    found = stand_apart(label_skew(federation), measured(federation))
    assert found.found == ((2, "labels"),)


def test_columns_that_shift_are_found_with_their_clients(rng: np.random.Generator) -> None:
    """Column 1 of client 2 is in another unit, column 0 of client 0 is moved a little."""
    y = rng.integers(0, 2, 400)
    x = rng.normal(size=(400, 4)) + y[:, None]
    owner = np.repeat(np.arange(4), 100)
    x[owner == 2, 1] += 20.0
    x[owner == 0, 0] += 1.0
    groups = [FeatureGroup(str(c), np.flatnonzero(y == c)) for c in (0, 1)]
    found = shifted_columns(x, owner, groups)
    assert [(c.column, c.client) for c in found] == [(1, 2), (0, 0)]
    assert found[0].shift == pytest.approx(20, rel=0.1)
    assert found[0].own - found[0].others == pytest.approx(20, rel=0.05)
    assert found[1].shift == pytest.approx(1, rel=0.3)


def test_columns_that_follow_the_label_do_not_shift(rng: np.random.Generator) -> None:
    """A client with other labels has other means, but the same within classes."""
    owner = np.repeat(np.arange(4), 100)
    y = (rng.random(400) < np.where(owner == 0, 0.9, 0.1)).astype(int)
    x = rng.normal(size=(400, 2)) + 5 * y[:, None]
    groups = [FeatureGroup(str(c), np.flatnonzero(y == c)) for c in (0, 1)]
    assert abs(x[owner == 0].mean() - x[owner != 0].mean()) > 3
    assert shifted_columns(x, owner, groups) == []


def test_columns_of_many_small_cells_do_not_shift(rng: np.random.Generator) -> None:
    """100 clients with 2 samples of each of 5 classes: deviations are not underestimated."""
    owner, y = np.repeat(np.arange(100), 10), np.tile(np.arange(5), 200)
    groups = [FeatureGroup(str(c), np.flatnonzero(y == c)) for c in range(5)]
    assert shifted_columns(rng.normal(size=(1000, 10)), owner, groups) == []
    single = [FeatureGroup("all", np.arange(3))]
    assert shifted_columns(rng.normal(size=(3, 2)), np.arange(3), single) == []


def test_the_federation_is_not_changed() -> None:
    federation = federate(load("digits"), "iid+rotation(step=5)", clients=4)
    before = [t.clone() for t in (federation.x, federation.y, federation.rows)]
    kedge.diagnose(federation)
    after = (federation.x, federation.y, federation.rows)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
