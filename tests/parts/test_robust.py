"""Krum, TrimmedMean and Median: outliers, ties, cohorts that are too small, and faults that their
identities must find."""

from dataclasses import dataclass, replace

import pytest
import torch

from kedge.check.problems import images, position, quadratics
from kedge.core import tree
from kedge.core.method import parse
from kedge.core.part import Part, Stack
from kedge.errors import FieldError
from kedge.parts.robust import Krum, Median, TrimmedMean, _sq_distances
from tests.parts.faults import claims_of, is_found

# Each of these has one fault; the comment names it, and an identity must find it.


@dataclass(frozen=True)
class Neighbours(Krum):
    shift = 0
    power = 1.0
    first = 1

    def _rule(self, r):
        order = torch.argsort(r.uploads["client"])
        updates = tree.map(
            lambda _, new, old: new[order] - old, r.mean_delta, r.clients.params, r.anchor.params
        )
        near = max(r.cohort - self.byzantine - 2, 1) + self.shift
        away = _sq_distances(updates, r.cohort) ** self.power
        scores = away.sort(1).values[:, self.first : self.first + near].sum(1)
        chosen = order[torch.argsort(scores, stable=True)[: self.select]]
        return lambda x: x[chosen].mean(0)


@dataclass(frozen=True)
class OneMore(Neighbours):  # n - f - 1 neighbours
    shift = 1


@dataclass(frozen=True)
class OneLess(Neighbours):  # n - f - 3 neighbours
    shift = -1


@dataclass(frozen=True)
class Itself(Neighbours):  # its own distance, 0, takes a neighbour's place
    first = 0


@dataclass(frozen=True)
class Unsquared(Neighbours):
    power = 0.5


@dataclass(frozen=True)
class FirstAnswer(Krum):
    def reply(self, v, weights):  # ties go to who answers first
        return {}, {"client": Stack(torch.zeros_like(v.info.client))}


@dataclass(frozen=True)
class Largest(Krum):
    def _rule(self, r):  # the furthest update
        order = torch.argsort(r.uploads["client"])
        updates = tree.map(
            lambda _, new, old: new[order] - old, r.mean_delta, r.clients.params, r.anchor.params
        )
        chosen = order[_sq_distances(updates, r.cohort).sum(1).argmax()]
        return lambda x: x[chosen]


@dataclass(frozen=True)
class LastLeaf(Krum):
    def _rule(self, r):  # distances in one leaf only
        name = next(iter(r.mean_delta))
        r._mean = r._mean._replace(params={name: r.mean_delta[name]})
        return super()._rule(r)


@dataclass(frozen=True)
class WeightedSelection(Krum):
    def _rule(self, r):  # the selected updates by size
        rule, n = super()._rule(r), r.client_weights / r.client_weights.sum()
        picked = rule(torch.eye(r.cohort, dtype=r.spec.dtype)) > 0
        p = n * picked / (n * picked).sum()
        return lambda x: torch.einsum("k,k...->...", p, x)


@dataclass(frozen=True)
class PlainStatistics(Krum):
    def server_step(self, r, weights):  # BatchNorm statistics of all clients
        return weights, {}


@dataclass(frozen=True)
class OneEnd(TrimmedMean):
    def _rule(self, r):  # the largest values only
        return lambda x: x.sort(0).values[: r.cohort - self.byzantine].mean(0)


@dataclass(frozen=True)
class ByNorm(TrimmedMean):
    def _rule(self, r):  # whole updates are left out, not coordinates
        sizes = sum(
            ((new - r.anchor.params[n]) ** 2).flatten(1).sum(1)
            for n, new in r.clients.params.items()
        )
        inner = torch.argsort(sizes)[self.byzantine : r.cohort - self.byzantine]
        return lambda x: x[inner].mean(0)


@dataclass(frozen=True)
class KeepsDivisor(TrimmedMean):
    def _rule(self, r):  # the sum of what is left over n
        rule, left = super()._rule(r), (r.cohort - 2 * self.byzantine) / r.cohort
        return lambda x: left * rule(x)


@dataclass(frozen=True)
class UntrimmedStatistics(TrimmedMean):
    def server_step(self, r, weights):
        return weights, {}


@dataclass(frozen=True)
class LowerMedian(Median):
    def _rule(self, r):  # the lower of the two middle values
        return lambda x: x.median(0).values


@dataclass(frozen=True)
class WeightedMedian(Median):
    def _rule(self, r):  # every client as often as it has samples
        times = r.client_weights.to(torch.int64)
        return lambda x: x.repeat_interleave(times, 0).median(0).values


@dataclass(frozen=True)
class PlainMean(Median):
    def _rule(self, r):
        return lambda x: x.mean(0)


FAULTY = [
    OneMore, OneLess, Itself, Unsquared, FirstAnswer, Largest, LastLeaf, WeightedSelection,
    PlainStatistics, OneEnd, ByNorm, KeepsDivisor, UntrimmedStatistics, LowerMedian,
    WeightedMedian, PlainMean,
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("cls", FAULTY, ids=lambda c: c.__name__)
def test_a_fault_is_found_by_an_identity(cls: type[Part]) -> None:
    assert is_found(cls())


def test_the_faulty_frame_itself_is_right() -> None:
    assert all(claim.holds for claim in claims_of(Neighbours()))


# -- five clients, both engines, any order --------------------------------------------------------

RULES = [
    "krum",
    "krum(select=3)",
    "krum(byzantine=0, select=2)",
    "trimmedmean",
    "trimmedmean(byzantine=2)",
    "median",
]
SIZES = (5, 9, 5, 14, 7)


@pytest.mark.parametrize("text", RULES)
@pytest.mark.parametrize("task", ["classification", "multilabel", "regression"])
def test_engines_and_orders_agree(text: str, task: str) -> None:
    problem = images(task=task, norm="bn", sizes=SIZES)
    runs = []
    for engine, order in (("loop", None), ("vector", None), ("vector", [3, 0, 4, 2, 1])):
        run = problem.simulate(text, engine)
        for _ in range(2):
            run.run_round(order)
        runs.append(run)
    for other in runs[1:]:
        assert tree.gap(runs[0].state(), other.state()) < 1e-11
    plain = problem.simulate("fedavg")
    plain.run_round()
    assert tree.gap(plain.weights, runs[0].weights) > 1e-4


@pytest.mark.parametrize("text", RULES)
def test_private_leaves_and_statistics_stay_where_they_are(text: str) -> None:
    problem = replace(images(norm="bn", sizes=SIZES), batchnorm="local")
    run = problem.simulate(text + "+fedrep")
    start, head = run.weights, run.bound.model.head_names()
    run.run_round()
    assert tree.equal(run.weights.buffers, start.buffers)
    assert all(torch.equal(run.weights.params[n], start.params[n]) for n in head)
    assert tree.gap(run.weights.params, start.params) > 1e-4


def test_counters_stay_whole_numbers() -> None:
    """Clients take 1, 2, 1, 3 and 2 steps of a batch of 5; the median of the counters is 2."""
    run = images(norm="bn", sizes=SIZES).simulate("median")
    run.run_round()
    counters = [b for b in run.weights.buffers.values() if not b.is_floating_point()]
    assert [b.dtype for b in counters] == [torch.int64]
    assert counters[0] == 2


# -- attacks --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attack(Part):
    """The first clients send a number in place of every weight."""

    name = "attack"
    clients: int = 1
    value: str = "1e6"

    def project(self, v, params):
        bad = v.info.client < self.clients
        return tree.map(lambda p: torch.where(bad, float(self.value), p), params)


ATTACKED = (5, 9, 5, 14, 7, 6, 8)  # sizes of the clients


@pytest.mark.parametrize("value", ["1e6", "-1e6", "nan", "inf", "-inf"])
@pytest.mark.parametrize(
    ("text", "clients"),
    [
        ("krum", 1),
        ("krum(select=3)", 1),
        ("krum(byzantine=2)", 2),
        ("krum(byzantine=2, select=4)", 2),
        ("trimmedmean", 1),
        ("trimmedmean(byzantine=3)", 3),
        ("median", 3),
    ],
)
def test_attackers_do_not_get_through(text: str, clients: int, value: str) -> None:
    """Every coordinate stays within what honest clients sent."""
    problem = images(sizes=ATTACKED, steps=1)
    honest = []
    for k in range(clients, len(ATTACKED)):
        alone = problem.simulate("fedavg")
        alone.run_round([k])
        honest.append(alone.weights.params)
    every = tree.stack(honest)
    run = problem.simulate(parse(text) + Attack(clients, value))
    run.run_round()
    for name, found in run.weights.params.items():
        assert bool((found <= every[name].amax(0) + 1e-12).all())
        assert bool((found >= every[name].amin(0) - 1e-12).all())


def test_fedavg_gives_in() -> None:
    run = images(sizes=ATTACKED, steps=1).simulate(parse("fedavg") + Attack())
    run.run_round()
    assert max(float(p.abs().max()) for p in run.weights.params.values()) > 1e4


# -- cohorts that are too small -------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize(
    ("text", "clients", "message"),
    [
        ("krum", 4, r"krum.byzantine = 1 needs 5 clients in a round, and this one has 4"),
        ("krum(byzantine=2)", 6, r"krum.byzantine = 2 needs 7 clients"),
        ("krum(byzantine=0, select=4)", 3, r"krum.select = 4 is above the round's 3 clients"),
        ("trimmedmean", 2, r"trimmedmean.byzantine = 1 needs 3 clients .* lower byzantine"),
        ("trimmedmean(byzantine=3)", 6, r"trimmedmean.byzantine = 3 needs 7 clients"),
    ],
)
def test_small_cohorts(engine: str, text: str, clients: int, message: str) -> None:
    problem = quadratics((1.0,) * clients, (1.0,) * clients)
    with pytest.raises(FieldError, match=message):
        problem.simulate(text, engine).run_round()


@pytest.mark.parametrize(
    ("text", "clients"),
    [
        ("krum", 5),
        ("krum(byzantine=0)", 1),
        ("krum(byzantine=0)", 2),
        ("trimmedmean", 3),
        ("trimmedmean(byzantine=0)", 1),
        ("median", 1),
        ("median", 2),
    ],
)
def test_smallest_cohorts(text: str, clients: int) -> None:
    run = quadratics((2.0,) * clients, (1.0,) * clients, 0.25, steps=1).simulate(text)
    run.run_round()
    assert position(run) == 0.5


def test_three_clients_without_attackers_have_one_neighbour() -> None:
    """Updates 0, 0.1 and 1: the first two are each other's neighbour, and the tie goes to the
    first. With two neighbours it would be the second, which is in the middle."""
    run = quadratics((2.0,) * 3, (0.0, 0.2, 2.0), 0.25, steps=1).simulate("krum(byzantine=0)")
    run.run_round()
    assert position(run) == 0.0


def test_values_out_of_range() -> None:
    for text in ("krum(byzantine=-1)", "krum(select=0)", "trimmedmean(byzantine=-1)"):
        with pytest.raises(FieldError):
            parse(text)


# -- distances ------------------------------------------------------------------------------------


def test_distances_are_those_of_flat_vectors_and_symmetric() -> None:
    generator = torch.Generator().manual_seed(3)
    x = {
        "a": torch.randn(6, 3, 5, generator=generator),
        "b": torch.randn(6, 7, generator=generator),
    }
    flat = torch.cat([v.flatten(1) for v in x.values()], 1)
    found = _sq_distances(x, 6)
    assert torch.equal(found, found.T)
    assert torch.allclose(found, torch.cdist(flat, flat) ** 2, atol=1e-4)
    assert float(found.diagonal().abs().max()) == 0.0
