"""The laws that every part obeys, whatever its paper says.

========== =====================================================================================
pure        the same input gives the same output, bit for bit, and no input is changed
engines     every engine gives the model of the reference
neutral     the setting that a part declares as neutral gives FedAvg back, bit for bit
resumable   stop, save, load, go on equals going straight on, bit for bit
wire        all that travels or is kept survives safetensors
frugal      as many numbers are sent, uploaded and kept as the part declares
ragged      a client's result does not depend on who else trains beside it
permutation the order of the clients changes nothing
additive    corrections of the gradient add up, in any order
stable      on two quadratics, where FedAvg converges, the method stays bounded
========== =====================================================================================

They are checked on small problems in float64, on both engines, with BatchNorm and GroupNorm, for
every task the part is for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from safetensors.torch import load, save

from kedge.check.problems import Problem, images, position, quadratics
from kedge.core import client, server, tree
from kedge.core.method import Method
from kedge.core.part import Part, Stack
from kedge.core.server import Totals, uploads_of
from kedge.core.tree import Params, Tree
from kedge.core.view import View
from kedge.core.work import take_jobs
from kedge.engines import engines
from kedge.engines.cohort import take_rows
from kedge.errors import KedgeError
from kedge.session.check_client import check_client
from kedge.sim.simulation import Simulation

TOLERANCE = 1e-11  # of float64 results that differ in the order of summation only
REFERENCE = "reference"  # the engine that all others must agree with


def tested_engines() -> list[str]:
    """All engines but the reference."""
    return [name for name in engines if name != REFERENCE]


class Broken(Exception):
    """A law does not hold; the message says how."""


@dataclass(frozen=True)
class _Probe(Part):
    """A correction that depends on the gradient, to see whether another one leaves it alone."""

    name = "probe"

    def correct(self, v: View, params: Params, grads: Params) -> Params:
        return tree.map(lambda g: -0.3 * g * g.abs(), grads)


def pure(part: Part) -> None:
    run = images(norm="bn", task=part.tasks[0]).simulate(part)
    _surveyed(run)
    cohort = run.cohort([0])
    job, index = take_jobs(cohort.jobs, 0), cohort.batches[0, 0]
    check_client(run.bound.at(run.round), job, index, every=True)
    before = repr(vars(part)), _class_state(part)
    for engine in tested_engines():
        first = _run(images(norm="bn", task=part.tasks[0]), part, engine)
        again = _run(images(norm="bn", task=part.tasks[0]), part, engine)
        _same_bits(first, again, f"two equal runs on the {engine} engine")
    if (repr(vars(part)), _class_state(part)) != before:
        raise Broken("the part changed its own attributes; state belongs into a slot")
    run = images(norm="bn", task=part.tasks[0]).simulate(part)
    cohort = run.cohort([0, 1, 2])
    _surveyed(run)
    for i in range(3):
        job = take_jobs(run.cohort([0, 1, 2]).jobs, i)
        held = [*tree.leaves(job), *tree.leaves(run.server)]
        versions = [x._version for x in held]
        carry = client.begin(run.bound.at(run.round), job)
        for t in range(2):
            old = [(x, x._version) for x in tree.leaves(carry)]
            carry = client.step(run.bound.at(run.round), job, carry, cohort.batches[i, 0])
            if any(x._version != n for x, n in old):
                raise Broken(f"step {t} changed what the step before had returned, in place")
        client.end(run.bound.at(run.round), job, carry)
        if [x._version for x in held] != versions:
            raise Broken("a hook changed one of its inputs in place")


def engines_agree(part: Part) -> None:
    problems = {f"{t}, {n}": images(task=t, norm=n) for t in part.tasks for n in ("bn", "gn")}
    local = images(task=part.tasks[0], norm="bn", batchnorm="local", dropout=0.3)
    for name, problem in {**problems, "local statistics, dropout": local}.items():
        reference = _run(problem, part, REFERENCE)
        for engine in tested_engines():
            _close(_run(problem, part, engine), reference, f"{engine} and {REFERENCE} ({name})")


def neutral(part: Part) -> None:
    if part.neutral is None:
        return
    quiet = dataclasses.replace(part, **part.neutral)
    for norm, policy in (("none", "average"), ("gn", "average"), ("bn", "frozen")):
        for engine in tested_engines():
            problem = images(task=part.tasks[0], norm=norm, batchnorm=policy)
            plain, own = _run(problem, "fedavg", engine), _run(problem, quiet, engine)
            shared = tree.map(lambda _, x: x, plain.weights, own.weights)
            gap = tree.gap(plain.weights, shared)
            # more rows in a pass choose other kernels, which round differently
            near = part.has("inject") and gap <= TOLERANCE
            if not near and not tree.equal(plain.weights, shared):
                raise Broken(f"{quiet} differs from fedavg by {gap:.1e} ({engine}, {norm})")


def resumable(part: Part) -> None:
    problem = images(norm="bn", task=part.tasks[0])
    for engine in tested_engines():
        straight = _run(problem, part, engine, rounds_=3)
        stopped = _run(problem, part, engine, rounds_=1)
        resumed = problem.simulate(part, engine, per_round=2)
        resumed.load_state(load(save({k: v.contiguous() for k, v in stopped.state().items()})))
        for _ in range(2):
            resumed.run_round()
        _same_bits(straight, resumed, f"a resumed run and a straight one ({engine})")


def wire(part: Part) -> None:
    run = images(norm="bn", task=part.tasks[0]).simulate(part)
    _surveyed(run)
    run.run_round()
    cohort = run.cohort([0, 1])
    reply = _reply(run, 0)
    travelling: dict[str, Any] = {
        "sent": cohort.jobs.sent,
        "client": reply.client,
        "delta": reply.delta,
        "contribution": reply.contribution,
        "uploads": {" ".join(p): u.value for p, u in uploads_of(reply.uploads)},
        "server": run.server.slots,
    }
    for what, value in travelling.items():
        try:
            flat = {k: v.contiguous() for k, v in tree.to_wire(value).items()}
        except TypeError as error:
            raise Broken(f"{what}: {error}") from None
        if not tree.equal(value, tree.from_wire(load(save(flat)), value)):
            raise Broken(f"{what} comes back changed from safetensors")


def frugal(part: Part) -> None:
    run = images(norm="bn", task=part.tasks[0]).simulate(part)
    plain = images(norm="bn", task=part.tasks[0]).simulate("fedavg")
    _surveyed(run)
    run.run_round()
    symbols = run.bound.spec.symbols(part)
    reply, base = _reply(run, 0), _reply(plain, 0)
    weights = run.bound.only_public(run.weights)
    up = sum(tree.numel(u.value) for _, u in uploads_of(reply.uploads))
    measured = {
        "sends": tree.numel(weights)
        - tree.numel(plain.weights)
        + tree.numel(run.bound.sent(run.server)),
        "uploads": up
        + tree.numel(reply.contribution)
        + tree.numel(reply.delta.params)
        - tree.numel(base.delta.params),
        "keeps": tree.numel(run.bound.client()),
    }
    for what, found in measured.items():
        formula = getattr(part, what)
        declared = part.count(formula, symbols)
        if found != declared:
            raise Broken(f"{what} = {formula!r} is {declared} numbers here, but there are {found}")
    if any(isinstance(u, Stack) for _, u in uploads_of(reply.uploads)) and not part.needs_clients:
        raise Broken("an upload is a Stack, which needs needs_clients = True")


def ragged(part: Part) -> None:
    problem = images(norm="bn", task=part.tasks[0], sizes=(6, 21, 11))
    for engine in tested_engines():
        run = problem.simulate(part, engine)
        _surveyed(run)
        run.run_round()
        together = _trained(run, [0, 1, 2])
        alone = [_trained(run, [k]) for k in range(3)]
        states = tree.concat([state for _, state in alone])
        totals = alone[0][0]
        for more, _ in alone[1:]:
            totals = server.add_totals(totals, more)
        gap = max(tree.gap(together[1], states), tree.gap(_sums(together[0]), _sums(totals)))
        if not gap <= TOLERANCE:
            raise Broken(f"a client differs by {gap:.1e} when others train beside it ({engine})")


def permutation(part: Part) -> None:
    problem = images(norm="bn", task=part.tasks[0])
    for engine in tested_engines():
        runs = []
        for order in ([0, 1, 2], [2, 0, 1]):
            run = problem.simulate(part, engine)
            _surveyed(run)
            for _ in range(2):
                run.run_round(order)
            runs.append(run)
        _close(runs[0], runs[1], f"two orders of the clients ({engine})")


def additive(part: Part) -> None:
    if not part.has("correct"):
        return
    problem = images(task=part.tasks[0])
    one = _run(problem, Method((part, _Probe())), "loop")
    other = _run(problem, Method((_Probe(), part)), "loop")
    _close(one, other, "a correction before and after another one; it must leave grads alone and")


def stable(part: Part) -> None:
    if "regression" not in part.tasks:
        return
    run = quadratics().simulate(part)
    for round in range(60):
        try:
            run.run_round()
        except KedgeError as error:
            raise Broken(f"round {round} on two quadratics: {error}") from None
    if not abs(position(run)) < 10:
        raise Broken(
            f"on two quadratics w is {position(run):.3g} after 60 rounds, where FedAvg has 0.713 "
            "and the optimum is 0.909: a sign is likely to be wrong"
        )


LAWS: dict[str, Callable[[Part], None]] = {
    "pure": pure,
    "engines": engines_agree,
    "neutral": neutral,
    "resumable": resumable,
    "wire": wire,
    "frugal": frugal,
    "ragged": ragged,
    "permutation": permutation,
    "additive": additive,
    "stable": stable,
}


def skipped(part: Part) -> Iterator[tuple[str, str]]:
    """Laws that say nothing about a part, and why."""
    if part.neutral is None:
        yield "neutral", "declares no neutral setting"
    if not part.has("correct"):
        yield "additive", "does not correct the gradient"
    if "regression" not in part.tasks:
        yield "stable", "is not for regression"


def _run(problem: Problem, method: Any, engine: str, rounds_: int = 2) -> Simulation:
    run = problem.simulate(method, engine, per_round=2)
    for _ in range(rounds_):
        run.run_round()
    return run


def _surveyed(run: Simulation) -> None:
    for part in run.bound.parts_with("survey"):
        run.survey(part, None)


def _reply(run: Simulation, k: int) -> client.Reply:
    cohort = run.cohort([k])
    job = take_jobs(cohort.jobs, 0)
    carry = client.begin(run.bound.at(run.round), job)
    carry = client.step(run.bound.at(run.round), job, carry, cohort.batches[0, 0])
    return client.end(run.bound.at(run.round), job, carry)


def _trained(run: Simulation, clients: list[int]) -> tuple[Totals, Tree]:
    """Totals of some clients, and their next state in the same order."""
    _, done = run.train(clients)
    order = [place for places, _ in done.next_states for place in places]
    states = tree.concat([state for _, state in done.next_states])
    return done.totals, take_rows(states, sorted(range(len(order)), key=order.__getitem__))


def _sums(totals: Totals) -> dict[str, Any]:
    """What of totals is a tree of tensors."""
    names = totals.keys() - {"count", "up_bytes", "uploads"}
    uploads = {" ".join(path): upload.value for path, upload in totals["uploads"].items()}
    return {name: totals[name] for name in names} | {"uploads": uploads}


def _same_bits(a: Simulation, b: Simulation, what: str) -> None:
    if not tree.equal(a.state(), b.state()):
        raise Broken(
            f"{what} differ by {tree.gap(a.state(), b.state()):.1e}; they must be bit-identical"
        )


def _close(a: Simulation, b: Simulation, what: str) -> None:
    gap = tree.gap(a.state(), b.state())
    if not gap <= TOLERANCE:
        raise Broken(f"{what} differ by {gap:.1e}, more than {TOLERANCE:g}")


def _class_state(part: Part) -> str:
    return repr({k: v for k, v in vars(type(part)).items() if not callable(v)})
