"""Laws that every part must obey, independent of its paper.

=========== ====================================================================================
pure        equal inputs give equal outputs, bit for bit, and no input is modified in place
engines     every engine computes the same model as the reference engine
neutral     the declared neutral setting equals FedAvg, bit for bit
resumable   a run resumed from a saved state equals an uninterrupted run, bit for bit
wire        all messages and states survive a round trip through safetensors
frugal      messages and client state have the declared sizes
ragged      a client's result does not depend on the other clients in its chunk
permutation the result does not depend on the order of the clients
additive    gradient corrections add up, in any order
objective   the fixed point minimises the run's objective, if the part claims that (``solves``)
stable      on two quadratics the method settles between the clients' optima, and no farther from
            the optimum of their mean than FedAvg does
=========== ====================================================================================

Laws are checked on small problems in float64, on all engines, with BatchNorm and GroupNorm, and for
every task that the part supports. A law is a function that raises :class:`LawViolation`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from safetensors.torch import load, save

from kedge.check.objective import fixed_points
from kedge.check.problems import (
    LocalSteps,
    Problem,
    fedavg_point,
    images,
    minimum,
    position,
    quadratics,
)
from kedge.core import client, tree
from kedge.core.method import Method
from kedge.core.part import Part, Stack
from kedge.core.tree import Params, Tree, Weights
from kedge.core.update import Totals, add, uploads_of
from kedge.core.view import View
from kedge.core.work import WEIGHTINGS, take_jobs
from kedge.engines import engines
from kedge.engines.cohort import take_rows
from kedge.errors import KedgeError
from kedge.session.purity import check_client
from kedge.sim.simulation import Simulation

REFERENCE = "reference"  # the engine that all others must agree with
TOLERANCE = 1e-11  # largest difference in float64 due to the order of summation
# the two quadratics of the law *stable*
CURVATURES, OPTIMA, LR, STEPS = (1.0, 10.0), (0.0, 1.0), 0.08, 5
ROUNDS, LAST = 120, 30  # a method settles at its mean position of the last rounds
SLACK = 1e-4  # in w: what is left of the first rounds


class LawViolation(Exception):
    """A law does not hold; the message gives the reason."""


def tested_engines() -> list[str]:
    """Names of all engines except the reference."""
    return [name for name in engines if name != REFERENCE]


@dataclass(frozen=True)
class _Probe(Part):
    """A nonlinear gradient correction, to detect parts that modify ``grads`` for later parts."""

    name = "probe"

    def correct(self, v: View, params: Params, grads: Params) -> Params:
        return tree.map(lambda g: -0.3 * g * g.abs(), grads)


def pure(part: Part) -> None:
    """Equal inputs give equal outputs, and hooks modify neither inputs nor the part."""
    problem = images(norm="bn", task=part.tasks[0])
    run = _surveyed(problem, part)
    cohort = run.cohort([0])
    check_client(
        run.bound.at(run.round), take_jobs(cohort.jobs, 0), cohort.batches[0, 0], every=True
    )
    before = repr(vars(part)), _class_state(part)
    for engine in tested_engines():
        first, again = (_run(images(norm="bn", task=part.tasks[0]), part, engine) for _ in range(2))
        _check_identical(first, again, f"two equal runs on the {engine} engine")
    if (repr(vars(part)), _class_state(part)) != before:
        raise LawViolation(
            "the part changed its own attributes; return state from client_init, prepare or "
            "server_init instead"
        )
    run = _surveyed(problem, part)
    cohort = run.cohort([0, 1, 2])
    for i in range(3):
        job = take_jobs(cohort.jobs, i)
        inputs = [*tree.leaves(job), *tree.leaves(run.server)]
        versions = [x._version for x in inputs]
        carry = client.begin(run.bound.at(run.round), job)
        for t in range(2):
            previous = [(x, x._version) for x in tree.leaves(carry)]
            carry = client.step(run.bound.at(run.round), job, carry, cohort.batches[i, 0])
            if any(x._version != version for x, version in previous):
                raise LawViolation(f"step {t} modified the previous step's result in place")
        client.end(run.bound.at(run.round), job, carry)
        _ = run.output
        if [x._version for x in inputs] != versions:
            raise LawViolation("a hook modified one of its inputs in place")


def engines_agree(part: Part) -> None:
    """Every engine computes the reference model on every task, with BatchNorm and GroupNorm."""
    problems = {f"{t}, {n}": images(task=t, norm=n) for t in part.tasks for n in ("bn", "gn")}
    local = images(task=part.tasks[0], norm="bn", batchnorm="local", dropout=0.3)
    for name, problem in {**problems, "local statistics, dropout": local}.items():
        reference = _run(problem, part, REFERENCE)
        for engine in tested_engines():
            run = _run(problem, part, engine)
            _check_close(run, reference, f"the engines {engine} and {REFERENCE} ({name})")


def neutral(part: Part) -> None:
    """The part with its neutral setting equals FedAvg."""
    if part.neutral is None:
        return
    quiet = dataclasses.replace(part, **part.neutral)
    for norm, policy in (("none", "average"), ("gn", "average"), ("bn", "frozen")):
        for engine in tested_engines():
            problem = images(task=part.tasks[0], norm=norm, batchnorm=policy)
            plain, own = _fedavg(part.tasks[0], norm, policy, engine), _run(problem, quiet, engine)
            shared = tree.map(lambda _, x: x, plain, own.weights)
            gap = tree.gap(plain, shared)
            # injected rows change the batch size, and with it kernels and their rounding
            close = part.has("inject") and gap <= TOLERANCE
            if not close and not tree.equal(plain, shared):
                raise LawViolation(f"{quiet} differs from fedavg by {gap:.1e} ({engine}, {norm})")
            evaluated = tree.map(lambda _, x: x, plain, own.output)
            if part.has("output") and not tree.equal(plain, evaluated):
                raise LawViolation(
                    f"{quiet} trains as fedavg, but its output differs by "
                    f"{tree.gap(plain, evaluated):.1e} ({engine}, {norm})"
                )


@cache
def _fedavg(task: str, norm: str, batchnorm: str, engine: str) -> Weights:
    """The weights of FedAvg after two rounds."""
    return _run(images(task=task, norm=norm, batchnorm=batchnorm), "fedavg", engine).weights


def resumable(part: Part) -> None:
    """A run resumed from a saved state equals an uninterrupted run."""
    problem = images(norm="bn", task=part.tasks[0])
    for engine in tested_engines():
        uninterrupted = _run(problem, part, engine, rounds=3)
        stopped = _run(problem, part, engine, rounds=1)
        resumed = problem.simulate(part, engine, per_round=2)
        resumed.load_state(_sent(stopped.state()))
        for _ in range(2):
            resumed.run_round()
        what = f"a resumed run and an uninterrupted run ({engine})"
        _check_identical(uninterrupted, resumed, what)


def wire(part: Part) -> None:
    """Messages and states survive a round trip through safetensors."""
    run = _surveyed(images(norm="bn", task=part.tasks[0]), part)
    run.run_round()
    cohort = run.cohort([0, 1])
    update, state = _trained(run, 0)
    messages: dict[str, Any] = {
        "sent": cohort.jobs.sent,
        "client": state,
        "delta": update.delta,
        "contribution": update.contribution,
        "uploads": {" ".join(p): u.value for p, u in uploads_of(update.uploads)},
        "server": run.server.slots,
    }
    for name, value in messages.items():
        try:
            flat = tree.to_wire(value)
        except TypeError as error:
            raise LawViolation(f"{name}: {error}") from None
        if not tree.equal(value, tree.from_wire(_sent(flat), value)):
            raise LawViolation(f"{name} changes in a round trip through safetensors")


def _sent(flat: Params) -> Params:
    """Named tensors after a round trip through safetensors."""
    return load(save({name: x.contiguous() for name, x in flat.items()}))


def frugal(part: Part) -> None:
    """Sent, uploaded and kept numbers match the part's declaration."""
    problem = images(norm="bn", task=part.tasks[0])
    run, plain = _surveyed(problem, part), problem.simulate("fedavg")
    run.run_round()
    part, symbols = run.bound.part(part.name), run.bound.spec.symbols(part)
    update, base = _trained(run, 0).update, _trained(plain, 0).update
    weights = run.bound.only_public(run.weights)
    uploaded = sum(tree.numel(u.value) for _, u in uploads_of(update.uploads))
    measured = {
        "sends": tree.numel(weights)
        - tree.numel(plain.weights)
        + tree.numel(run.bound.sent(run.server)),
        "uploads": uploaded
        + tree.numel(update.contribution)
        + tree.numel(update.delta.params)
        - tree.numel(base.delta.params),
        "keeps": tree.numel(run.bound.client()),
    }
    for field, count in measured.items():
        formula = getattr(part, field)
        declared = part.count(formula, symbols)
        if count != declared:
            raise LawViolation(
                f"{field} = {formula!r} declares {declared} numbers, but there are {count}; "
                + _declaration(field, count, symbols)
            )
    if any(isinstance(u, Stack) for _, u in uploads_of(update.uploads)) and not part.needs_clients:
        raise LawViolation("an upload is a Stack; declare needs_clients = True")


def _declaration(field: str, count: int, symbols: dict[str, int]) -> str:
    """What to declare: the symbol of that size, or the sizes to make a formula of."""
    same = [name for name, size in symbols.items() if size == count]
    if same:
        return f"declare {field} = {same[0]!r}"
    sizes = ", ".join(f"{name} = {size}" for name, size in symbols.items() if size)
    return f"declare {field} as a formula; here {sizes}"


def ragged(part: Part) -> None:
    """A client's result is the same alone and together with clients of other sizes."""
    problem = images(norm="bn", task=part.tasks[0], sizes=(6, 21, 11))
    for engine in tested_engines():
        run = _surveyed(problem, part, engine)
        run.run_round()
        totals, states = _train(run, [0, 1, 2])
        alone = [_train(run, [k]) for k in range(3)]
        alone_states = tree.concat([state for _, state in alone])
        alone_totals = alone[0][0]
        for more, _ in alone[1:]:
            alone_totals = add(alone_totals, more)
        gap = max(
            tree.gap(states, alone_states),
            tree.gap(totals.summed, alone_totals.summed),
            tree.gap(totals.stacked, alone_totals.stacked),
        )
        if not gap <= TOLERANCE:
            raise LawViolation(
                f"a client's result differs by {gap:.1e} when other clients train with it "
                f"({engine})"
            )


def permutation(part: Part) -> None:
    """Two orders of the clients give the same result."""
    problem = images(norm="bn", task=part.tasks[0])
    for engine in tested_engines():
        runs = []
        for order in ([0, 1, 2], [2, 0, 1]):
            run = _surveyed(problem, part, engine)
            for _ in range(2):
                run.run_round(order)
            runs.append(run)
        _check_close(runs[0], runs[1], f"two orders of the clients ({engine})")


def additive(part: Part) -> None:
    """The part's gradient correction commutes with another correction."""
    if not part.has("correct"):
        return
    problem = images(task=part.tasks[0])
    before = _run(problem, Method((part, _Probe())), "loop")
    after = _run(problem, Method((_Probe(), part)), "loop")
    reason = "correct must not modify grads: the part before and after another correction"
    _check_close(before, after, reason)


def objective(part: Part) -> None:
    """The fixed point minimises the objective of the run, under both kinds of client weights."""
    if part.solves is None:
        return
    for weighting in WEIGHTINGS:
        for engine in tested_engines():
            try:
                points = fixed_points(part, engine, weighting)
            except KedgeError as error:
                raise LawViolation(f"with weighting = {weighting}: {error}") from None
            for point in points:
                if not point.holds:
                    raise LawViolation(
                        f"with weighting = {weighting}, {point.what} settles at {point.got:.6f}, "
                        f"not at {point.expected:.6f} ({engine}). Average corrections over all "
                        "clients with v.info.share or r.share_delta"
                    )


def stable(part: Part) -> None:
    """On two quadratics the method settles between the optima, and near enough to the best.

    A mean over clients and steps of any attraction to the clients' optima lies between these. A
    correction, a penalty or a server optimizer with the right sign settles no farther from the
    optimum of the mean than FedAvg, but for what the part declares as ``strays``. A leaf that stays
    on the clients does not move on the server.
    """
    if "regression" not in part.tasks:
        return
    run, path = quadratics(CURVATURES, OPTIMA, LR, STEPS).simulate(part), []
    for round in range(ROUNDS):
        try:
            run.run_round()
        except KedgeError as error:
            raise LawViolation(f"round {round} on two quadratics: {error}") from None
        path.append(position(run))
    settled, best = sum(path[-LAST:]) / LAST, minimum(CURVATURES, OPTIMA)
    fedavg = fedavg_point(CURVATURES, OPTIMA, LR, STEPS)
    if "head.weight" in run.bound.private_params:
        if any(path):
            raise LawViolation(f"a private leaf moves on the server, to {settled:.3g}")
        return
    is_between = min(OPTIMA) <= settled <= max(OPTIMA)
    beyond = abs(settled - best) - abs(fedavg - best)
    if is_between and beyond <= part.strays + SLACK:
        return
    advice = "A sign is likely to be wrong"
    if is_between:
        advice += (
            "; if the objective is another one, declare how much farther it settles: "
            f"strays = {_rounded_up(beyond)}"
        )
    raise LawViolation(
        f"on two quadratics with optima at {OPTIMA[0]:g} and {OPTIMA[1]:g}, w settles at "
        f"{settled:.6g}; FedAvg settles at {fedavg:.6g}, and the optimum of the mean is "
        f"{best:.6g}. {advice}"
    )


def _rounded_up(value: float) -> str:
    """A number of one digit that is at least as large.

    >>> _rounded_up(0.00345), _rounded_up(0.3)
    ('0.004', '0.3')
    """
    unit = 10.0 ** math.floor(math.log10(max(value, SLACK)))
    return f"{unit * math.ceil(round(value / unit, 6)):.1g}"


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
    "objective": objective,
    "stable": stable,
}


def skipped(part: Part) -> Iterator[tuple[str, str]]:
    """``(law, reason)`` for every law that does not apply to the part."""
    if part.neutral is None:
        yield "neutral", "declares no neutral setting"
    if not part.has("correct"):
        yield "additive", "does not correct the gradient"
    if part.solves is None:
        yield "objective", "claims no objective: the fixed point has a bias, as FedAvg's"
    if "regression" not in part.tasks:
        yield "stable", "does not support regression"


def _run(problem: Problem, method: Any, engine: str, rounds: int = 2) -> Simulation:
    return problem.trained(method, engine, rounds, per_round=2)


def _surveyed(problem: Problem, part: Part, engine: str | None = None) -> Simulation:
    """A simulation before its first round, with the surveys that come first."""
    run = problem.simulate(part, engine)
    for one in run.bound.parts_with("survey"):
        run.survey(one, None)
    return run


def _trained(run: Simulation, k: int) -> client.Trained:
    """What client ``k`` makes of one local step."""
    local = LocalSteps(run, k)
    return client.end(local.bound, local.job, local.step(0))


def _train(run: Simulation, clients: list[int]) -> tuple[Totals, Tree]:
    """Totals of the clients, and their next states in the order of ``clients``."""
    [result] = run.engine.train(run.clients.cohort(run.session.request("", clients), states=False))
    order = [place for places, _ in result.next_states for place in places]
    states = tree.concat([state for _, state in result.next_states])
    return result.totals, take_rows(states, sorted(range(len(order)), key=order.__getitem__))


def _check_identical(a: Simulation, b: Simulation, what: str) -> None:
    if not tree.equal(a.state(), b.state()):
        raise LawViolation(
            f"{what} differ by {tree.gap(a.state(), b.state()):.1e}; they must be bit-identical"
        )


def _check_close(a: Simulation, b: Simulation, what: str) -> None:
    gap = tree.gap(a.state(), b.state())
    if not gap <= TOLERANCE:
        raise LawViolation(f"{what} differ by {gap:.1e}, more than {TOLERANCE:g}")


def _class_state(part: Part) -> str:
    return repr({k: v for k, v in vars(type(part)).items() if not callable(v)})
