"""The cost of single pieces of a run: of one client, of a round beside training, of a test."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from kedge.core import client, server, tree
from kedge.core.server import Totals
from kedge.core.work import take_jobs
from kedge.engines.choice.subject import Subject
from kedge.engines.choice.trial import Piece, form_cohort, one_step, timed

MAX_WARM_UP_S = 2.0  # a client that takes longer is timed without a warm-up
EVALUATION_ROWS = 128  # rows of the test set that are timed


class Cost(NamedTuple):
    """Seconds of one client by itself: of ``begin`` and ``end``, and of a step."""

    fixed: float
    step: float

    def of(self, piece: Piece, sim: Subject) -> float:
        """Seconds of a piece, client by client."""
        return len(piece.clients) * self.fixed + piece.steps(sim) * self.step


def client_cost(sim: Subject, chosen: int) -> tuple[Cost, Totals]:
    """The cost of one client, and the totals of its reply."""
    device = sim.federation.device
    cohort = form_cohort(sim, one_step(sim, [chosen]))
    bound, job, rows = cohort.bound, take_jobs(cohort.jobs, 0), cohort.batches[0, 0]
    cost = Cost(0.0, 0.0)
    for _ in range(2):
        if cost.fixed + cost.step < MAX_WARM_UP_S:  # the first pass is a warm-up
            first, begin = timed(device, client.begin, bound, job)
            last, step = timed(device, client.step, bound, job, first, rows)
            reply, end = timed(device, client.end, bound, job, last)
            cost = Cost(begin + end, step)
    return cost, server.totals(bound, tree.stack([reply]), job.anchor)


def overhead_seconds(sim: Subject, clients: list[int], totals: Totals) -> float:
    """Seconds of a round beside training: forming the cohort, surveys, aggregation."""
    device, bound, some = sim.federation.device, sim.bound, clients[:2]
    total = timed(device, sim.cohort, clients)[1]
    with suppress(Exception):  # a part may need more than one client
        total += timed(device, sim.aggregate, totals)[1]
        for part in bound.parts_with("survey"):
            if part.surveys() == "every":
                total += timed(device, sim.survey, part, some)[1] * len(clients) / len(some)
    return total


def evaluation_seconds(sim: Subject) -> float:
    """Seconds of evaluating the global model on the test set and on held-out rows of clients."""
    fed = sim.federation
    if not fed.num_test:
        return 0.0
    rows = fed.num_test * len(fed.angles) + sum(len(own) for own in fed.held_out)
    batch = next(fed.test_batches(fed.angles[0], EVALUATION_ROWS))
    for _ in range(2):
        _, seconds = timed(fed.device, sim.sums, sim.weights, [batch])
    return seconds * rows / len(batch.x)
