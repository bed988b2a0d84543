"""Which way to compute a run is the fastest: each is tried for a moment, on the run's own clients.

Where a whole round would take too long, it is cut to fewer steps and, if need be, to fewer clients,
and what it would take follows from two such pieces: one of a single step, in which beginning and
ending a client's round weigh most, and a longer one.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kedge.core import client, server, tree
from kedge.core.server import Totals
from kedge.core.work import take_jobs
from kedge.engines.choice.fit import together
from kedge.engines.choice.subject import Subject
from kedge.engines.choice.trial import (
    Piece,
    cohort_of,
    one_step,
    reason,
    start_trial,
    timed,
    training,
    undisturbed,
)
from kedge.engines.engine import Engine
from kedge.engines.execution import Execution

REPEATS = 3
MAX_TRIAL_SHARE = 0.1  # of a run may go into trials, within these bounds in seconds
MIN_TRIAL_S, MAX_TRIAL_S = 1.0, 30.0
MIN_RUN_S = 1.0  # a shorter run is not measured
MIN_COMPILED_RUN_S = 300.0  # a shorter run is not compiled
MAX_WARM_UP_S = 2.0  # a client that takes longer is not timed a second time
MAX_COMPILE_SPEEDUP = 1.5  # a candidate this much slower than the best is not compiled
MIN_COMPILE_SPEEDUP = 1.1  # a compiled candidate must be this much faster than the others
MAX_NOISE = 0.05  # a relative difference that may be chance
TEST_ROWS = 128  # of the test set, to time a test


@dataclass(frozen=True)
class Timings:
    """What was measured of a run."""

    steps: dict[str, float]  # seconds a client-step by :func:`label`, its share of begin and end in
    rounds: dict[str, float]  # seconds of a round of one seed, without a test
    test: float  # seconds of a test
    failures: dict[str, str] = field(default_factory=dict)  # why a candidate failed, by label


def label(how: Execution) -> str:
    """A candidate in words."""
    words = f"{how.workers} workers" if how.workers else how.engine
    words += f" on {how.streams} streams" if how.streams else ""
    return f"{words} compiled" if how.compile else words


def _plain(how: Execution) -> str:
    """The label of the same without compiling."""
    return label(dataclasses.replace(how, compile=False))


def fastest(candidates: Sequence[Execution], timings: Timings, rounds: int) -> Execution:
    """The first, that is the simplest, that is as fast as the fastest but for chance. What has to
    be compiled is for long runs only, and has to be worth it."""
    is_long = rounds * min(timings.rounds.values()) >= MIN_COMPILED_RUN_S
    there = [how for how in candidates if is_long or not how.compile]
    took = {
        how: timings.steps.get(label(how), math.inf) * (MIN_COMPILE_SPEEDUP if how.compile else 1.0)
        for how in there
    }
    best = min(took.values())
    return next(how for how, t in took.items() if (1 - MAX_NOISE) * t <= best)


def times(sim: Subject, ways: Sequence[Execution], rounds: int, seeds: int) -> Timings | None:
    """How fast some ways are; failed ones are recorded as infinite, with the reason. None if the
    run is too short for measuring to pay. What has to be compiled is tried for long runs only, and
    only where it is not far behind as it is; else it is recorded as infinite, too."""
    with undisturbed(sim.federation.device):
        plain = start_trial(sim, Execution("loop"), rounds)
        own = plain.draw_cohort(plain.round)
        whole = Piece(own, sim.work)
        cost, totals = _client_cost(plain, own[0])
        total = seeds * rounds * cost.of(whole, sim)
        if total < MIN_RUN_S:
            return None
        tried = [how for how in ways if not how.compile] or list(ways)
        at_once = sum(together(how, len(own), seeds) for how in tried)
        budget = min(MAX_TRIAL_S, max(MIN_TRIAL_S, MAX_TRIAL_SHARE * total)) / at_once
        pieces, repeats = _pieces(sim, own, cost, budget)
        once = len(tried) * cost.of(pieces[0], sim)  # of each
        if not repeats and once > max(MAX_TRIAL_S, MAX_TRIAL_SHARE * total):
            return None
        if not repeats and 2 * once <= max(MAX_TRIAL_S, MAX_TRIAL_SHARE * total):
            repeats = 1  # after a first time
        failures: dict[str, str] = {}
        found = _tried(sim, tried, rounds, seeds, pieces, repeats, failures)
        train = {label(how): _whole(found.get(how), pieces, sim, own, cost) for how in tried}
        rest = _rest_seconds(plain, own, totals)
        fused = [how for how in ways if how not in tried]
        if fused and seeds * rounds * (min(train.values()) + rest) >= MIN_COMPILED_RUN_S:
            near = [
                how
                for how in fused
                if train.get(_plain(how), 0) <= MAX_COMPILE_SPEEDUP * min(train.values())
            ]
            found = _tried(sim, near, rounds, seeds, pieces, max(1, repeats), failures)
            train |= {label(how): _whole(found.get(how), pieces, sim, own, cost) for how in fused}
        return Timings(
            {name: took / whole.steps(sim) for name, took in train.items()},
            {name: took + rest for name, took in train.items()},
            _test_seconds(plain),
            failures,
        )


class Cost(NamedTuple):
    """Seconds of one client by itself: to begin and end its round, and of a step."""

    once: float
    step: float

    def of(self, piece: Piece, sim: Subject) -> float:
        return len(piece.clients) * self.once + piece.steps(sim) * self.step


def _pieces(sim: Subject, own: list[int], cost: Cost, budget: float) -> tuple[list[Piece], int]:
    """A whole round, or pieces of one, that can be tried in the given time, and how often after a
    first time; 0 where even the smallest take so long that once must do."""
    work, count = sim.work, len(own)
    allowed = budget / (1 + REPEATS)
    if cost.of(Piece(own, work), sim) <= allowed:
        return [Piece(own, work)], REPEATS
    least = 2 * cost.once + 3 * cost.step  # of a client: a piece of one step, another of two
    clients = min(count, int(allowed / least))
    if clients < min(2, count):
        return [one_step(sim, own[:2])], 0
    some = [own[i * count // clients] for i in range(clients)]
    wanted = max(2.0, (allowed / clients - 2 * cost.once - cost.step) / cost.step)
    share = min(1.0, wanted * clients / Piece(some, work).steps(sim))
    if work.steps:
        longer = dataclasses.replace(work, steps=min(work.steps, max(2, round(work.steps * share))))
    else:
        longer = dataclasses.replace(work, epochs=work.epochs * share)
    pieces = [one_step(sim, some), Piece(some, longer)]
    return pieces if pieces[0].steps(sim) < pieces[1].steps(sim) else pieces[1:], REPEATS


def _whole(
    took: list[float] | None, pieces: list[Piece], sim: Subject, own: list[int], cost: Cost
) -> float:
    """Seconds of training a whole cohort, from those of pieces."""
    if took is None:
        return math.inf
    last, whole = pieces[-1], Piece(own, sim.work)
    if len(pieces) == 1:
        return took[0] * cost.of(whole, sim) / cost.of(last, sim)
    done, longer = last.steps(sim), Piece(last.clients, sim.work)
    slope = max(0.0, took[1] - took[0]) / (done - pieces[0].steps(sim))
    seconds = took[1] + slope * (longer.steps(sim) - done)
    return seconds * cost.of(whole, sim) / cost.of(longer, sim)


def _tried(
    sim: Subject,
    candidates: Sequence[Execution],
    rounds: int,
    seeds: int,
    pieces: list[Piece],
    repeats: int,
    failures: dict[str, str],
) -> dict[Execution, list[float]]:
    """Seconds of every piece by candidate, in turns, so that a slow moment hits all of them; on a
    GPU one after the other, since each may fill its memory. The fastest time counts: others work on
    the machine at times, and what is found is remembered.

    Clients of several seeds train side by side where those of the run will. A candidate that raises
    is left out, and its label and the reason go into ``failures``.
    """
    if sim.federation.device.type == "cuda" and len(candidates) > 1:
        alone: dict[Execution, list[float]] = {}
        for how in candidates:
            alone |= _tried(sim, [how], rounds, seeds, pieces, repeats, failures)
            gc.collect()
            torch.cuda.empty_cache()
        return alone
    ready: dict[Execution, list[Callable[[], object]]] = {}
    engines: dict[Execution, Engine] = {}
    whole = len(pieces[0].clients) == sim.per_round
    copies = {h: together(h, sim.per_round, seeds) if whole else 1 for h in candidates}
    for how in candidates:
        try:
            one = start_trial(sim, how, rounds)
            engines[how] = one.engine
            repeated = [p._replace(clients=p.clients * copies[how]) for p in pieces]
            ready[how] = [training(one, piece) for piece in repeated]
            for work in ready[how] if repeats else ():
                work()
            if how.workers and not repeats:
                one.personal(pieces[0].clients)  # the least that starts the processes
        except Exception as error:  # noqa: BLE001  (a compiler may raise anything)
            failures[label(how)] = reason(error)
            ready.pop(how, None)
    found: dict[Execution, list[list[float]]] = {how: [] for how in ready}
    for _, how in itertools.product(range(repeats or 1), list(ready)):
        try:
            found[how].append([timed(sim.federation.device, work)[1] for work in ready[how]])
        except Exception as error:  # noqa: BLE001
            failures[label(how)] = reason(error)
            ready[how] = []
        if engines[how].shrunk:
            ready[how] = []
    return {
        how: [min(took) / copies[how] for took in zip(*rows, strict=True)]
        for how, rows in found.items()
        if ready[how]
    }


def _client_cost(sim: Subject, chosen: int) -> tuple[Cost, Totals]:
    """What one client takes, and what the server gets of it."""
    device = sim.federation.device
    cohort = cohort_of(sim, one_step(sim, [chosen]))
    bound, job, rows = cohort.bound, take_jobs(cohort.jobs, 0), cohort.batches[0, 0]
    cost = Cost(0.0, 0.0)
    for _ in range(2):
        if cost.once + cost.step < MAX_WARM_UP_S:  # the first time is slow
            first, begin = timed(device, client.begin, bound, job)
            last, step = timed(device, client.step, bound, job, first, rows)
            reply, end = timed(device, client.end, bound, job, last)
            cost = Cost(begin + end, step)
    return cost, server.totals(bound, tree.stack([reply]), job.anchor)


def _rest_seconds(sim: Subject, own: list[int], totals: Totals) -> float:
    """Seconds of a round beside training: forming the cohort, surveys, the server."""
    device, bound, some = sim.federation.device, sim.bound, own[:2]
    total = timed(device, sim.cohort, own)[1]
    with suppress(Exception):  # a part may want more clients than one
        total += timed(device, sim.aggregate, totals)[1]
        for part in bound.parts_with("survey"):
            if part.surveys() == "every":
                total += timed(device, sim.survey, part, some)[1] * len(own) / len(some)
    return total


def _test_seconds(sim: Subject) -> float:
    """Seconds of testing the global model, also on what clients hold out."""
    fed = sim.federation
    if not fed.num_test:
        return 0.0
    rows = fed.num_test * len(fed.angles) + sum(len(own) for own in fed.held_out)
    batch = next(fed.test_batches(fed.angles[0], TEST_ROWS))
    for _ in range(2):
        _, took = timed(fed.device, sim.sums, sim.weights, [batch])
    return took * rows / len(batch.x)
