"""Timings of the candidates of ``--engine auto``, from short trials on the run's own clients.

If a whole round takes too long for a trial, fewer steps are timed and, if necessary, fewer clients.
The time of the whole round is extrapolated from two such pieces: one of a single step, dominated by
``begin`` and ``end``, and a longer one.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kedge.core import client, tree
from kedge.core.update import Totals, total
from kedge.core.work import take_jobs
from kedge.engines.device import use_threads
from kedge.engines.engine import Engine
from kedge.engines.execution import Execution
from kedge.session.session import Request, drive
from kedge.sim.simulation import Simulation
from kedge.tuning.placement import seeds_at_once
from kedge.tuning.trial import (
    RoundPiece,
    failure_reason,
    form_cohort,
    isolated,
    one_step,
    start_trial,
    timed,
    training,
)

MAX_WARM_UP_S = 2.0  # a client that takes longer is timed without a warm-up
EVALUATION_ROWS = 128  # rows of the test set that are timed


class Cost(NamedTuple):
    """Seconds of one client by itself: of ``begin`` and ``end``, and of a step."""

    fixed: float
    step: float

    def of(self, piece: RoundPiece, sim: Simulation) -> float:
        """Seconds of a piece, client by client."""
        return len(piece.clients) * self.fixed + piece.steps(sim) * self.step


def client_cost(sim: Simulation, chosen: int) -> tuple[Cost, Totals]:
    """The cost of one client, and the totals of its reply."""
    device = sim.federation.device
    cohort = form_cohort(sim, one_step(sim, [chosen]))
    bound, job, rows = cohort.bound, take_jobs(cohort.jobs, 0), cohort.batches[0, 0]
    cost = Cost(0.0, 0.0)
    for _ in range(2):
        if cost.fixed + cost.step < MAX_WARM_UP_S:  # the first pass is a warm-up
            first, begin = timed(device, client.begin, bound, job)
            last, step = timed(device, client.step, bound, job, first, rows)
            done, end = timed(device, client.end, bound, job, last)
            cost = Cost(begin + end, step)
    totals = total(bound, tree.stack([done.update]), job.anchor)
    return cost, totals.of([chosen], sim.round)


def overhead_seconds(sim: Simulation, clients: list[int], totals: Totals) -> float:
    """Seconds of a round beside training: forming the cohort, surveys, aggregation."""
    device, some = sim.federation.device, clients[:2]
    seconds = timed(device, sim.cohort, clients)[1]

    def answer(request: Request) -> Totals:
        nonlocal seconds
        if not request.part:
            return totals
        found, spent = timed(device, sim.clients.answer, request._replace(clients=some))
        seconds += spent * (len(clients) / len(some) - 1)
        return found

    with suppress(Exception):  # a part may need more than one client
        rounds = sim.session.rounds(clients, steps=sim.steps, check="none")
        seconds += timed(device, drive, rounds, answer)[1]
    return seconds


def evaluation_seconds(sim: Simulation) -> float:
    """Seconds of evaluating the global model on the test set and on held-out rows of clients."""
    fed = sim.federation
    if not fed.num_test:
        return 0.0
    rows = fed.num_test * len(fed.angles) + sum(len(own) for own in fed.held_out)
    batch = next(fed.test_batches(fed.angles[0], EVALUATION_ROWS))
    for _ in range(2):
        _, seconds = timed(fed.device, sim.sums, sim.weights, [batch])
    return seconds * rows / len(batch.x)


REPEATS = 3  # timed repeats after a warm-up
MAX_TRIAL_SHARE = 0.1  # share of a run's time for trials, within the following bounds
MIN_TRIAL_S, MAX_TRIAL_S = 1.0, 30.0
MIN_RUN_S = 1.0  # shorter runs are not measured
MIN_COMPILED_RUN_S = 300.0  # shorter runs are not compiled
MAX_COMPILE_SPEEDUP = 1.5  # candidates slower than the fastest by this factor are not compiled
MAX_GPU_COMPILE_SPEEDUP = 2.5  # the same on a GPU, in a run of at least
LONG_RUN_S = 900.0
MIN_COMPILE_SPEEDUP = 1.1  # required of a compiled candidate over the fastest eager one
MAX_LOSS = 0.1  # a simpler candidate is at most so much slower than the fastest, up to its spread
MAX_NOISE = 0.05  # relative difference attributed to noise


@dataclass(frozen=True)
class Timings:
    """Measured times in seconds, by :func:`label`. Failed candidates are recorded as infinite."""

    steps: dict[str, float]  # per client-step, with its share of begin and end: the minimum
    rounds: dict[str, float]  # per round of one seed, without evaluation
    test: float  # per evaluation
    failures: dict[str, str] = field(default_factory=dict)  # reasons, by label
    spread: dict[str, float] = field(default_factory=dict)  # median / minimum - 1 of the repeats


def label(execution: Execution) -> str:
    """The name of a candidate in messages and records.

    >>> label(Execution("loop", streams=4, compile=True))
    'loop on 4 streams compiled'
    """
    words = f"{execution.workers} workers" if execution.workers else execution.engine
    words += f" on {execution.streams} streams" if execution.streams else ""
    words += f" on {execution.threads} threads" if _has_threads(execution) else ""
    return f"{words} compiled" if execution.compile else words


def _has_threads(execution: Execution) -> bool:
    """Whether training has several threads: those of a run with workers are for the rest of it."""
    return execution.threads > 1 and not execution.workers


def _eager(execution: Execution) -> Execution:
    return dataclasses.replace(execution, compile=False)


def fastest(candidates: Sequence[Execution], timings: Timings, rounds: int) -> Execution:
    """The first candidate, that is the simplest, as fast as the fastest up to noise: within 5 %, or
    within the spread of its repeats.

    Compiled candidates count for long runs only, and if the speedup pays for compilation. Noise and
    compilation together cost at most a tenth.
    """
    is_long = rounds * min(timings.rounds.values()) >= MIN_COMPILED_RUN_S
    measured = {
        execution: timings.steps.get(label(execution), math.inf)
        for execution in candidates
        if is_long or not execution.compile
    }
    seconds = {x: s * (MIN_COMPILE_SPEEDUP if x.compile else 1.0) for x, s in measured.items()}
    first, best = min(seconds.items(), key=lambda item: item[1])
    tolerance = 1 + timings.spread.get(label(first), 0.0)
    most = (1 + MAX_LOSS) * tolerance * min(measured.values())
    near = [x for x, s in seconds.items() if (1 - MAX_NOISE) * s <= best * tolerance]
    return next((x for x in near if measured[x] <= most), first)


def measure(
    sim: Simulation, candidates: Sequence[Execution], rounds: int, seeds: int
) -> Timings | None:
    """Time the candidates of a run in short trials.

    Compilation is tried for long runs only, for candidates whose eager version is not far behind
    the fastest; the others are recorded as infinite.

    Args:
        sim: a simulation of the run; it is not changed.
        candidates: the executions to compare.
        rounds: rounds of the run.
        seeds: seeds of the run.

    Returns:
        The timings, or None if the run is too short for trials to pay.
    """
    with isolated(sim.federation.device):
        try:
            trial = start_trial(sim, Execution("loop"), rounds)
            clients = trial.session.draw_clients(trial.round)
            cost, totals = client_cost(trial, clients[0])
        except Exception:  # noqa: BLE001  (another engine may still work)
            return None
        whole = RoundPiece(clients, sim.session.workload.work)
        run_seconds = seeds * rounds * cost.of(whole, sim)
        if run_seconds < MIN_RUN_S:
            return None
        eager = [x for x in candidates if not x.compile] or list(candidates)
        at_once = sum(seeds_at_once(x, len(clients), seeds) for x in eager)
        budget = min(MAX_TRIAL_S, max(MIN_TRIAL_S, MAX_TRIAL_SHARE * run_seconds)) / at_once
        pieces, repeats = _choose_pieces(sim, clients, cost, budget)
        once = len(eager) * cost.of(pieces[0], sim)  # seconds of one trial of each
        if not repeats and once > max(MAX_TRIAL_S, MAX_TRIAL_SHARE * run_seconds):
            return None
        if not repeats and 2 * once <= max(MAX_TRIAL_S, MAX_TRIAL_SHARE * run_seconds):
            repeats = 1  # after a warm-up
        failures: dict[str, str] = {}
        spread: dict[str, float] = {}

        def train_seconds(some: Sequence[Execution], repeats: int) -> dict[Execution, float]:
            """Seconds of training a whole cohort, by candidate."""
            found = _time_pieces(sim, some, rounds, seeds, pieces, repeats, failures)
            spread.update({label(x): _spread(rows) for x, rows in found.items()})
            return {
                x: _extrapolate([min(times) for times in rows], pieces, sim, clients, cost)
                for x, rows in found.items()
            }

        found = train_seconds(eager, repeats)
        train = {label(x): found.get(x, math.inf) for x in eager}
        overhead = overhead_seconds(trial, clients, totals)
        compiled = [x for x in candidates if x not in eager]
        eager_seconds = seeds * rounds * (min(train.values()) + overhead)
        limit = _max_speedup(sim.federation.device, eager_seconds) * min(train.values())
        if compiled and eager_seconds >= MIN_COMPILED_RUN_S:
            near = [x for x in compiled if train.get(label(_eager(x)), 0) <= limit]
            found = train_seconds(near, max(1, repeats))
            train |= {label(x): found.get(x, math.inf) for x in compiled}
        return Timings(
            {name: seconds / whole.steps(sim) for name, seconds in train.items()},
            {name: seconds + overhead for name, seconds in train.items()},
            evaluation_seconds(trial),
            failures,
            spread,
        )


def _max_speedup(device: torch.device, seconds: float) -> float:
    """By how much compilation may make a candidate faster. On a GPU that is much for steps of all
    clients: between convolutions, eager ones convert every map. A trial takes a minute there, so
    only long runs try slow candidates, too.

    >>> _max_speedup(torch.device("cuda"), 3600), _max_speedup(torch.device("cpu"), 3600)
    (2.5, 1.5)
    """
    is_long = device.type == "cuda" and seconds >= LONG_RUN_S
    return MAX_GPU_COMPILE_SPEEDUP if is_long else MAX_COMPILE_SPEEDUP


def _choose_pieces(
    sim: Simulation, clients: list[int], cost: Cost, budget: float
) -> tuple[list[RoundPiece], int]:
    """A whole round, or pieces of one, that fit into ``budget`` seconds, and the number of timed
    repeats after a warm-up; 0 repeats: there is time for one trial without a warm-up."""
    work, count = sim.session.workload.work, len(clients)
    allowed = budget / (1 + REPEATS)
    if cost.of(RoundPiece(clients, work), sim) <= allowed:
        return [RoundPiece(clients, work)], REPEATS
    least = 2 * cost.fixed + 3 * cost.step  # of a client: a piece of one step, another of two
    num_clients = min(count, int(allowed / least))
    if num_clients < min(2, count):
        return [one_step(sim, clients[:2])], 0
    some = [clients[i * count // num_clients] for i in range(num_clients)]
    steps = max(2.0, (allowed / num_clients - 2 * cost.fixed - cost.step) / cost.step)
    share = min(1.0, steps * num_clients / RoundPiece(some, work).steps(sim))
    if work.steps:
        longer = dataclasses.replace(work, steps=min(work.steps, max(2, round(work.steps * share))))
    else:
        longer = dataclasses.replace(work, epochs=work.epochs * share)
    pieces = [one_step(sim, some), RoundPiece(some, longer)]
    return pieces if pieces[0].steps(sim) < pieces[1].steps(sim) else pieces[1:], REPEATS


def _extrapolate(
    seconds: list[float], pieces: list[RoundPiece], sim: Simulation, clients: list[int], cost: Cost
) -> float:
    """Seconds of training a whole cohort, from those of pieces."""
    last, whole = pieces[-1], RoundPiece(clients, sim.session.workload.work)
    if len(pieces) == 1:
        return seconds[0] * cost.of(whole, sim) / cost.of(last, sim)
    steps, longer = last.steps(sim), RoundPiece(last.clients, sim.session.workload.work)
    slope = max(0.0, seconds[1] - seconds[0]) / (steps - pieces[0].steps(sim))
    extrapolated = seconds[1] + slope * (longer.steps(sim) - steps)
    return extrapolated * cost.of(whole, sim) / cost.of(longer, sim)


def _time_pieces(
    sim: Simulation,
    candidates: Sequence[Execution],
    rounds: int,
    seeds: int,
    pieces: list[RoundPiece],
    repeats: int,
    failures: dict[str, str],
) -> dict[Execution, list[list[float]]]:
    """Seconds of every repeat of every piece, by candidate.

    Candidates alternate, so that a disturbance hits all of them; on a GPU they run one after the
    other, since each may fill the memory. If a trial covers the whole cohort, clients of several
    seeds train side by side as they will in the run. A candidate that raises is dropped, with the
    reason in ``failures``; so is one that ran out of memory and shrank.
    """
    if sim.federation.device.type == "cuda" and len(candidates) > 1:
        separate: dict[Execution, list[list[float]]] = {}
        for candidate in candidates:
            one = [candidate]
            separate |= _time_pieces(sim, one, rounds, seeds, pieces, repeats, failures)
            gc.collect()
            torch.cuda.empty_cache()
        return separate
    trainings: dict[Execution, list[Callable[[], object]]] = {}
    engines: dict[Execution, Engine] = {}
    is_whole = len(pieces[0].clients) == sim.session.cohort_size
    copies = {
        x: seeds_at_once(x, sim.session.cohort_size, seeds) if is_whole else 1 for x in candidates
    }
    for candidate in candidates:
        try:
            use_threads(candidate.threads)
            trial = start_trial(sim, candidate, rounds)
            engines[candidate] = trial.engine
            repeated = [p._replace(clients=p.clients * copies[candidate]) for p in pieces]
            trainings[candidate] = [training(trial, piece) for piece in repeated]
            for work in trainings[candidate] if repeats else ():
                work()  # warm-up
            if candidate.workers and not repeats:
                trial.personal(pieces[0].clients)  # the cheapest way to start the processes
        except Exception as error:  # noqa: BLE001  (a compiler may raise anything)
            failures[label(candidate)] = failure_reason(error)
            trainings.pop(candidate, None)
    times: dict[Execution, list[list[float]]] = {candidate: [] for candidate in trainings}
    for _, candidate in itertools.product(range(repeats or 1), list(trainings)):
        try:
            use_threads(candidate.threads)
            seconds = [timed(sim.federation.device, work)[1] for work in trainings[candidate]]
            times[candidate].append(seconds)
        except Exception as error:  # noqa: BLE001
            failures[label(candidate)] = failure_reason(error)
            trainings[candidate] = []
        if engines[candidate].shrunk:
            trainings[candidate] = []
    use_threads(1 if sim.federation.device.type == "cpu" else 0)
    return {
        candidate: [[s / copies[candidate] for s in piece] for piece in zip(*rows, strict=True)]
        for candidate, rows in times.items()
        if trainings[candidate]
    }


def _spread(pieces: list[list[float]]) -> float:
    """How far the median of the repeats of the longest piece lies above their minimum."""
    return statistics.median(pieces[-1]) / max(min(pieces[-1]), 1e-9) - 1
