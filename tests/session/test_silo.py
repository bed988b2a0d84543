"""Every part, client by client through silos and the wire: bit for bit the loop engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from kedge.check.problems import Problem, images
from kedge.core import tree
from kedge.core.method import parse
from kedge.core.model import Model
from kedge.core.optim import SGD
from kedge.core.part import Part, parts
from kedge.core.update import Totals, Update, total_of
from kedge.data.federation import Federation
from kedge.engines.layout import layout_of
from kedge.engines.ops import FOREACH
from kedge.errors import KedgeError, WireError
from kedge.federation.member.silo import Silo, bind
from kedge.session import wire
from kedge.session.session import Broadcast, Request, Session, drive
from kedge.session.terms import DataSchema, Terms
from kedge.sim.clients import all_weights
from kedge.sim.simulation import Simulation

SIZES = (5, 9, 14, 6)


def own_data(federation: Federation, client: int) -> Federation:
    """A federation of one client, which knows nothing of the others."""
    start, size = federation.offsets[client], federation.sizes[client]
    rows = federation.rows[start : start + size]
    x, y = federation.x[rows], federation.y[rows]
    held = [torch.arange(0)] if federation.held_out else None
    return Federation(
        x, y, [torch.arange(size)], federation.task, held_out=held, dtype=federation.dtype
    )


def terms_of(problem: Problem, method: str, **changes: object) -> Terms:
    fed, work = problem.federation, problem.work
    data = DataSchema(fed.input_shape, fed.task.name, fed.task.outputs)
    terms = Terms(
        data, fed.num_clients, sum(fed.sizes), method=method, batchnorm=problem.batchnorm,
        optimizer=str(problem.optim), batch=work.batch, steps=work.steps or 0, per_round=3,
        dtype=str(fed.dtype).removeprefix("torch."),
    )  # fmt: skip
    return dataclasses.replace(terms, **changes)  # type: ignore[arg-type]


class Deployment:
    """A session whose clients are silos that see bytes only."""

    def __init__(self, problem: Problem, method: str) -> None:
        self.terms = Terms.from_json(terms_of(problem, method).to_json())
        model, fed = Model(problem.module, batchnorm=problem.batchnorm), problem.federation
        self.session: Session = self.terms.session(bind(self.terms, model, fed))
        self.silos = [
            Silo(self.terms, Model(problem.module, batchnorm=problem.batchnorm), own, k)
            for k, own in enumerate(own_data(fed, k) for k in range(fed.num_clients))
        ]

    def reply(self, request: Request, client: int, down: bytes) -> bytes:
        """What one client sends: it has seen nothing but bytes, and nothing but bytes leave it."""
        silo, accepted = self.silos[client], self.session.ledger[client]
        received = silo.read(wire.unpack(down, "down"))
        asked = silo.request(request.round, received, request.part)
        update = silo.answer(asked, accepted)
        return wire.pack_finite("update", update)

    def messages(self, request: Request) -> dict[int, bytes]:
        down = wire.pack("down", request.broadcast)
        return {k: self.reply(request, k, down) for k in request.clients}

    def answer(self, request: Request, messages: dict[int, bytes] | None = None) -> Totals:
        bound = self.session.bound.at(request.round)
        anchor = all_weights(bound, request.broadcast.weights)
        received = Broadcast(anchor, request.broadcast.sent)
        template = wire.update_template(bound, received, self.terms.batch, request.part)

        def opened() -> Iterator[tuple[int, Update]]:
            for k, message in (messages or self.messages(request)).items():
                update = wire.unpack(message, "update", template)
                yield k, layout_of(bound.model).place(update)

        return total_of(bound, opened(), request.round, anchor, FOREACH)

    def run_round(self) -> None:
        self.session.accept(drive(self.session.rounds(), self.answer))


def tiny(name: str) -> str:
    if name == "fedavg":
        return name
    cls: type[Part] = parts[name]
    return repr(parse(dataclasses.replace(cls(), **cls.tiny)))


def both(problem: Problem, method: str, rounds: int = 3) -> tuple[Simulation, Deployment]:
    run = problem.simulate(method, "loop", per_round=3)
    remote = Deployment(problem, method)
    for _ in range(rounds):
        run.run_round()
        remote.run_round()
    return run, remote


def assert_same(run: Simulation, remote: Deployment) -> None:
    assert tree.equal(remote.session.server.weights, run.server.weights)
    assert tree.equal(remote.session.server.slots, run.server.slots)
    for k, silo in enumerate(remote.silos):
        state = silo.state(remote.session.ledger[k])
        assert tree.equal(tree.to_wire(state), tree.to_wire(tree.take(run.store.rows, k)))


@pytest.mark.parametrize("name", ["fedavg", *parts])
def test_every_part_is_the_loop_engine_bit_for_bit(name: str) -> None:
    cls = parts[name] if name != "fedavg" else Part
    problem = images(norm="bn", task=cls.tasks[0], sizes=SIZES)
    assert_same(*both(problem, tiny(name)))


@pytest.mark.parametrize(
    "method",
    ["scaffold+fedprox(mu=0.1)", "fedper+scaffold", "fedtr+fedbn", "fedbr(samples=3, width=5)"],
)
@pytest.mark.parametrize("policy", ["average", "local"])
def test_sums_of_parts_and_policies(method: str, policy: str) -> None:
    problem = images(norm="bn", sizes=SIZES, batchnorm=policy, optim=SGD(lr=0.05, momentum=0.5))
    if "scaffold" in method:
        with pytest.warns(UserWarning, match="assumes plain SGD"):
            assert_same(*both(problem, method))
    else:
        assert_same(*both(problem, method))


def test_a_network_in_channels_last() -> None:
    """In float32 without norms the loop computes in another memory format."""
    base = images(sizes=SIZES)
    fed = base.federation
    rows = list(torch.split(fed.rows, list(SIZES)))
    single = Federation(fed.x.float(), fed.y, rows, fed.task, dtype=torch.float32)
    problem = dataclasses.replace(base, federation=single, module=base.module.float())
    run, remote = both(problem, "scaffold+fedexp")
    assert run.bound.model.layout.channels_last  # type: ignore[attr-defined]
    assert_same(run, remote)


def test_a_client_goes_on_from_the_accepted_round() -> None:
    """What it tried since leaves no trace: a reply that was lost is computed again."""
    problem = images(norm="bn", sizes=SIZES)
    run, remote = both(problem, "scaffold", rounds=2)
    rounds = remote.session.rounds()
    request = next(rounds)
    lost = remote.messages(request)  # never arrive
    again = remote.messages(request)
    assert lost == again
    with pytest.raises(StopIteration) as done:
        rounds.send(remote.answer(request, again))
    remote.session.accept(done.value.value)
    run.run_round()
    assert_same(run, remote)


def test_a_silo_that_lost_its_state_says_so() -> None:
    problem = images(sizes=SIZES)
    _, remote = both(problem, "scaffold", rounds=1)
    k = next(k for k, r in enumerate(remote.session.ledger) if r >= 0)
    remote.silos[k].states.clear()
    request = remote.session.request("", [k])
    with pytest.raises(KedgeError, match=f"client {k} has no state of round 0"):
        remote.messages(request)


def test_a_session_goes_on_from_its_saved_state() -> None:
    problem = images(norm="bn", sizes=SIZES)
    run, remote = both(problem, "scaffold+fedavgm", rounds=2)
    saved = {name: x.clone() for name, x in remote.session.state().items()}
    fresh = Deployment(problem, "scaffold+fedavgm")
    fresh.session.load_state(saved)
    for old, new in zip(remote.silos, fresh.silos, strict=True):
        new.states = dict(old.states)
    fresh.run_round()
    run.run_round()
    assert_same(run, fresh)


def test_weights_of_another_model_are_refused() -> None:
    problem = images(sizes=SIZES)
    other = images(norm="bn", sizes=SIZES)
    remote, strange = Deployment(problem, "fedavg"), Deployment(other, "fedavg")
    with pytest.raises(WireError, match="not those of this model"):
        remote.messages(strange.session.request("", [0]))
