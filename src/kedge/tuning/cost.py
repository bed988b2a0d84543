"""The cost of single pieces of a run: of one client, of a round beside training, of a test."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from kedge.core import client, tree
from kedge.core.update import Totals, total
from kedge.core.work import take_jobs
from kedge.session.session import Request, drive
from kedge.sim.simulation import Simulation
from kedge.tuning.trial import RoundPiece, form_cohort, one_step, timed

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
