"""Partitions: every sample once, the laws of each procedure, files, pictures, and the errors."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import numpy as np
import pytest

from kedge.core.grammar import parse_calls
from kedge.errors import (
    DataError,
    FieldError,
    GrammarError,
    IncompatibleError,
    PartitionError,
    UnknownName,
)
from kedge.sim.partition import Partition, draw, holdout, partitions, resplit
from kedge.sim.partition.draws import arrivals, blocks, capped_counts, fill, proportional_sizes
from kedge.sim.partition.registries import generator

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 300))
COMPLETE = [
    "iid",
    "dirichlet(0.1)",
    "class_dirichlet_capped(alpha=5, minimum=classes)",
    "client_dirichlet_balanced(0.3)",
    "client_dirichlet_balanced(0.01)",
    "client_dirichlet_balanced(0.3, sigma=0.5)",
    "client_dirichlet_sequential(0.1)",
    "client_dirichlet_sequential(0.1, prior=ones)",
    "paired_class_dirichlet(0.1)",
    "label_shards(2)",
    "quantity_lognormal(sigma=1.0)",
    "quantity_powerlaw(exponent=1.5)",
]


def shares(partition: Partition, labels: np.ndarray) -> np.ndarray:
    counts = partition.label_counts(labels)
    return counts / counts.sum(axis=1, keepdims=True)


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
        for block in blocks(cells=20 * 10)
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
        taken = fill(rng, priors, turns, np.array(room))
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
    taken = fill(
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
        assert 10 <= sum(blocks(cells)) <= 100_000
        assert sum(blocks(cells)) <= max(10, 20_000_000 // cells)


def test_wrong_groups() -> None:
    with pytest.raises(PartitionError, match="the data have 2 groups; set clients to 2"):
        draw("silos", [0, 1, 2, 3], 4, seed=0, groups=[0, 0, 1, 1])
    with pytest.raises(DataError, match=r"groups has shape \(3,\), but there are 4 samples"):
        draw("silos", [0, 1, 2, 3], 2, seed=0, groups=[0, 0, 1])
    for missing in (np.nan, None):
        with pytest.raises(DataError, match="1 samples have no group"):
            draw("silos", [0, 1, 2, 3], 2, seed=0, groups=[0, 0, 1, missing])


# --- reading the string --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("dirichlett(0.1)", UnknownName, "no partition 'dirichlett'. Did you mean 'dirichlet'"),
        ("dirichlet(alhpa=1)", UnknownName, "option of class_dirichlet_capped 'alhpa'.*'alpha'"),
        ("iid+rotaton", UnknownName, "no shift 'rotaton'. Did you mean 'rotation'"),
        ("dirichlet(0)", FieldError, "class_dirichlet_capped.alpha = 0 is not a finite number ab"),
        ("dirichlet(-1)", FieldError, "alpha = -1 is not"),
        ("dirichlet(nan)", FieldError, "alpha = nan is not"),
        ("dirichlet(inf)", FieldError, "alpha = inf is not"),
        ("dirichlet(true)", FieldError, "alpha = true is not"),
        ("dirichlet(small)", FieldError, "alpha = small is not a finite number above 0"),
        ("dirichlet(1, minimum=0)", FieldError, "minimum = 0 is not a whole number at least 1 or "),
        ("dirichlet(1, minimum=2.5)", FieldError, "minimum = 2.5 is not"),
        ("dirichlet(1, alpha=2)", FieldError, "alpha is given twice"),
        ("client_dirichlet_sequential(prior=two)", FieldError, "= two is not proportions or ones"),
        ("quantity_lognormal(-1)", FieldError, "sigma = -1 is not a finite number at least 0"),
        ("iid+rotation(step=nan)", FieldError, "rotation.step = nan is not a finite number"),
        ("iid(3)", FieldError, "iid takes 0 options"),
        ("iid:preset", GrammarError, "no presets"),
        ("rotation(15)", GrammarError, "needs a partition before it, such as iid.rotation"),
        ("iid+dirichlet(1)", GrammarError, "two partitions.*noise, rotation, rotation_dirichlet"),
        ("iid+noise+noise", IncompatibleError, "two shifts of one kind"),
        ("iid+rotation+rotation_dirichlet", IncompatibleError, "leave out rotation_dirichlet"),
    ],
)
def test_strings_that_cannot_be_drawn(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        draw(text, LABELS, 10, seed=0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"clients": 0}, FieldError, "clients = 0 is below 1"),
        ({"clients": 2.0}, FieldError, "clients = 2.0 is not a whole number"),
        ({"seed": "a"}, FieldError, "seed = 'a' is not a whole number"),
        ({"labels": []}, DataError, "there are no samples"),
        ({"text": 3}, GrammarError, "expected a string"),
    ],
)
def test_wrong_arguments(change: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        draw(**{"text": "iid", "labels": LABELS, "clients": 2, "seed": 0} | change)


def test_a_partition_of_ones_own() -> None:
    @partitions.register("stripes")
    def stripes(labels, clients, rng, *, width: int = 1):  # type: ignore[no-untyped-def]
        owner = np.arange(len(labels)) // width % clients
        return [np.flatnonzero(owner == k) for k in range(clients)]

    try:
        partition = draw("stripes(2)+noise", LABELS[:8], 2, seed=np.int64(0))
        assert [c.tolist() for c in partition.clients] == [[0, 1, 4, 5], [2, 3, 6, 7]]
        assert [call.name for call in parse_calls(partition.name)] == ["stripes", "noise"]
    finally:
        partitions.remove("stripes")


# --- the partition as data -----------------------------------------------------------------------


def test_hashes_are_stable() -> None:
    """Pinned: a change here breaks every stored result that names a partition by its hash."""
    labels = np.arange(1000) % 10
    pinned = {
        "label_shards(2)": "6b9b972a7ad4b4b5",
        "iid": "ddd728b744dea7c5",
        "dirichlet(0.5)": "5408a2625037ee49",
        "client_dirichlet_balanced(0.3)": "841cd90c2a58db90",
        "client_dirichlet_sequential(0.1)+rotation(15)": "fa3188cab339106b",
        "iid+rotation_dirichlet(0.1)": "b6d53e573288e593",
    }
    assert {text: draw(text, labels, 10, seed=0).hash for text in pinned} == pinned


def test_the_hash_is_of_the_content() -> None:
    a = Partition((np.array([2, 0]), np.array([1])), "a", 0, 3)
    b = Partition((np.array([0, 2], dtype=np.int32), np.array([1])), "b", 1, 3)
    assert a.hash == b.hash
    assert a != b
    assert a.clients[0].tolist() == [0, 2]
    moved = Partition((np.array([0]), np.array([2, 1])), "a", 0, 3)
    assert moved.hash != a.hash
    noisy = Partition(a.clients, "a", 0, 3, noise=np.array([0.0, 1.0]))
    rotated = Partition(a.clients, "a", 0, 3, rotation=np.array([0.0, 1.0]))
    assert len({a.hash, noisy.hash, rotated.hash}) == 3
    with pytest.raises(ValueError, match="read-only"):
        a.clients[0][0] = 5


def test_angles_follow_their_samples() -> None:
    angles = (np.array([30.0, 15.0]), np.array([0.0]))
    partition = Partition((np.array([2, 0]), np.array([1])), "a", 0, 3, angles=angles)
    assert partition.clients[0].tolist() == [0, 2]
    assert partition.angles[0].tolist() == [15.0, 30.0]


@pytest.mark.parametrize(
    ("clients", "shift", "message"),
    [
        (([0, 1], [1]), {}, "sample 1 is held twice"),
        (([0], [3]), {}, "no sample 3 among 3 samples"),
        (([0], [-1]), {}, "no sample -1"),
        (([0.5],), {}, "whole numbers"),
        (([[0], [1, 2]],), {}, "whole numbers"),
        ((), {}, "at least one client"),
        (([0], [1]), {"rotation": [1.0]}, "rotation must be 2 finite numbers"),
        (([0], [1]), {"noise": [1.0, np.nan]}, "noise must be 2 finite numbers"),
        (([0], [1]), {"angles": ([1.0], [])}, "angles of client 1 must be 1 finite numbers"),
        (([0], [1]), {"angles": ([1.0],)}, "angles for 1 clients, not 2"),
        (([0],), {"angles": ([1.0],), "rotation": [0.0]}, "both rotate"),
    ],
)
def test_contents_that_are_no_partition(clients: tuple, shift: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Partition(clients, "mine", 0, 3, **shift)


def test_label_counts() -> None:
    partition = Partition(([0, 1], [2]), "mine", 0, 4)
    assert partition.label_counts([1, 1, 0, 2]).tolist() == [[0, 2, 0], [1, 0, 0]]
    assert partition.label_counts([1, 1, 0, 2], num_classes=4).shape == (2, 4)
    several = [[1, 0], [1, 1], [0, 0], [1, 1]]
    assert partition.label_counts(several).tolist() == [[2, 1], [0, 0]]
    with pytest.raises(DataError, match=r"label 2 is not one of the 2 classes 0\.\.1"):
        partition.label_counts([1, 1, 0, 2], num_classes=2)
    with pytest.raises(DataError, match="label -1 is not"):
        partition.label_counts([1, 1, 0, -1])
    with pytest.raises(DataError, match="not classes"):
        partition.label_counts([0.1, 0.2, 0.3, 0.4])
    with pytest.raises(DataError, match="a partition of 4 samples, but the data have 3"):
        partition.label_counts([1, 1, 0])


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["dirichlet(0.5)", "iid+rotation(15)+noise(0.1)", "label_shards+rotation_dirichlet(0.1)"],
)
def test_save_and_load(text: str, tmp_path) -> None:
    partition = draw(text, LABELS, 10, seed=7)
    path = partition.save(tmp_path / "new" / "partition.json")
    loaded = Partition.load(path)
    assert loaded == partition
    assert loaded.check(len(LABELS)) is loaded
    for field in ("rotation", "noise", "angles"):
        mine, theirs = getattr(partition, field), getattr(loaded, field)
        assert mine is theirs is None or all(map(np.array_equal, mine, theirs))
    assert list(path.parent.iterdir()) == [path]
    assert len(json.loads(path.read_text())["clients"]) == 10  # any JSON reader will do
    with pytest.raises(
        DataError, match="of 3000 samples, but the data have 2999; draw it on these"
    ):
        loaded.check(2999)


def test_files_that_cannot_be_loaded(tmp_path) -> None:
    path = tmp_path / "partition.json"
    draw("dirichlet(0.5)", LABELS, 10, seed=7).save(path)
    whole = path.read_text()
    record = json.loads(whole)
    swapped = {**record, "clients": record["clients"][::-1]}
    cases = {
        "cut short": whole[:2000],
        "not valid JSON": "",
        "write one with Partition.save": '{"weights": [1, 2]}',
        "has version 2": json.dumps({**record, "version": 2}),
        "seed is missing": json.dumps({k: v for k, v in record.items() if k != "seed"}),
        "clients is missing or of the wrong type": json.dumps({**record, "clients": "all"}),
        "whole numbers": json.dumps({**record, "clients": [["a"]]}),
        "held twice": json.dumps({**record, "clients": [[1, 1]]}),
        "rotation must be numbers": json.dumps({**record, "rotation": ["a"] * 10}),
        "its content has hash": json.dumps(swapped),
    }
    for message, content in cases.items():
        path.write_text(content)
        with pytest.raises(DataError, match=message) as error:
            Partition.load(path)
        assert str(path) in str(error.value)
    path.write_bytes(b"PK\x03\x04\xff\xfe")
    with pytest.raises(DataError, match="not a partition file"):
        Partition.load(path)
    for absent in (tmp_path / "no.json", tmp_path):
        with pytest.raises(DataError, match=f"cannot read {absent}"):
            Partition.load(absent)


# --- splitting clients ---------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["dirichlet(0.1)", "iid+rotation_dirichlet(0.5)"])
def test_holdout_is_stratified_and_uses_every_sample_once(text: str) -> None:
    partition = draw(text, LABELS, 10, seed=1)
    train, held = holdout(partition, LABELS, fraction=0.2, seed=5)
    for k, whole in enumerate(partition.clients):
        both = np.concatenate([train.clients[k], held.clients[k]])
        assert np.array_equal(np.sort(both), whole)
    assert np.abs(held.sizes - 0.2 * partition.sizes).max() <= 0.5
    wanted = 0.2 * partition.label_counts(LABELS)
    assert np.abs(held.label_counts(LABELS) - wanted).max() < 2
    assert holdout(partition, LABELS, 0.2, seed=5) == (train, held)
    assert holdout(partition, LABELS, 0.2, seed=6)[1].hash != held.hash
    assert held.name.endswith("+holdout(fraction=0.2, seed=5, part=held)")
    if partition.angles is not None:
        angle = dict(
            zip(np.concatenate(partition.clients), np.concatenate(partition.angles), strict=True)
        )
        for part in (train, held):
            samples = np.concatenate(part.clients)
            assert [angle[i] for i in samples] == np.concatenate(part.angles).tolist()


def test_holdout_leaves_every_client_a_training_sample() -> None:
    for fraction in (0.1, 0.5, 0.99):
        train, held = holdout(draw("iid", LABELS[:15], 10, seed=0), LABELS[:15], fraction, seed=0)
        assert train.sizes.min() == 1
        assert train.sizes.sum() + held.sizes.sum() == 15


def test_every_sample_is_equally_likely_to_be_held_out() -> None:
    labels = np.array([0] * 5 + [1] * 2 + [2])
    partition = Partition((np.arange(8),), "mine", 0, 8)
    held = [holdout(partition, labels, 0.25, seed)[1].clients[0] for seed in range(1500)]
    frequency = np.bincount(np.concatenate(held), minlength=8) / 1500
    assert frequency == pytest.approx(0.25, abs=0.05)


def test_resplit_is_stratified_and_uses_every_sample_once() -> None:
    partition = draw("paired_class_dirichlet(0.1)", LABELS, 20, seed=1)
    parts = resplit(partition, LABELS, seed=0)
    for k, whole in enumerate(partition.clients):
        assert np.array_equal(np.sort(np.concatenate([p.clients[k] for p in parts])), whole)
    counts = partition.label_counts(LABELS)
    for part, fraction in zip(parts, (0.4, 0.3, 0.3), strict=True):
        assert np.abs(part.sizes - fraction * partition.sizes).max() < 1
        assert np.abs(part.label_counts(LABELS) - fraction * counts).max() < 3
    assert [p.name.rsplit("=", 1)[1] for p in parts] == ["train)", "test)", "validation)"]


def test_splits_of_labels_that_are_not_classes() -> None:
    for labels in (np.linspace(0, 1, 60), np.zeros((60, 3))):
        partition = draw("iid", labels, 6, seed=0)
        assert holdout(partition, labels, 0.2, seed=0)[1].sizes.tolist() == [2] * 6
        assert resplit(partition, labels, seed=0)[0].sizes.tolist() == [4] * 6


def test_splits_that_cannot_be_made() -> None:
    partition = draw("iid", LABELS, 10, seed=0)
    for fraction in (0, 1, -0.2, float("nan"), "half"):
        with pytest.raises(FieldError, match="not a number between 0 and 1"):
            holdout(partition, LABELS, fraction, seed=0)  # type: ignore[arg-type]
    for fractions in ((0.5, 0.5), (0.5, 0.5, 0.5), (1.2, -0.1, -0.1)):
        with pytest.raises(FieldError, match="three positive numbers that add up to 1"):
            resplit(partition, LABELS, fractions, seed=0)
    with pytest.raises(DataError, match="a partition of 3000 samples"):
        holdout(partition, LABELS[:10], 0.2, seed=0)


# --- pictures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [4, 40])
def test_plot_png_and_svg(clients: int, tmp_path) -> None:
    partition = draw("client_dirichlet_balanced+rotation", LABELS, clients, seed=0)
    names = [f"class {c}" for c in range(10)]
    png = partition.plot(LABELS, tmp_path / "new" / "a.png", class_names=names)
    assert png.read_bytes().startswith(b"\x89PNG")
    svg = partition.plot(LABELS, tmp_path / "a.svg").read_bytes()
    assert b"<svg" in svg
    assert partition.plot(LABELS, tmp_path / "b.svg").read_bytes() == svg


def test_plot_of_labels_that_are_not_classes(tmp_path) -> None:
    for labels in (np.linspace(0, 1, 60), np.ones((60, 3), dtype=int)):
        assert draw("iid", labels, 6, seed=0).plot(labels, tmp_path / "a.png").exists()


def test_plots_that_cannot_be_drawn(tmp_path) -> None:
    partition = draw("iid", LABELS, 4, seed=0)
    with pytest.raises(FieldError, match=r"end its name in \.png, \.svg or \.pdf"):
        partition.plot(LABELS, tmp_path / "a.bmp")
    with pytest.raises(FieldError, match="kind = 'pie' is not auto, bubbles or heatmap"):
        partition.plot(LABELS, tmp_path / "a.png", kind="pie")
    with pytest.raises(FieldError, match="2 class names for 10 classes"):
        partition.plot(LABELS, tmp_path / "a.png", class_names=["a", "b"])
    with pytest.raises(DataError, match="a partition of 3000 samples"):
        partition.plot(LABELS[:5], tmp_path / "a.png")
