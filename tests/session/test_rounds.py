"""A round changes nothing until it is accepted, whatever fails in it and whoever answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kedge.check.problems import Problem, images
from kedge.core import tree
from kedge.core.model import Model
from kedge.core.part import HOOKS, Part, Sum
from kedge.core.update import ZERO, Totals, total_of
from kedge.data.federation import Federation
from kedge.engines import Execution
from kedge.engines.workers import can_start_workers
from kedge.errors import HookError, NotFinite
from kedge.federation.member.silo import Silo, bind
from kedge.session.purity import disabled
from kedge.session.sampler import Fixed
from kedge.session.session import NEVER, Done, Request, Session, drive
from kedge.session.terms import DataSchema, Terms
from kedge.sim.fleet import Fleet
from kedge.sim.simulation import Simulation

ONCE = {"extend", "private", "server_init", "client_init"}  # hooks before the first round
AFTER = {"output", "personal"}  # hooks that no round calls
IN_A_ROUND = [hook for hook in HOOKS if hook not in ONCE | AFTER]


@dataclass(frozen=True)
class Fragile(Part):
    """Has every hook of a round, counts them in its state, and fails once where a file says so."""

    flag: str = ""
    name = "fragile"

    def _at(self, hook: str) -> None:
        try:
            Path(self.flag, hook).unlink()
        except FileNotFoundError:
            return
        raise RuntimeError("this once")

    def cuts(self):
        return ("stage1",)

    def server_init(self, spec):
        return {n: torch.zeros((), dtype=spec.dtype) for n in ("rounds", "surveys", "received")}

    def client_init(self, spec):
        return {"rounds": torch.zeros((), dtype=spec.dtype)}

    def phase(self, round):
        self._at("phase")
        return ""

    def surveys(self):
        return "every"

    def survey(self, v):
        self._at("survey")
        return {"n": Sum(v.info.num_examples)}

    def absorb(self, r, weights):
        self._at("absorb")
        return weights, r.server | {"surveys": r.server["surveys"] + 1}

    def send(self, server):
        self._at("send")
        return {"rounds": server["rounds"]}

    def prepare(self, v):
        self._at("prepare")
        return {"steps": v.sent["rounds"]}

    def transform(self, v, batch):
        self._at("transform")
        return batch._replace(x=batch.x + 0.01 * v.client["rounds"])

    def inject(self, v, batch):
        self._at("inject")
        return "stage1", torch.ones(2, 4, 2, 2, dtype=batch.x.dtype)

    def ascend(self, v, params, batch, out):
        self._at("ascend")
        return {"steps": v.local["steps"] + 1}

    def logits(self, v, batch, logits):
        self._at("logits")
        return 1.1 * logits

    def weigh(self, v, batch):
        self._at("weigh")
        return torch.ones(len(batch.x), dtype=batch.x.dtype)

    def term(self, v, params, batch, out):
        self._at("term")
        return 0.1 * tree.sq_dist(params, v.anchor.params)

    def correct(self, v, params, grads):
        self._at("correct")
        return tree.scale(grads, 0.1)

    def trainable(self, v, params):
        self._at("trainable")
        return {}

    def project(self, v, params):
        self._at("project")
        return params

    def observe(self, v, params, batch, out):
        self._at("observe")
        return {"steps": v.local["steps"] + 1}

    def reply(self, v, weights):
        self._at("reply")
        rounds = v.client["rounds"] + 1
        return {"rounds": rounds}, {"rounds": Sum(rounds), "steps": Sum(v.local["steps"])}

    def contribute(self, v, delta):
        self._at("contribute")
        return {"d": tree.scale(delta, v.info.weight)}

    def release(self, v, update):
        self._at("release")
        return update._replace(delta=tree.scale(update.delta, 0.9)), v.client

    def receive(self, r, totals):
        self._at("receive")
        return totals, r.server | {"received": r.server["received"] + 1}

    def combine(self, r):
        self._at("combine")
        return tree.map(lambda d: d / r.weight, r.sums["d"])

    def server_step(self, r, weights):
        self._at("server_step")
        return weights, r.server | {"rounds": r.server["rounds"] + r.uploads["rounds"]}


# -- those who answer ---------------------------------------------------------------------------


@dataclass
class Driver:
    """A way to run rounds, and all that must not change before a round is accepted."""

    run_round: Callable[[], Any]
    state: Callable[[], dict[str, Any]]


def problem() -> Problem:
    return images(norm="bn", batch=7)


def simulate(part: Part, engine: Any, seed: int = 0, **options: Any) -> Simulation:
    return problem().simulate(part, engine, seed=seed, **{"per_round": 2} | options)


def state_of(sim: Simulation) -> dict[str, Any]:
    """Weights, slots, the clients' rows, the round and the ledger."""
    return tree.map(torch.clone, sim.state()) | {"ledger": torch.tensor(sim.session.ledger)}


def simulation(part: Part, engine: Any) -> Driver:
    sim = simulate(part, engine)
    return Driver(sim.run_round, lambda: state_of(sim))


def fleet(part: Part) -> Driver:
    sims = [simulate(part, "vector", seed) for seed in (0, 1)]
    together = Fleet(sims)

    def state() -> dict[str, Any]:
        assert together.lanes == [4]  # they do train together
        return {str(i): state_of(sim) for i, sim in enumerate(sims)}

    return Driver(together.run_round, state)


class Silos:
    """A session that is driven by hand, with one silo for each client."""

    def __init__(self, part: Part) -> None:
        given = problem()
        fed, model = given.federation, Model(given.module)
        data = DataSchema(fed.input_shape, fed.task.name, fed.task.outputs)
        terms = Terms(
            data, fed.num_clients, sum(fed.sizes), optimizer="sgd(lr=0.05)", batch=7, per_round=2,
            dtype="float64",
        )  # fmt: skip
        self.session: Session = terms.session(bind(terms, model, fed, releases=(part,)))
        self.silos = []
        for k, (start, size) in enumerate(zip(fed.offsets, fed.sizes, strict=True)):
            rows = fed.rows[start : start + size]
            own = [torch.arange(size)]
            alone = Federation(fed.x[rows], fed.y[rows], own, fed.task, dtype=fed.dtype)
            self.silos.append(Silo(terms, Model(given.module), alone, k, releases=(part,)))

    def answer(self, request: Request) -> Totals:
        def updates() -> Iterator[Any]:
            for k in request.clients:
                silo, accepted = self.silos[k], self.session.ledger[k]
                own = silo.request(request.round, request.broadcast, request.part)
                yield k, silo.answer(own, accepted)

        bound = self.session.bound.at(request.round)
        return total_of(bound, updates(), request.round, request.broadcast.weights)

    def run_round(self) -> None:
        self.session.accept(drive(self.session.rounds(), self.answer))

    def state(self) -> dict[str, Any]:
        ledger = self.session.ledger
        states = {str(k): silo.state(ledger[k]) for k, silo in enumerate(self.silos)}
        return tree.map(torch.clone, {"session": self.session.state(), "silos": states})


def silos(part: Part) -> Driver:
    driven = Silos(part)
    return Driver(driven.run_round, driven.state)


DRIVERS: dict[str, Callable[[Part], Driver]] = {
    "loop": lambda part: simulation(part, "loop"),
    "vector": lambda part: simulation(part, "vector"),
    "vector in chunks": lambda part: simulation(part, Execution("vector", chunk=1)),
    "workers": lambda part: simulation(part, Execution("loop", workers=2)),
    "fleet": fleet,
    "silos": silos,
}
if not can_start_workers():
    del DRIVERS["workers"]


# -- what fails ---------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", IN_A_ROUND)
@pytest.mark.parametrize("who", DRIVERS)
def test_a_hook_that_fails_once(who: str, hook: str, tmp_path: Path) -> None:
    """In the second round, when clients have states: all is as before, and the round is run again
    as if nothing had happened."""
    with disabled():  # or it would fail on the check client
        failed, plain = (DRIVERS[who](Fragile(str(tmp_path))) for _ in range(2))
        failed.run_round()
        before = failed.state()
        (tmp_path / hook).touch()
        with pytest.raises(HookError, match=rf"fragile\.{hook} failed: RuntimeError: this once"):
            failed.run_round()
        assert tree.equal(failed.state(), before)
        assert not (tmp_path / hook).exists()
        failed.run_round()
        for _ in range(2):
            plain.run_round()
    assert tree.equal(failed.state(), plain.state())
    assert not tree.equal(failed.state(), before)


@pytest.mark.parametrize("hook", IN_A_ROUND)
def test_a_hook_that_fails_on_the_check_client(hook: str, tmp_path: Path) -> None:
    """Before the first round; the check is run again, too."""
    failed, plain = (simulate(Fragile(str(tmp_path)), "vector") for _ in range(2))
    before = state_of(failed)
    (tmp_path / hook).touch()
    with pytest.raises(HookError, match=rf"fragile\.{hook} failed: RuntimeError: this once"):
        failed.run_round()
    assert tree.equal(state_of(failed), before)
    for run in (failed, plain):
        run.run_round()
    assert tree.equal(state_of(failed), state_of(plain))


@pytest.mark.parametrize("hook", ["absorb", "receive", "combine", "server_step"])
@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_a_survey_is_absorbed_once(engine: str, hook: str, tmp_path: Path) -> None:
    """A round that failed after its survey does not leave the survey behind."""
    sim = simulate(Fragile(str(tmp_path)), engine)
    with disabled():
        for _ in range(2):
            (tmp_path / hook).touch()
            with pytest.raises(HookError):
                sim.run_round()
        sim.run_round()
    slot = sim.server.slots["fragile"]
    assert {name: float(x) for name, x in slot.items()} == {
        "rounds": 2, "surveys": 1, "received": 2,
    }  # fmt: skip


def test_a_fleet_in_groups_catches_up(tmp_path: Path) -> None:
    """Of simulations that train one after the other, those before the failure have their round."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    sims, alone = (
        [simulate(Fragile(str(folder)), "loop", seed) for seed, folder in enumerate(folders)]
        for _ in range(2)
    )
    together = Fleet(sims)
    with disabled():
        together.run_round()
        before = state_of(sims[1])
        (folders[1] / "server_step").touch()
        with pytest.raises(HookError, match="this once"):
            together.run_round()
        assert [sim.round for sim in sims] == [2, 1]
        assert tree.equal(state_of(sims[1]), before)
        assert [one is None for one in together.run_round()] == [True, False]
        for sim, other in zip(sims, alone, strict=True):
            for _ in range(2):
                other.run_round()
            assert tree.equal(state_of(sim), state_of(other))


@pytest.mark.parametrize("who", DRIVERS)
def test_an_interrupt_is_a_failure(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C on the server, while the state after the round is computed."""
    interrupted, plain = (DRIVERS[who](Fragile()) for _ in range(2))
    interrupted.run_round()
    before = interrupted.state()

    def moved(delta: Tensor, value: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("kedge.core.server.moved", moved)
        with pytest.raises(KeyboardInterrupt):
            interrupted.run_round()
    assert tree.equal(interrupted.state(), before)
    interrupted.run_round()
    for _ in range(2):
        plain.run_round()
    assert tree.equal(interrupted.state(), plain.state())


def test_weights_that_are_not_finite_are_not_accepted() -> None:
    class Explodes(Part):
        def server_step(self, r, weights):
            return tree.map(lambda w: w / (1 - r.round), weights), {}

    sim = images().simulate(Explodes())
    sim.run_round(check="state")
    before = state_of(sim)
    with pytest.raises(NotFinite, match="the global weights are not finite after round 2"):
        sim.run_round(check="state")
    assert tree.equal(state_of(sim), before)
    sim.run_round(check="losses")
    assert sim.round == 2


def test_surveys_after_the_last_round_that_fail(tmp_path: Path) -> None:
    class Last(Fragile):
        name = "fragile"

        def surveys(self):
            return "last"

    failed, plain = (simulate(Last(str(tmp_path)), "vector") for _ in range(2))
    for run in (failed, plain):
        run.run_round()
    before = state_of(failed)
    for hook in ("survey", "absorb", "receive"):
        (tmp_path / hook).touch()
        with disabled(), pytest.raises(HookError):
            failed.finish()
        assert tree.equal(state_of(failed), before)
    for run in (failed, plain):
        run.finish()
        assert float(run.server.slots["fragile"]["surveys"]) == 1
        assert (run.round, run.session.ledger) == (1, plain.session.ledger)
        rows = run.store.rows["fragile"]["rounds"]
        assert torch.equal(rows, before["clients|fragile|rounds"])
    assert tree.equal(state_of(failed), state_of(plain))


# -- what is dropped ----------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [1, 2])
@pytest.mark.parametrize("who", ["loop", "silos"])
def test_a_round_that_is_dropped(who: str, requests: int) -> None:
    """At its survey or at its training, by whoever asks."""

    def made() -> tuple[Session, Callable[[Request], Totals], Driver]:
        if who == "silos":
            driven = Silos(Fragile())
            return driven.session, driven.answer, Driver(driven.run_round, driven.state)
        sim = simulate(Fragile(), who)
        return sim.session, sim.clients.answer, Driver(sim.run_round, lambda: state_of(sim))

    (session, answer, dropped), (_, _, plain) = made(), made()
    dropped.run_round()
    before = dropped.state()
    for _ in range(2):  # it may be dropped as often as one likes
        rounds = session.rounds()
        request = next(rounds)
        for _ in range(requests - 1):
            request = rounds.send(answer(request))
        assert request.part == ("fragile" if requests == 1 else "")
        answer(request)
        rounds.close()
        assert tree.equal(dropped.state(), before)
    dropped.run_round()
    for _ in range(2):
        plain.run_round()
    assert tree.equal(dropped.state(), plain.state())


def test_a_round_that_is_not_accepted_can_be_run_again() -> None:
    sim = simulate(Fragile(), "vector")
    before = state_of(sim)
    first, second = (drive(sim.session.rounds(), sim.clients.answer) for _ in range(2))
    assert tree.equal(state_of(sim), before)
    assert tree.equal(first.server, second.server)
    assert first.totals.clients == second.totals.clients
    assert (first.up_bytes, first.down_bytes) == (second.up_bytes, second.down_bytes)
    sim.accept(second)
    once = simulate(Fragile(), "vector")
    done = once.run_round()
    assert tree.equal(state_of(sim), state_of(once))
    assert tree.equal(done.server, first.server)


def test_requests_and_bytes_of_a_round() -> None:
    """The survey and the training are requests of one round, and both count."""
    sim = simulate(Fragile(), "loop")
    asked: list[Request] = []

    def answer(request: Request) -> Totals:
        asked.append(request)
        return sim.clients.answer(request)

    done = drive(sim.session.rounds(), answer)
    cohort = sim.session.draw_clients(0)
    assert [request[:3] for request in asked] == [(0, cohort, "fragile"), (0, cohort, "")]
    size = tree.nbytes(asked[0].broadcast)
    assert size == tree.nbytes(sim.weights) + 8  # and what the part sends
    assert done.down_bytes == 2 * 2 * size
    # the survey's number; the update, its contribution and two uploads
    update = tree.nbytes(done.totals.summed.delta)
    assert done.up_bytes == 2 * (8 + update + tree.nbytes(sim.weights.params) + 2 * 8)
    assert done.round == 1
    assert sim.session.ledger == [NEVER] * 3
    sim.accept(done)
    assert sim.session.ledger == [0 if k in cohort else NEVER for k in range(3)]


# -- an empty cohort ----------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_a_round_without_clients(engine: str) -> None:
    """Nothing but the round's number changes: no survey, no server step."""
    sampler = Fixed(((0, 2), (), (1,)))
    sim = simulate(Fragile(), engine, sampler=sampler, per_round=None)
    sim.run_round()
    before = state_of(sim)
    done = sim.run_round(check="state")
    assert done == Done(sim.server, 2, ZERO, 0, 0)
    assert done.losses == {}
    after = state_of(sim)
    assert (int(before.pop("round")), int(after.pop("round"))) == (1, 2)
    assert tree.equal(before, after)
    assert list(sim.run_round().totals.clients) == [1]
    assert sim.session.ledger == [0, 2, 0]


def test_a_fleet_in_which_some_or_all_have_no_clients() -> None:
    def make() -> list[Simulation]:
        samplers = [Fixed(((0, 2), (), (1,), ())), Fixed(((0, 1), (2,), (0, 1), ()))]
        sims = [simulate(Fragile(), "vector", sampler=one, per_round=None) for one in samplers]
        for sim in sims:
            sim.clients.draws_ahead = True
        return sims

    together, alone = make(), make()
    fleet = Fleet(together)
    for t in range(4):
        done = fleet.run_round()
        for sim, other, one in zip(together, alone, done, strict=True):
            expected = other.run_round()
            assert one.totals.clients == expected.totals.clients
            assert (one.up_bytes, one.down_bytes) == (expected.up_bytes, expected.down_bytes)
            assert (sim.round, sim.session.ledger) == (t + 1, other.session.ledger)
            assert tree.gap(sim.state(), other.state()) < 1e-12


def test_states_of_a_failed_round_are_never_accepted(tmp_path: Path) -> None:
    """Not with a later round either, in which nobody trains."""
    failed, plain = (simulate(Fragile(str(tmp_path)), "loop") for _ in range(2))
    (tmp_path / "server_step").touch()
    with disabled(), pytest.raises(HookError):
        failed.run_round()
    for run in (failed, plain):
        run.run_round([])
        run.finish()
    assert tree.equal(state_of(failed), state_of(plain))
