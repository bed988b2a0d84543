"""Before the first round of any engine one client finds what hooks must not do."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kedge.check.problems import images
from kedge.core import tree
from kedge.core.method import parse
from kedge.core.part import Part, Sum
from kedge.core.work import take_jobs
from kedge.errors import HookError
from kedge.session.purity import MAX_PHASES, check_client, disabled
from kedge.sim.fleet import Fleet
from kedge.sim.simulation import Simulation

ENGINES = ("loop", "vector", "reference")
GENERATOR = torch.Generator().manual_seed(3)
COUNTER = itertools.count()


def part_with(**methods: Any) -> Part:
    """A part named ``ridge`` that has these hooks."""
    return type("Ridge", (Part,), {"name": "ridge", **methods})()


@dataclass(frozen=True)
class Memory(Part):
    """Remembers something in a field."""

    seen: list = field(default_factory=list)
    name = "memory"

    def term(self, v: Any, params: Any, batch: Any, out: Any) -> Tensor:
        self.seen.append(1)
        return out.logits.sum()


def set_attribute(self: Any, v: Any, batch: Any) -> Tensor:
    self.last = batch.x.mean()
    return torch.ones_like(batch.x[:, 0, 0, 0])


def set_class_attribute(self: Any, v: Any, batch: Any) -> Tensor:
    type(self).rounds = getattr(self, "rounds", 0) + 1
    return torch.ones_like(batch.x[:, 0, 0, 0])


def fill_module(self: Any, v: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        self.net.weight.add_(1)
    return torch.ones_like(batch.x[:, 0, 0, 0])


def halve(self: Any, v: Any, params: Any, grads: Any) -> Any:
    for grad in grads.values():
        grad.mul_(0.5)
    return {}


def replace_entries(self: Any, v: Any, params: Any, grads: Any) -> Any:
    for name in grads:
        grads[name] = 0.5 * grads[name]
    return {}


def drop_entry(self: Any, v: Any, params: Any) -> Any:
    del params["head.bias"]
    return dict.fromkeys(params, True)


def write_client(self: Any, v: Any, weights: Any) -> Any:
    v.client["c"].add_(1)
    return v.client, {}


def write_anchor(self: Any, v: Any) -> Any:
    v.anchor.params["head.bias"].zero_()
    return {}


def noisy(draw: Any) -> Any:
    def term(self: Any, v: Any, params: Any, batch: Any, out: Any) -> Tensor:
        return float(draw()) * out.logits.sum()

    return term


def dropped(self: Any, v: Any, batch: Any, logits: Tensor) -> Tensor:
    return nn.functional.dropout(logits, 0.5, training=True)


KEEP = "a part is never changed: what it must remember belongs into a slot"
RNG = "draw from v.key: kedge.core.rng.normal(v.key, shape)"
NEW = "return a new tensor or dict instead"
#: The part, and what the message must say, in this order.
WRONG: list[tuple[Part, list[str]]] = [
    (Memory(), ["memory.term changed self.seen;", KEEP, "(client 0, step 0)"]),
    (part_with(weigh=set_attribute), ["ridge.weigh changed self.last;", KEEP]),
    (part_with(weigh=set_class_attribute), ["ridge.weigh changed Ridge.rounds;", KEEP]),
    (part_with(weigh=fill_module, net=nn.Linear(1, 1)), ["ridge.weigh changed Ridge.net;", KEEP]),
    (part_with(correct=halve), ["ridge.correct changed its argument grads['", NEW]),
    (part_with(correct=replace_entries), ["ridge.correct changed its argument grads['", NEW]),
    (part_with(trainable=drop_entry), ["ridge.trainable changed its argument params", NEW]),
    (
        part_with(client_init=lambda self, spec: {"c": torch.zeros(2)}, reply=write_client),
        ["ridge.reply changed its argument v.client['c'] in place", NEW, "(client 0)"],
    ),
    (
        part_with(prepare=write_anchor),
        ["ridge.prepare changed its argument v.anchor.params['head.bias'] in place", NEW],
    ),
    (part_with(term=noisy(lambda: torch.rand(()))), ["ridge.term draws", "numbers of torch", RNG]),
    (part_with(term=noisy(np.random.rand)), ["ridge.term draws", "numbers of numpy", RNG]),
    (part_with(term=noisy(random.random)), ["ridge.term draws", "numbers of Python", RNG]),
    (part_with(logits=dropped), ["ridge.logits draws", "numbers of torch", RNG]),
    (
        part_with(term=noisy(lambda: torch.rand((), generator=GENERATOR))),
        ["ridge.term returned something else when it was called again with the same arguments"],
    ),
    (part_with(term=noisy(lambda: next(COUNTER))), ["ridge.term returned something else"]),
    (
        part_with(survey=lambda self, v: Sum(torch.rand(2)), absorb=lambda self, r, w: (w, {})),
        ["ridge.survey draws", "numbers of torch", RNG, "(client 0)"],
    ),
    (
        part_with(personal=lambda self, v, w: tree.map(lambda x: x + torch.rand(()), w)),
        ["ridge.personal draws", "numbers of torch", RNG],
    ),
    (
        part_with(server_step=lambda self, r, w: (w, torch.rand(2))),
        ["ridge.server_step draws", "numbers of torch", "kedge.core.rng.normal(r.key, shape)"],
    ),
    (
        part_with(combine=lambda self, r: tree.map(lambda d: d.mul_(2), r.mean_delta)),
        ["ridge.combine changed its argument r.mean_delta['", NEW],
    ),
    (
        part_with(
            survey=lambda self, v: Sum(v.info.weight),
            absorb=lambda self, r, w: (tree.map(lambda x: x.mul_(1), w), {}),
        ),
        ["ridge.absorb changed its argument", NEW],
    ),
    (
        part_with(server_init=lambda self, spec: torch.randn(2)),
        ["ridge.server_init draws", "numbers of torch", "kedge.core.rng.normal(spec.key, shape)"],
    ),
    (
        part_with(client_init=lambda self, spec: torch.randn(2)),
        ["ridge.client_init draws", "numbers of torch", "kedge.core.rng.normal(spec.key, shape)"],
    ),
    (
        part_with(extend=lambda self, spec: {"u": torch.randn(2)}),
        ["ridge.extend draws", "numbers of torch", "kedge.core.rng.normal(spec.key, shape)"],
    ),
    (
        part_with(phase=lambda self, round: str(random.random())),
        ["ridge.phase", "draws from the global random numbers of Python"],
    ),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("part", "texts"), WRONG)
def test_what_hooks_must_not_do_is_found(part: Part, texts: list[str], engine: str) -> None:
    with pytest.raises(HookError) as caught:
        images().simulate(part, engine).run_round()
    message = str(caught.value)
    places = [message.find(text) for text in texts]
    assert places == sorted(places), message
    assert places[0] == 0, message
    assert -1 not in places, message


def test_a_round_that_was_refused_is_refused_again() -> None:
    sim = images().simulate(part_with(term=noisy(random.random)), "vector")
    before = {name: x.clone() for name, x in sim.state().items()}
    for _ in range(2):
        with pytest.raises(HookError, match=r"ridge\.term draws"):
            sim.run_round()
    assert tree.equal(sim.state(), before)


def test_a_part_beside_kedges_own_is_named() -> None:
    method = parse("scaffold+fedprox") + part_with(correct=halve)
    with pytest.raises(HookError, match=r"^ridge\.correct changed its argument grads"):
        images().simulate(method, "vector").run_round()


def test_a_fleet_is_checked_before_its_lanes_train() -> None:
    problem, part = images(), part_with(correct=halve)
    sims = [problem.simulate(part, "vector", seed=seed) for seed in range(2)]
    with pytest.raises(HookError, match=r"^ridge\.correct changed its argument grads"):
        Fleet(sims).run_round()


class Late(Part):
    """Breaks a rule in its second phase only."""

    name = "late"

    def phase(self, round: int) -> str:
        return "warm" if round < 2 else "main"

    def term(self, v: Any, params: Any, batch: Any, out: Any) -> Tensor:
        return (0.0 if v.phase == "warm" else random.random()) * out.logits.sum()


def test_every_phase_is_checked() -> None:
    sim = images().simulate(Late(), "vector")
    for _ in range(2):
        sim.run_round()
    with pytest.raises(HookError, match=r"^late\.term draws"):
        sim.run_round()


@dataclass(frozen=True)
class Right(Part):
    """Pulls to zero with a part of its own in every hook that the check runs."""

    mu: float = 0.1
    name = "right"

    def term(self, v: Any, params: Any, batch: Any, out: Any) -> Tensor:
        return self.mu * tree.sq_norm(params)


def spied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The clients that are checked from now on."""
    seen: list[int] = []

    def check(bound: Any, job: Any, index: Tensor, who: int) -> None:
        seen.append(who)
        check_client(bound, job, index, who)

    monkeypatch.setattr("kedge.sim.clients.check_client", check)
    return seen


def test_it_runs_once_a_run_and_for_other_peoples_parts_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = spied(monkeypatch)
    sim = images().simulate(Right())
    for _ in range(3):
        sim.run_round([1, 2])
    assert seen == [1]
    images().simulate("scaffold+fedprox").run_round()
    assert seen == [1]
    with disabled():
        images().simulate(Right()).run_round()
    assert seen == [1]


def test_seeds_of_a_fleet_share_a_check_and_settings_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, problem = spied(monkeypatch), images()

    def sim(mu: float, seed: int) -> Simulation:
        return problem.simulate(Right(mu), "vector", seed=seed)

    fleet = Fleet([sim(0.1, 0), sim(0.1, 1), sim(0.2, 0)])
    for _ in range(2):
        fleet.run_round()
    assert len(seen) == 2


def test_a_phase_for_every_round_ends_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = spied(monkeypatch)
    sim = images().simulate(part_with(phase=lambda self, round: str(round)))
    for _ in range(MAX_PHASES + 2):
        sim.run_round()
    assert len(seen) == MAX_PHASES


@pytest.mark.parametrize("engine", ENGINES)
def test_the_check_changes_no_result(engine: str) -> None:
    problem = images(norm="bn")

    def run() -> Simulation:
        sim = problem.simulate(Right(), engine, per_round=2)
        for _ in range(2):
            sim.run_round()
        return sim

    before = torch.get_rng_state(), random.getstate()
    checked = run()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    with disabled():
        plain = run()
    assert tree.equal(checked.state(), plain.state())


def test_global_generators_are_left_alone_where_a_part_drew_from_them() -> None:
    problem = images()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
    for draw in (lambda: torch.rand(()), random.random, np.random.rand):
        with pytest.raises(HookError):
            problem.simulate(part_with(term=noisy(draw))).run_round()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[2]) == before[1:]


def test_a_model_that_is_random_is_not_blamed_on_a_part() -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0.1 * torch.rand((), dtype=x.dtype, generator=GENERATOR)

    problem = images()
    module = nn.Sequential(Noise(), *problem.module)
    part = part_with(term=lambda self, v, params, batch, out: out.logits.mean())
    replace(problem, module=module).simulate(part, "loop").run_round()


def test_kedges_own_parts_are_watched_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    run = images().simulate("fedprox")
    cohort = run.cohort([0])
    job, index = take_jobs(cohort.jobs, 0), cohort.batches[0, 0]
    monkeypatch.setattr("kedge.parts.FedProx.term", noisy(random.random))
    check_client(run.bound, job, index)
    with pytest.raises(HookError, match=r"^fedprox\.term draws .* \(client 0, step 0\)"):
        check_client(run.bound, job, index, every=True)
