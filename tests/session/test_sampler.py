"""Samplers: which clients a round asks."""

from __future__ import annotations

import math

import pytest
import torch

from kedge.check.problems import images
from kedge.core import rng, tree
from kedge.errors import FieldError
from kedge.session.sampler import BySize, Fixed, Poisson, Sampler, Uniform, make_sampler
from kedge.sim.simulation import Simulation

TEN = (4,) * 10
ROUNDS = 4000


def cohort_key(seed: int, round: int) -> torch.Tensor:
    return rng.fold(rng.fold(rng.key(seed), "cohort"), round)


def draws(sampler: Sampler, clients: int, rounds: int = ROUNDS) -> list[list[int]]:
    return [sampler.draw(cohort_key(0, t), t, clients) for t in range(rounds)]


def frequencies(cohorts: list[list[int]], clients: int) -> torch.Tensor:
    """How often each client is drawn in a round."""
    often = torch.tensor([k for cohort in cohorts for k in cohort])
    return torch.bincount(often, minlength=clients) / len(cohorts)


@pytest.mark.parametrize(
    ("seed", "per_round", "cohorts"),
    [
        (0, 4, [[1, 2, 5, 8], [0, 2, 5, 9], [0, 4, 7, 9], [0, 2, 5, 9], [1, 2, 4, 5]]),
        (7, 4, [[0, 2, 7, 8], [0, 3, 5, 6], [0, 4, 7, 8], [3, 5, 6, 8], [0, 3, 6, 7]]),
        (0, 1, [[5], [9], [4], [5], [1], [5], [4], [9]]),
        (0, 10, [list(range(10))] * 3),
        (0, None, [list(range(10))] * 3),
    ],
)
def test_cohorts_are_those_of_every_release(
    seed: int, per_round: int | None, cohorts: list[list[int]]
) -> None:
    """A recorded run is repeated with the clients that it had. They are the first of a permutation
    by the key of (seed, round)."""
    run = images(sizes=TEN, batch=4).simulate("fedavg", per_round=per_round, seed=seed)
    assert [run.session.draw_clients(t) for t in range(len(cohorts))] == cohorts
    count = per_round or 10
    by_definition = [
        sorted(rng.permutation(cohort_key(seed, t), 10)[:count].tolist())
        for t in range(len(cohorts))
    ]
    assert by_definition == cohorts
    assert run.session.cohort_size == count


def test_uniform_draws_every_client_equally_often() -> None:
    cohorts = draws(Uniform(3), 7)
    assert all(len(cohort) == 3 and cohort == sorted(set(cohort)) for cohort in cohorts)
    deviation = math.sqrt(3 / 7 * 4 / 7 / ROUNDS)
    assert float((frequencies(cohorts, 7) - 3 / 7).abs().max()) < 4 * deviation


def test_sizes_are_probabilities() -> None:
    """One client: k with probability n_k / n. Two: k first, or second after another one."""
    sizes = (10, 20, 30, 40)
    p = [n / 100 for n in sizes]
    one = frequencies(draws(BySize(1, sizes), 4), 4)
    two = draws(BySize(2, sizes), 4)
    assert all(len(set(cohort)) == 2 and cohort == sorted(cohort) for cohort in two)
    in_two = [p[k] + sum(p[j] * p[k] / (1 - p[j]) for j in range(4) if j != k) for k in range(4)]
    for found, wanted in ((one, p), (frequencies(two, 4), in_two)):
        for share, expected in zip(found.tolist(), wanted, strict=True):
            assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / ROUNDS)
    assert sum(in_two) == pytest.approx(2)
    assert draws(BySize(4, sizes), 4, 3) == draws(BySize(0, sizes), 4, 3) == [[0, 1, 2, 3]] * 3


def test_equal_sizes_are_no_other_probabilities() -> None:
    found = frequencies(draws(BySize(3, (6,) * 7), 7), 7)
    assert float((found - 3 / 7).abs().max()) < 4 * math.sqrt(3 / 7 * 4 / 7 / ROUNDS)


def test_poisson_draws_each_client_by_itself() -> None:
    cohorts = draws(Poisson(2), 5)
    deviation = math.sqrt(0.4 * 0.6 / ROUNDS)
    assert float((frequencies(cohorts, 5) - 0.4).abs().max()) < 4 * deviation
    for size in range(6):  # sizes are binomial
        expected = math.comb(5, size) * 0.4**size * 0.6 ** (5 - size)
        share = sum(len(cohort) == size for cohort in cohorts) / ROUNDS
        assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / ROUNDS)
    # two clients are in a round together as often as if they knew nothing of each other
    together = sum({0, 1} <= set(cohort) for cohort in cohorts) / ROUNDS
    assert abs(together - 0.16) < 4 * math.sqrt(0.16 * 0.84 / ROUNDS)
    assert all(cohort == sorted(cohort) for cohort in cohorts)
    assert draws(Poisson(0), 5, 3) == draws(Poisson(5), 5, 3) == [[0, 1, 2, 3, 4]] * 3


def test_fixed_cohorts_come_again() -> None:
    sampler = Fixed(((0, 2), (1,), ()))
    assert draws(sampler, 3, 5) == [[0, 2], [1], [], [0, 2], [1]]
    assert sampler.size(3) == 2


@pytest.mark.parametrize("sampler", [Uniform(2), BySize(2, (5, 9, 14)), Poisson(2)])
def test_a_draw_depends_on_seed_and_round_alone(sampler: Sampler) -> None:
    def run(method: str, seed: int) -> Simulation:
        return images().simulate(method, sampler=sampler, seed=seed)

    one, other, third = run("fedavg", 0), run("moon", 0), run("fedavg", 1)
    rounds = [[r.session.draw_clients(t) for t in range(20)] for r in (one, other, third)]
    assert rounds[0] == rounds[1] != rounds[2]
    assert [one.session.draw_clients(t) for t in reversed(range(20))] == rounds[0][::-1]
    for t in range(3):
        assert list(one.run_round().totals.clients) == rounds[0][t]


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_a_fixed_sampler_is_a_list_of_rounds(engine: str) -> None:
    sampler = make_sampler("fixed([[0, 1], [2]])")
    run, listed = (images(norm="bn").simulate("scaffold", engine, **how) for how in (
        {"sampler": sampler}, {},
    ))  # fmt: skip
    for clients in ([0, 1], [2], [0, 1]):
        assert list(run.run_round().totals.clients) == clients
        listed.run_round(clients)
    assert tree.equal(run.state(), listed.state())


def test_samplers_by_name() -> None:
    assert make_sampler("uniform", 3) == Uniform(3)
    assert make_sampler("size", 3, [5, 9, 14]) == BySize(3, (5, 9, 14))
    assert make_sampler("poisson", 3) == Poisson(3)
    assert make_sampler("fixed([[0, 2], [1]])") == Fixed(((0, 2), (1,)))
    assert make_sampler("fixed([[0], []])", 3, [1, 1]) == Fixed(((0,), ()))


@pytest.mark.parametrize(
    "text",
    [
        "random", "uniform(3)", "size(3)", "poisson(0.1)", "uniform:fast", "fixed", "fixed()",
        "fixed([])", "fixed(3)", "fixed([0, 1])", "fixed([[0.5]])", "fixed([[true]])",
        "fixed([[0]], [[1]])", "fixed([[0]], n=3)", "fixed(cohorts=[[0]])", 'fixed(["01"])',
    ],
)  # fmt: skip
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(
        FieldError, match="is not one of: uniform, size, poisson, fixed.*0, 1.*2, 3"
    ) as error:
        make_sampler(text)
    assert str(error.value).startswith(f"sampler = {text!r} ")
    assert error.value.field == "sampler"


@pytest.mark.parametrize("sampler", [Uniform(4), Uniform(-1), BySize(4, (1, 1, 1)), Poisson(4)])
def test_more_clients_than_there_are_are_refused(sampler: Uniform) -> None:
    message = f"^per_round = {sampler.count} is not between 1 and the 3 clients$"
    with pytest.raises(FieldError, match=message):
        images().simulate("fedavg", sampler=sampler)


@pytest.mark.parametrize("cohort", [(0, 3), (-1,), (1, 0), (1, 1)])
def test_fixed_cohorts_that_do_not_suit_the_clients_are_refused(cohort: tuple[int, ...]) -> None:
    with pytest.raises(
        FieldError,
        match=r"^sampler = fixed\(\.\.\.\): .* are not different clients in ascending order from "
        "0 to 2$",
    ):
        images().simulate("fedavg", sampler=Fixed(((0, 2), cohort)))
