"""Partitions: every sample at most once, the same for the same seed, and the sizes they promise."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.properties.strategies import TEXT, settings_of

from kedge.data.partition import Partition, draw, draws, holdout, partitions, resplit, shifts
from kedge.data.partition.draws import (
    arrivals,
    capped_counts,
    class_codes,
    deal,
    draw_classes,
    equal_sizes,
    proportional_sizes,
    samples_by_client,
)
from kedge.data.partition.grammar import schema
from kedge.errors import IncompatibleError, KedgeError, PartitionError

BUILT_IN = [name for name in partitions if name != "silos"]
EQUAL_SIZES = ("iid", "client_dirichlet_balanced(sigma=0.0)", "client_dirichlet_sequential")
# Concentrations as people use them. Extreme ones are examples of their own tests: a draw that must
# give every client a minimum then takes its full second before it fails.
MODERATE = {
    "alpha": st.floats(0.05, 100),
    "minimum": st.integers(1, 3),
    "shards": st.integers(1, 4),
}
SEEDS = st.integers(0, 2**40)


@st.composite
def labels_of(draw: st.DrawFn, least: int = 1, most: int = 60, classes: int = 6) -> np.ndarray:
    """Labels ``[N]`` of unequal classes, in any order, with gaps between their numbers."""
    codes = draw(st.lists(st.integers(0, classes - 1), min_size=least, max_size=most))
    names = draw(st.permutations([-3, 0, 1, 7, 40, 41]))
    return np.array(names, dtype=draw(st.sampled_from([np.int64, np.int32, np.int8])))[codes]


@st.composite
def cases(draw: st.DrawFn, names: st.SearchStrategy[str]) -> tuple[str, np.ndarray, int, int]:
    """``(text, labels, clients, seed)`` with legal options."""
    name = draw(names)
    labels = draw(labels_of())
    clients = draw(st.integers(1, min(8, len(labels))))
    options = draw(settings_of(schema(name)))
    options |= {key: draw(value) for key, value in MODERATE.items() if key in options}
    text = schema(name).write(schema(name).check(options), first=True)
    return text, labels, 1 if name == "central" else clients, draw(SEEDS)


def drawn(case: tuple[str, np.ndarray, int, int]) -> Partition | None:
    """The partition, or None where these samples cannot be divided so, which must be said."""
    text, labels, clients, seed = case
    try:
        return draw(text, labels, clients, seed)
    except PartitionError as error:
        assert str(error).startswith(text.partition("(")[0])
        assert f"with {clients} clients and {len(labels)} samples: " in str(error)
        return None


@pytest.mark.parametrize("name", BUILT_IN)
@given(data=st.data())
def test_clients_are_disjoint_and_a_seed_gives_the_same(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(st.just(name)))
    partition = drawn(case)
    if partition is None:
        return
    text, labels, clients, seed = case
    held = np.concatenate(partition.clients)
    assert len(partition.clients) == clients
    assert partition.sizes.min() >= 1
    assert len(np.unique(held)) == len(held)
    assert all((np.diff(part) > 0).all() for part in partition.clients)
    assert set(held) <= set(range(len(labels)))
    if name != "label_shards" or clients * partition_shards(text) >= len(np.unique(labels)):
        assert len(held) == len(labels)
    again = draw(partition.name, labels.tolist(), clients, seed)
    assert again == partition
    assert all(map(np.array_equal, again.clients, partition.clients))


def partition_shards(text: str) -> int:
    return int(text.partition("shards=")[2].rstrip(")"))


@given(labels=labels_of(), data=st.data())
def test_sizes_are_equal_where_they_are_said_to_be(labels: np.ndarray, data: st.DataObject) -> None:
    clients, seed = data.draw(st.integers(1, min(8, len(labels)))), data.draw(SEEDS)
    for text in (*EQUAL_SIZES, "quantity_lognormal(sigma=0)", "quantity_powerlaw(exponent=0)"):
        sizes = draw(text, labels, clients, seed).sizes
        assert sizes.max() - sizes.min() <= 1, text


@given(cases(st.just("class_dirichlet_capped")))
def test_no_client_is_below_the_minimum(case: tuple[str, np.ndarray, int, int]) -> None:
    partition = drawn(case)
    if partition is not None:
        minimum = schema("class_dirichlet_capped").options["minimum"].default
        text = case[0]
        if "minimum=" in text:
            minimum = text.partition("minimum=")[2].rstrip(")")
        least = len(np.unique(case[1])) if minimum == "classes" else int(minimum)
        assert partition.sizes.min() >= least


@given(labels_of(40, 80), st.sampled_from([2, 4]), st.floats(0.05, 0.5), SEEDS)
def test_pairs_share_equal_blocks(
    labels: np.ndarray, clients: int, alpha: float, seed: int
) -> None:
    text = schema("paired_class_dirichlet").write({"alpha": alpha}, first=True)
    partition = drawn((text, labels, clients, seed))
    if partition is None:
        return
    blocks = partition.sizes.reshape(-1, 2)
    fair = equal_sizes(len(labels), clients).reshape(-1, 2).sum(1)
    assert blocks.sum(1).tolist() == fair.tolist()
    assert (blocks.min(1) >= np.maximum(1, np.ceil(fair / 4))).all()


@given(cases(st.just("label_shards")))
def test_a_client_holds_its_own_classes_only(case: tuple[str, np.ndarray, int, int]) -> None:
    partition = drawn(case)
    codes, shards = class_codes(case[1]), partition_shards(case[0])
    groups = (codes.max() + 1) // shards
    if partition is None:  # only for a reason
        assert (codes.max() + 1) % shards or np.bincount(codes).min() < case[2]
        return
    for k, samples in enumerate(partition.clients):
        assert set(codes[samples] // shards) == {k % groups}
    counts = partition.label_counts(codes)
    for c in range(codes.max() + 1):
        holders = counts[c // shards :: groups, c]
        assert not len(holders) or holders.max() - holders.min() <= 1  # cut evenly


@given(
    st.sampled_from(
        ["class_dirichlet_capped(minimum=1)", "client_dirichlet_balanced(sigma=0.5)",
         "client_dirichlet_sequential", "client_dirichlet_sequential(prior=ones)"]
    ),
    labels_of(8), st.integers(1, 4), SEEDS,
)  # fmt: skip
def test_clients_draw_no_more_of_a_class_than_there_is(
    text: str, labels: np.ndarray, clients: int, seed: int
) -> None:
    """The counts that are dealt out are those of the data, and what is dealt has these counts."""
    seen = []

    def recorded(rng: np.random.Generator, codes: np.ndarray, counts: np.ndarray) -> Any:
        seen.append(counts)
        return deal(rng, codes, counts)

    with mock.patch.object(draws, "deal", recorded):
        partition = drawn((text, labels, clients, seed))
    if partition is not None:
        codes = class_codes(labels)
        assert seen[-1].sum(0).tolist() == np.bincount(codes).tolist()
        assert np.array_equal(partition.label_counts(codes), seen[-1])


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.data())
def test_shards_are_cut_evenly_among_their_holders(
    shards: int, groups: int, holders: int, data: st.DataObject
) -> None:
    sizes = st.lists(st.integers(holders, 9), min_size=shards * groups, max_size=shards * groups)
    class_sizes = np.array(data.draw(sizes))
    labels = np.repeat(np.arange(len(class_sizes)), class_sizes)
    counts = draw(f"label_shards({shards})", labels, groups * holders, 0).label_counts(labels)
    for c, size in enumerate(class_sizes):
        expected = np.bincount(np.arange(size) * holders // size, minlength=holders)
        assert counts[c // shards :: groups, c].tolist() == expected.tolist()
        assert counts[:, c].sum() == size


@given(labels=labels_of(), data=st.data())
def test_what_ignores_the_labels_ignores_them(labels: np.ndarray, data: st.DataObject) -> None:
    clients, seed = data.draw(st.integers(1, min(8, len(labels)))), data.draw(SEEDS)
    text = data.draw(st.sampled_from(["iid", "quantity_lognormal", "quantity_powerlaw"]))
    plain = draw(text, labels, clients, seed)
    assert draw(text, np.zeros((len(labels), 3)), clients, seed).hash == plain.hash
    assert draw(text, labels + 0.5, clients, seed).hash == plain.hash


@given(labels=labels_of(), data=st.data())
def test_another_seed_is_another_stream(labels: np.ndarray, data: st.DataObject) -> None:
    """Over many seeds, every client gets every sample equally often (five standard deviations)."""
    n, clients = len(labels), data.draw(st.integers(1, min(4, len(labels))))
    start, runs = data.draw(SEEDS), 40
    held = np.zeros((clients, n))
    for seed in range(start, start + runs):
        for k, samples in enumerate(draw("iid", labels, clients, seed).clients):
            held[k, samples] += 1
    share = equal_sizes(n, clients)[:, None] / n
    assert (np.abs(held - runs * share) <= 5 * np.sqrt(runs * share * (1 - share)) + 1).all()


@given(st.lists(st.sampled_from(["a", "b", "c", "d"]), min_size=1, max_size=30))
def test_silos_are_the_groups(groups: list[str]) -> None:
    names = sorted(set(groups))
    partition = draw("silos", np.zeros(len(groups)), len(names), seed=0, groups=groups)
    for name, samples in zip(names, partition.clients, strict=True):
        assert [groups[i] for i in samples] == [name] * groups.count(name)
    with pytest.raises(PartitionError, match=f"have {len(names)} groups; set clients to"):
        draw("silos", np.zeros(len(groups) + 1), len(names) + 1, 0, groups=[*groups, groups[0]])


EXTREME = st.sampled_from([5e-324, 1e-300, 1e-20, 1e-3, 1e3, 1e20, 1e300, 1.7e308])


@pytest.mark.parametrize("name", [*BUILT_IN, *shifts])
@given(data=st.data())
def test_extreme_options_give_a_partition_or_an_error_of_kedge(
    name: str, data: st.DataObject
) -> None:
    options = schema(name).options
    chosen = {key: data.draw(EXTREME) for key in options if options[key].row().type == "float"}
    text = schema(name).write(schema(name).check(chosen), first=True)
    labels, seed = np.arange(24) % 3, data.draw(SEEDS)
    clients = 1 if name == "central" else data.draw(st.sampled_from([1, 2, 4]))
    try:
        partition = draw(f"iid+{text}" if name in shifts else text, labels, clients, seed)
    except KedgeError as error:
        assert len(str(error)) > 20
    else:
        assert np.sort(np.concatenate(partition.clients)).tolist() == list(range(24))


# -- shifts ------------------------------------------------------------------------------------


@given(labels=labels_of(), data=st.data())
def test_shifts_leave_the_samples_alone(labels: np.ndarray, data: st.DataObject) -> None:
    clients, seed = data.draw(st.integers(1, min(5, len(labels)))), data.draw(SEEDS)
    step, sigma = data.draw(st.floats(-180, 180)), data.draw(st.floats(0, 9))
    turn = data.draw(st.sampled_from([f"rotation({step})", "rotation_dirichlet(0.5)"]))
    plain = draw("iid", labels, clients, seed)
    shifted = draw(f"iid+{turn}+noise({sigma})", labels, clients, seed)
    assert all(map(np.array_equal, plain.clients, shifted.clients))
    places = np.arange(1, clients + 1)
    assert shifted.noise.tolist() == pytest.approx((sigma * places / clients).tolist())
    degrees = shifted.degrees()
    if turn.startswith("rotation("):
        assert shifted.rotation.tolist() == pytest.approx((step * (places - 1)).tolist())
    else:
        assert all(set(d) <= set(range(0, 136, 15)) for d in degrees)
    assert [len(d) for d in degrees] == plain.sizes.tolist()


# -- splits ------------------------------------------------------------------------------------


@given(labels=labels_of(20, 120, classes=3), data=st.data())
def test_a_holdout_is_stratified_and_loses_nothing(labels: np.ndarray, data: st.DataObject) -> None:
    clients, seed = data.draw(st.integers(1, 3)), data.draw(SEEDS)
    fraction = data.draw(st.floats(0.01, 0.99))
    whole = draw("iid+rotation_dirichlet(1.0)", labels, clients, seed)
    train, held_out = holdout(whole, labels, fraction, seed)
    check_split(whole, labels, [train, held_out], [1 - fraction, fraction])
    assert holdout(whole, labels, fraction, seed) == (train, held_out)


@given(labels=labels_of(20, 120, classes=3), data=st.data())
def test_a_resplit_is_stratified_and_loses_nothing(labels: np.ndarray, data: st.DataObject) -> None:
    clients, seed = data.draw(st.integers(1, 3)), data.draw(SEEDS)
    a, b = sorted(data.draw(st.tuples(st.floats(0.05, 0.45), st.floats(0.5, 0.95))))
    fractions = (a, b - a, 1 - b)
    whole = draw("iid+rotation_dirichlet(1.0)", labels, clients, seed)
    check_split(whole, labels, resplit(whole, labels, fractions, seed), fractions)


def check_split(whole: Partition, labels: np.ndarray, pieces: Any, fractions: Any) -> None:
    codes = class_codes(labels)
    counts = np.stack([piece.label_counts(codes, codes.max() + 1) for piece in pieces])
    assert np.array_equal(counts.sum(0), whole.label_counts(codes, codes.max() + 1))
    angles = [
        dict(zip(s, a, strict=True)) for s, a in zip(whole.clients, whole.angles, strict=True)
    ]
    for k, samples in enumerate(whole.clients):
        joined = np.concatenate([piece.clients[k] for piece in pieces])
        assert np.array_equal(np.sort(joined), samples)
        for piece in pieces:  # the angle of a sample stays with it
            assert [angles[k][s] for s in piece.clients[k]] == list(piece.angles[k])
        sizes = np.array([len(piece.clients[k]) for piece in pieces])
        share = len(samples) * np.array(fractions)
        assert sizes[0] >= 1
        slack = 1 + (share[0] < 1)  # the first part may take one from the largest
        assert (np.abs(sizes - share) < slack + 1e-6).all()
        # within a class each piece has its share of it, up to the roundings of one piece after
        # the other
        exact = counts[:, k].sum(0) * (sizes / len(samples))[:, None]  # [pieces, classes]
        assert (np.abs(counts[:, k] - exact) < len(pieces)).all()


# -- building blocks ---------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8).filter(sum), st.integers(0, 50))
def test_proportional_sizes(weights: list[float], extra: int) -> None:
    samples = len(weights) + extra
    sizes = proportional_sizes(np.array(weights), samples)
    assert sizes.sum() == samples
    assert sizes.min() >= 1
    assert (np.abs(sizes - 1 - np.array(weights) / sum(weights) * extra) < 1 + 1e-6).all()


@given(st.lists(st.integers(-1, 4), max_size=30))
def test_samples_by_client(owner: list[int]) -> None:
    parts = samples_by_client(np.array(owner, dtype=np.int64), 5)
    assert [p.tolist() for p in parts] == [
        [i for i, k in enumerate(owner) if k == client] for client in range(5)
    ]


@given(st.data())
def test_dealing_by_counts(data: st.DataObject) -> None:
    clients, classes = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    cells = data.draw(st.lists(st.integers(0, 5), min_size=clients * classes, max_size=16))
    counts = np.array(cells[: clients * classes]).reshape(clients, classes)
    rng = np.random.default_rng(data.draw(SEEDS))
    codes = rng.permutation(np.repeat(np.arange(classes), counts.sum(0)))
    parts = deal(rng, codes, counts)
    found = [np.bincount(codes[p], minlength=classes) for p in parts]
    assert np.array_equal(found, counts)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), SEEDS)
def test_every_client_arrives_as_often_as_its_size(sizes: list[int], seed: int) -> None:
    turns = arrivals(np.random.default_rng(seed), np.array(sizes))
    assert np.bincount(turns, minlength=len(sizes)).tolist() == sizes


@given(st.data())
def test_no_class_is_drawn_more_often_than_it_has_samples(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(SEEDS))
    class_sizes = np.array(data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=5)))
    clients = data.draw(st.integers(1, 3))
    priors = rng.dirichlet(np.full(len(class_sizes), 0.1), size=clients)
    priors[rng.random(priors.shape) < 0.3] = 0.0
    turns = rng.integers(clients, size=data.draw(st.integers(0, int(class_sizes.sum()))))
    if not class_sizes.sum():
        return
    given_priors = priors.copy()
    found = draw_classes(rng, priors, turns, class_sizes)
    assert len(found) == len(turns)
    assert (np.bincount(found, minlength=len(class_sizes)) <= class_sizes).all()
    assert np.array_equal(priors, given_priors)


@given(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=1, max_size=5), SEEDS)
def test_capped_counts_divide_every_class(clients: int, class_sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(clients, 0.3), size=(3, len(class_sizes)))
    counts = capped_counts(shares, np.array(class_sizes))
    assert counts.min() >= 0
    assert (counts.sum(1) == class_sizes).all()
    # once a client has its fair share it gets no more
    before = np.cumsum(counts, 2) - counts
    full = before >= sum(class_sizes) / clients
    assert not counts[full].any()


# -- errors ------------------------------------------------------------------------------------


@example([[1], [2, 3]], 1)
@example("text", 1)
@example(None, 1)
@given(
    st.one_of(
        st.lists(st.one_of(st.integers(), st.floats(), st.booleans(), st.none()), max_size=5),
        st.lists(TEXT, max_size=5),
        st.floats(),
    ),
    st.one_of(st.integers(-2, 7), st.floats(), st.none()),
)
@pytest.mark.parametrize("text", ["iid", "dirichlet(1.0, minimum=1)", "label_shards(1)", "silos"])
def test_any_labels_give_a_partition_or_an_error_of_kedge(
    text: str, labels: Any, clients: Any
) -> None:
    try:
        partition = draw(text, labels, clients, seed=0)
    except KedgeError as error:
        assert len(str(error)) > 10
        assert not isinstance(error, IncompatibleError) or "use iid" in str(error)
    else:
        assert partition.num_samples == len(labels)
        assert len(partition.clients) == clients
        assert math.isclose(partition.sizes.sum(), len(labels))
