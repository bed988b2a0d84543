"""Partitions: every sample once, the laws of each procedure, and what cannot be done."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from kedge.data.partition import Partition, draw
from kedge.data.partition.draws import (
    arrivals,
    block_sizes,
    capped_counts,
    draw_classes,
    proportional_sizes,
)
from kedge.data.partition.partition import generator
from kedge.errors import (
    DataError,
    FieldError,
    IncompatibleError,
    PartitionError,
)
from kedge.report.partition_picture import plot_partition
from tests.data.labels import COMPLETE, LABELS, shares

# --- every partition -----------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [10, 20])
@pytest.mark.parametrize("text", COMPLETE)
def test_every_sample_is_held_once(text: str, clients: int) -> None:
    partition = draw(text, LABELS, clients, seed=3)
    held = np.concatenate(partition.clients)
    assert len(partition.clients) == clients
    assert np.array_equal(np.sort(held), np.arange(len(LABELS)))
    assert partition.sizes.min() >= 1
    assert all((np.diff(part) > 0).all() for part in partition.clients)
    assert np.array_equal(partition.label_counts(LABELS).sum(axis=0), np.bincount(LABELS))


@pytest.mark.parametrize("text", COMPLETE)
def test_the_name_and_seed_draw_it_again(text: str) -> None:
    partition = draw(text, LABELS, 10, seed=3)
    assert draw(partition.name, LABELS, 10, seed=3) == partition
    if not text.startswith("label_shards"):
        assert draw(text, LABELS, 10, seed=4).hash != partition.hash


def test_one_client_holds_everything() -> None:
    for text in COMPLETE:
        if text.startswith(("paired", "label_shards")):
            continue
        assert draw(text, LABELS, 1, seed=0).sizes.tolist() == [len(LABELS)]


def test_as_many_clients_as_samples() -> None:
    for text in ("iid", "client_dirichlet_balanced", "client_dirichlet_sequential"):
        assert (draw(text, LABELS[:40], 40, seed=0).sizes == 1).all()


def test_gaps_in_the_labels_close() -> None:
    codes = np.arange(2000) % 4
    for text in ("dirichlet(0.5)", "client_dirichlet_sequential", "label_shards(2)"):
        sparse = draw(text, np.array([-3, 2, 7, 90])[codes], 4, seed=1)
        assert sparse.hash == draw(text, codes, 4, seed=1).hash


@pytest.mark.parametrize(
    "text", ["client_dirichlet_balanced", "client_dirichlet_sequential", "iid"]
)
def test_sizes_are_equal_up_to_one(text: str) -> None:
    assert (draw(text, LABELS, 20, seed=0).sizes == 150).all()
    assert set(draw(text, LABELS[:-7], 20, seed=0).sizes) == {149, 150}


# --- P1: class_dirichlet_capped ------------------------------------------------------------------


def naive_p1(
    shares: np.ndarray, labels: np.ndarray, clients: int
) -> list[list[int]]:  # shares: [classes, clients]
    """The procedure of NIID-Bench, sample by sample and without arrays over clients."""
    held: list[list[int]] = [[] for _ in range(clients)]
    for c, share in enumerate(shares):
        members = [i for i, label in enumerate(labels) if label == c]
        has_room = [len(h) < len(labels) / clients for h in held]
        share = [p if room else 0.0 for p, room in zip(share, has_room, strict=True)]
        if sum(share) == 0:
            share = [float(room) for room in has_room]
        edges = list(itertools.accumulate(share))
        start = 0
        for k, edge in enumerate(edges):
            end = int(edge / edges[-1] * len(members))
            held[k] += members[start:end]
            start = end
    return held


@pytest.mark.parametrize("alpha", [0.02, 0.1, 1.0])
def test_p1_counts_equal_a_naive_implementation(alpha: float) -> None:
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 6, size=400)
    drawn = rng.dirichlet(np.full(7, alpha), size=(30, 6))
    counts = capped_counts(drawn, np.bincount(labels))
    for d in range(30):
        naive = naive_p1(drawn[d], labels, 7)
        expected = [np.bincount(labels[h], minlength=6) for h in naive]
        assert np.array_equal(counts[d], expected)


def test_p1_draws_until_the_smallest_client_has_the_minimum() -> None:
    """The same stream through the naive procedure stops at the same draw with the same counts."""
    rng = generator(5, "class_dirichlet_capped")
    draws = (
        share
        for block in block_sizes(cells=20 * 10)
        for share in rng.dirichlet(np.full(20, 0.05), size=(block, 10))
    )
    rejected = 0
    for share in draws:
        naive = naive_p1(share, LABELS, 20)
        if min(map(len, naive)) >= 10:
            break
        rejected += 1
    assert rejected > 0
    expected = [np.bincount(LABELS[h], minlength=10) for h in naive]
    partition = draw("dirichlet(0.05)", LABELS, 20, seed=5)
    assert np.array_equal(partition.label_counts(LABELS), expected)


def test_p1_a_client_with_exactly_its_fair_share_takes_no_more() -> None:
    same = np.array([[[0.9, 0.1], [0.9, 0.1]]])
    full = np.array([[[1.0, 0.0], [0.9, 0.1]]])
    assert capped_counts(same, np.array([10, 10])).tolist() == [[[9, 9], [1, 1]]]
    assert capped_counts(full, np.array([10, 10])).tolist() == [[[10, 0], [0, 10]]]


def test_p1_without_mass_on_clients_with_room_shares_equally() -> None:
    one_hot = np.array([[[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]])
    assert capped_counts(one_hot, np.array([6, 6])).tolist() == [[[6, 0], [0, 3], [0, 3]]]


@pytest.mark.parametrize(("minimum", "least"), [("10", 10), ("classes", 10), ("60", 60)])
def test_p1_honours_the_minimum(minimum: str, least: int) -> None:
    for seed in range(5):
        partition = draw(f"dirichlet(0.3, minimum={minimum})", LABELS, 10, seed)
        assert partition.sizes.min() >= least


def test_p1_first_class_has_the_moments_of_the_dirichlet() -> None:
    """Nothing is capped in the first class, so its shares are Dir(alpha) over the clients."""
    M, alpha = 5, 1.0
    labels = np.repeat([0, 1], 1000)
    first = np.array(
        [
            draw(f"dirichlet({alpha}, minimum=1)", labels, M, seed).label_counts(labels)[:, 0]
            for seed in range(400)
        ]
    )
    mean, variance = 1 / M, (1 / M) * (1 - 1 / M) / (M * alpha + 1)
    assert first.mean(axis=0) / 1000 == pytest.approx(np.full(M, mean), abs=0.03)
    assert (first / 1000).var() == pytest.approx(variance, rel=0.1)


# --- P2: client_dirichlet_balanced ---------------------------------------------------------------


def exact_law(priors: np.ndarray, sizes: tuple, room: tuple) -> dict[tuple, float]:
    """The probability of every table of counts, by walking the procedure one sample at a time."""
    states = {(sizes, room, ((0,) * len(room),) * len(sizes)): 1.0}
    for _ in range(sum(sizes)):
        after: Counter = Counter()
        for (left, rest, table), p in states.items():
            turns = [k for k, n in enumerate(left) if n]
            for k in turns:
                q = [prior if n else 0.0 for prior, n in zip(priors[k], rest, strict=True)]
                if sum(q) == 0:
                    q = [float(n > 0) for n in rest]
                for c, mass in enumerate(q):
                    if mass:
                        row = (*table[k][:c], table[k][c] + 1, *table[k][c + 1 :])
                        state = (
                            (*left[:k], left[k] - 1, *left[k + 1 :]),
                            (*rest[:c], rest[c] - 1, *rest[c + 1 :]),
                            (*table[:k], row, *table[k + 1 :]),
                        )
                        after[state] += p / len(turns) * mass / sum(q)
        states = after
    return {table: p for (_, _, table), p in states.items()}


def test_p2_has_the_law_of_one_sample_at_a_time() -> None:
    priors = np.array([[0.7, 0.3, 0.0], [0.1, 0.8, 0.1], [1.0, 0.0, 0.0]])
    sizes, room = (1, 3, 2), (2, 3, 1)
    law = exact_law(priors, sizes, room)
    assert sum(law.values()) == pytest.approx(1)
    rng, n, seen = np.random.default_rng(2), 8000, Counter()
    for _ in range(n):
        turns = arrivals(rng, np.array(sizes))
        taken = draw_classes(rng, priors, turns, np.array(room))
        table = np.zeros((3, 3), dtype=int)
        np.add.at(table, (turns, taken), 1)
        seen[tuple(map(tuple, table.tolist()))] += 1
    assert seen.keys() <= law.keys()
    chi2 = sum((seen[t] - n * p) ** 2 / (n * p) for t, p in law.items())
    freedom = len(law) - 1
    assert chi2 < freedom + 4 * np.sqrt(2 * freedom)


def test_p2_turns_go_to_clients_that_are_not_full() -> None:
    """With sizes (1, 9), the first client's only turn comes at place t with probability 2^-t."""
    rng = np.random.default_rng(0)
    place = [int(np.argmax(arrivals(rng, np.array([1, 9])) == 0)) for _ in range(4000)]
    frequency = np.bincount(place, minlength=10) / len(place)
    assert frequency[:4] == pytest.approx([0.5, 0.25, 0.125, 0.0625], abs=0.03)


def test_p2_turns_without_mass_left_draw_uniformly() -> None:
    taken = draw_classes(
        np.random.default_rng(0),
        np.array([[1.0, 0.0, 0.0]]),
        np.zeros(3000, dtype=np.int64),
        np.array([1000, 9000, 9000]),
    )
    assert (taken[:1000] == 0).all()
    assert np.bincount(taken[1000:])[1:] / 2000 == pytest.approx([0.5, 0.5], abs=0.05)


def test_p2_lognormal_sizes() -> None:
    labels = np.arange(40_000) % 10
    sizes = draw("client_dirichlet_balanced(1.0, sigma=0.5)", labels, 400, seed=0).sizes
    assert np.log(sizes).std() == pytest.approx(0.5, abs=0.08)


# --- P3: client_dirichlet_sequential -------------------------------------------------------------


@pytest.mark.parametrize(("prior", "total"), [("ones", 0.5 * 4), ("proportions", 0.5)])
def test_p3_first_client_has_the_moments_of_the_dirichlet(prior: str, total: float) -> None:
    """No class runs out at the first client: Dirichlet-multinomial of the given concentration."""
    labels = np.arange(1600) % 4
    n = 200
    text = f"client_dirichlet_sequential(0.5, prior={prior})"
    first = [draw(text, labels, 8, seed).label_counts(labels)[0] / n for seed in range(300)]
    variance = 0.25 * 0.75 / (total + 1) * (1 + total / n)
    assert np.mean(first, axis=0) == pytest.approx(np.full(4, 0.25), abs=0.07)
    assert np.mean((np.array(first) - 0.25) ** 2) == pytest.approx(variance, rel=0.1)


def test_equal_alphas_are_not_equally_skewed() -> None:
    """FedBR's proportions concentrate far more than ones, and those more than P1 and P4."""
    labels = np.arange(10_000) % 10
    skew = {
        text: np.mean([shares(draw(text, labels, 20, s), labels).max(axis=1) for s in range(3)])
        for text in (
            "client_dirichlet_sequential(0.1)",
            "client_dirichlet_sequential(0.1, prior=ones)",
            "dirichlet(0.1)",
            "paired_class_dirichlet(0.1)",
            "iid",
        )
    }
    proportions, ones, capped, paired, iid = skew.values()
    assert proportions > 0.85
    assert proportions > ones + 0.15
    assert proportions > capped + 0.15
    assert min(ones, capped) > paired + 0.15
    assert paired > iid + 0.05


@pytest.mark.parametrize(
    "name", ["dirichlet", "client_dirichlet_balanced", "client_dirichlet_sequential"]
)
def test_a_large_alpha_is_nearly_iid(name: str) -> None:
    assert shares(draw(f"{name}(1e4)", LABELS, 10, seed=0), LABELS) == pytest.approx(0.1, abs=0.08)


@pytest.mark.parametrize("alpha", ["1e-8", "1e-300", "1e300"])
def test_extreme_alphas_give_no_nan(alpha: str) -> None:
    for name in ("client_dirichlet_balanced", "client_dirichlet_sequential"):
        assert (draw(f"{name}({alpha})", LABELS, 20, seed=0).sizes == 150).all()


# --- P4, P5, sizes, silos ------------------------------------------------------------------------


def test_p4_gives_both_of_a_pair_half_of_their_fair_share() -> None:
    for seed in range(5):
        partition = draw("paired_class_dirichlet(0.1)", LABELS, 20, seed)
        assert partition.sizes.reshape(10, 2).sum(axis=1).tolist() == [300] * 10
        assert partition.sizes.min() >= 75


def test_p5_is_five_groups_of_two_clients() -> None:
    labels = np.arange(100) % 10
    partition = draw("label_shards(shards=2)", labels, 10, seed=0)
    for i in range(10):
        first = 2 * (i % 5)
        half = slice(0, 5) if i < 5 else slice(5, 10)
        expected = [np.flatnonzero(labels == c)[half] for c in (first, first + 1)]
        assert partition.clients[i].tolist() == sorted(np.concatenate(expected))
    assert draw("label_shards", labels, 10, seed=99).hash == partition.hash


def test_p5_with_100_classes_is_ten_disjoint_groups() -> None:
    labels = np.repeat(np.arange(100), 5)
    counts = draw("label_shards(10)", labels, 10, seed=0).label_counts(labels)
    assert np.array_equal(counts, np.kron(np.eye(10), np.full((1, 10), 5)))


def test_p5_with_few_clients_uses_all_of_their_classes_only() -> None:
    partition = draw("label_shards(2)", LABELS, 3, seed=0)
    held = np.concatenate(partition.clients)
    assert np.array_equal(np.sort(held), np.flatnonzero(LABELS < 6))


def test_quantity_skews() -> None:
    labels = np.arange(40_000) % 10
    sizes = draw("quantity_lognormal(sigma=1.0)", labels, 400, seed=0).sizes
    assert np.log(sizes).std() == pytest.approx(1.0, abs=0.15)
    power = draw("quantity_powerlaw(exponent=1.5)", labels, 50, seed=0)
    ranked = np.sort(power.sizes)[::-1]
    slope = np.polyfit(np.log(np.arange(1, 51)), np.log(ranked), 1)[0]
    assert slope == pytest.approx(-1.5, abs=0.05)
    big = power.sizes > 500
    assert shares(power, labels)[big] == pytest.approx(0.1, abs=0.05)
    for flat in ("quantity_lognormal(0)", "quantity_powerlaw(0)"):
        assert (draw(flat, LABELS, 10, seed=0).sizes == 300).all()


def test_proportional_sizes_add_up_and_are_never_empty() -> None:
    assert proportional_sizes(np.array([1.0, 0.0, 0.0]), 10).tolist() == [8, 1, 1]
    assert proportional_sizes(np.array([1.0, 1.0, 1.0]), 11).tolist() == [4, 4, 3]
    assert draw("quantity_lognormal(sigma=500)", LABELS, 10, seed=0).sizes.sum() == 3000


def test_silos_are_the_groups_of_the_data() -> None:
    groups = ["b", "a", "c", "a", "b", "a"]
    partition = draw("silos", np.zeros(6), 3, seed=0, groups=groups)
    assert [c.tolist() for c in partition.clients] == [[1, 3, 5], [0, 4], [2]]
    as_objects = np.array(groups, dtype=object)
    assert draw("silos", np.zeros(6), 3, seed=0, groups=as_objects) == partition


def test_labels_that_are_not_classes() -> None:
    real, several = np.linspace(0, 1, 60), np.zeros((60, 5), dtype=int)
    for labels in (real, several):
        for text in ("iid", "quantity_lognormal", "quantity_powerlaw+noise"):
            assert draw(text, labels, 6, seed=0).sizes.sum() == 60
        assert draw("silos", labels, 6, seed=0, groups=np.arange(60) % 6).sizes.tolist() == [10] * 6
        for text in ("dirichlet(0.1)", "client_dirichlet_balanced", "label_shards"):
            with pytest.raises(IncompatibleError, match="one whole-number class per sample"):
                draw(text, labels, 6, seed=0)
    with pytest.raises(IncompatibleError, match=r"real numbers.*use iid, quantity_lognormal"):
        draw("paired_class_dirichlet", real, 6, seed=0)
    with pytest.raises(IncompatibleError, match=r"flatten them with labels\.ravel\(\)"):
        draw("dirichlet(1)", np.zeros((60, 1), dtype=int), 6, seed=0)


# --- shifts --------------------------------------------------------------------------------------


def test_shifts_leave_the_samples_as_they_are() -> None:
    base = draw("dirichlet(0.5)", LABELS, 10, seed=2)
    shifted = draw("dirichlet(0.5)+rotation(step=15)+noise(0.2)", LABELS, 10, seed=2)
    assert all(map(np.array_equal, base.clients, shifted.clients))
    assert base.rotation is base.noise is base.angles is base.degrees() is None
    assert shifted.rotation.tolist() == [15 * i for i in range(10)]
    assert shifted.noise == pytest.approx(0.02 * np.arange(1, 11))
    assert (shifted.degrees()[3] == 45).all()
    assert shifted.hash != base.hash
    assert shifted.name == "class_dirichlet_capped(alpha=0.5)+rotation(step=15.0)+noise(sigma=0.2)"


def test_rotation_dirichlet_gives_each_sample_an_angle() -> None:
    partition = draw("iid+rotation_dirichlet(0.1)", LABELS, 10, seed=0)
    assert [len(a) for a in partition.angles] == [300] * 10
    assert set(np.concatenate(partition.angles)) <= set(range(0, 136, 15))
    most = [Counter(a.tolist()).most_common(1)[0][1] / 300 for a in partition.angles]
    assert 0.5 < np.mean(most) < 0.95  # the largest of ten shares from Dir(0.1) is about 0.7
    assert partition.degrees() is partition.angles


# --- impossible requests -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "clients", "message"),
    [
        ("iid", 3001, "iid with 3001 clients and 3000 samples: more clients .* at most 3000"),
        ("dirichlet(0.1)", 400, "needs 4000 samples; use at most 300 clients or minimum=7"),
        ("dirichlet(1, minimum=4000)", 2, "needs 8000 samples; use minimum=1500"),
        ("dirichlet(0.01)", 100, "none of 20000 draws .* Use a larger alpha or fewer clients"),
        ("dirichlet(0.1, minimum=290)", 10, r"smallest client \d+\. Use .* or minimum=\d+"),
        ("paired_class_dirichlet(0.1)", 7, "use an even number, such as 8"),
        ("label_shards(3)", 10, "does not divide .* 10 classes. Use shards=1 or 2 or 5 or 10"),
        ("label_shards(11)", 10, "more than there are: the labels have 10 classes"),
        ("label_shards(10)", 301, "client 300 would hold no sample.*Use fewer clients"),
        ("silos", 10, "the data have no groups"),
    ],
)
def test_impossible_requests_end_with_advice(text: str, clients: int, message: str) -> None:
    labels = np.repeat(np.arange(10), 300)
    with pytest.raises(PartitionError, match=message):
        draw(text, labels, clients, seed=0)


def test_the_advised_minimum_works() -> None:
    with pytest.raises(PartitionError, match=r"minimum=\d+") as error:
        draw("dirichlet(0.1, minimum=290)", LABELS, 10, seed=0)
    best = str(error.value).rsplit("minimum=", 1)[1].rstrip(".")
    assert draw(f"dirichlet(0.1, minimum={best})", LABELS, 10, seed=0).sizes.min() == int(best)


def test_a_pair_that_cannot_be_balanced() -> None:
    with pytest.raises(PartitionError, match="none of 100000 draws gave both clients of a pair"):
        draw("paired_class_dirichlet(1e-6)", np.zeros(1000, dtype=int), 2, seed=0)


def test_redraws_are_bounded() -> None:
    for cells in (1, 100, 1000, 10**5, 10**9):
        assert 10 <= sum(block_sizes(cells)) <= 100_000
        assert sum(block_sizes(cells)) <= max(10, 20_000_000 // cells)


def test_wrong_groups() -> None:
    with pytest.raises(PartitionError, match="the data have 2 groups; set clients to 2"):
        draw("silos", [0, 1, 2, 3], 4, seed=0, groups=[0, 0, 1, 1])
    with pytest.raises(DataError, match=r"groups has shape \(3,\), but there are 4 samples"):
        draw("silos", [0, 1, 2, 3], 2, seed=0, groups=[0, 0, 1])
    for missing in (np.nan, None):
        with pytest.raises(DataError, match="1 samples have no group"):
            draw("silos", [0, 1, 2, 3], 2, seed=0, groups=[0, 0, 1, missing])


def test_the_largest_numbers_give_sizes_and_angles_or_a_message() -> None:
    sizes = draw("quantity_lognormal(sigma=1.7e308)", LABELS, 5, seed=0).sizes
    assert sorted(sizes) == [1, 1, 1, 1, len(LABELS) - 4]  # the largest takes all
    turned = draw("iid+rotation_dirichlet(alpha=1.7e308)", LABELS, 5, seed=0)
    counts = np.bincount(np.concatenate(turned.angles).astype(int))[::15]
    assert abs(counts / 300 - 1).max() < 0.3  # 300 of each of the ten angles are expected
    for shift in ("noise(sigma=1.7e308)", "rotation(step=1.7e308)"):
        with pytest.raises(DataError, match="must be 5 finite numbers"):
            draw(f"iid+{shift}", LABELS, 5, seed=0)


def test_labels_of_unequal_length_are_refused() -> None:
    with pytest.raises(DataError, match="equally many for every sample"):
        draw("iid", [[1], [2, 3]], 1, seed=0)


def test_a_picture_has_the_names_of_the_clients(tmp_path):
    partition = Partition((np.arange(3), np.arange(3, 9)), "by hand", 0, 9)
    names = ["north", "a hospital with a long name"]
    path = plot_partition(partition, np.arange(9) % 2, tmp_path / "p.svg", client_names=names)
    text = path.read_text()
    assert "<!-- north -->" in text
    assert "<!-- a hospital with… -->" in text
    with pytest.raises(FieldError, match="1 client names for 2 clients"):
        plot_partition(partition, np.arange(9) % 2, tmp_path / "p.svg", client_names=["north"])
