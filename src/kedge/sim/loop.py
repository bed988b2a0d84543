"""One client after the other: the readable reference.

On a GPU the steps of a client are recorded as CUDA graphs (:mod:`kedge.sim.capture`) and replayed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kedge.core import client, server, tree
from kedge.core.bound import Bound
from kedge.core.client import Carry, Reply
from kedge.core.part import Part
from kedge.core.server import Totals
from kedge.core.view import Job
from kedge.errors import HookError
from kedge.sim.capture import CapturedSteps, Captures, shapes_of, take_jobs
from kedge.sim.cohort import Cohort, How, Phases


class Loop:
    """One client after the other, by plain autograd."""

    name = "loop"

    def __init__(self, how: How | None = None, capture: bool = True) -> None:
        self.how = how or How(self.name)
        self._captures = Captures(capture)

    def train(self, bound: Bound, cohort: Cohort, phases: Phases) -> tuple[Totals, tree.Tree]:
        total: Totals | None = None
        kept = []
        for i in range(len(cohort.clients)):
            reply = self._client(bound, cohort, i, phases)
            found = server.totals(bound, tree.stack([reply]), cohort.jobs.anchor)
            total = found if total is None else server.add_totals(total, found)
            kept.append(reply.client)
        assert total is not None
        return total, tree.stack(kept)

    def _client(self, bound: Bound, cohort: Cohort, i: int, phases: Phases) -> Reply:
        job, t = take_jobs(cohort.jobs, i), -1
        plan = cohort.plan[i, : cohort.steps[i]]
        try:
            reply = self._recorded(bound, job, plan, phases)
            if reply is not None:
                return reply
            carry = client.begin(bound, job, phases)
            for t in range(len(plan)):
                carry = client.step(bound, job, carry, plan[t], phases, functional=False)
            return client.end(bound, job, carry, phases)
        except HookError as error:
            raise HookError(f"{error} (client {cohort.clients[i]}, step {t})") from error

    def _recorded(self, bound: Bound, job: Job, plan: Tensor, phases: Phases) -> Reply | None:
        """What a client returns, by graphs, or None where there are none."""
        if not self._captures.enabled or plan.device.type != "cuda":
            return None
        key = (id(bound), tuple(phases.items()), shapes_of(job), plan.shape[1])

        def begin(job: Job) -> Carry:
            return client.begin(bound, job, phases)

        def step(job: Job, carry: Carry, index: Tensor) -> Carry:
            return client.step(bound, job, carry, index, phases, functional=False)

        def end(job: Job, carry: Carry) -> Reply:
            return client.end(bound, job, carry, phases)

        rows = tuple(plan.shape[1:])
        try:
            steps = self._captures.get(
                key, lambda: CapturedSteps(begin, step, end, job, begin(job), rows)
            )
            if steps is None:
                return None
            steps.start(job)
            steps.run(plan)
            return tree.map(torch.clone, steps.finish())
        except (RuntimeError, HookError) as error:
            self._captures.give_up(key, error)
            return None

    def survey(self, bound: Bound, cohort: Cohort, phases: Phases, part: Part) -> Totals:
        answers = [
            client.survey(bound, take_jobs(cohort.jobs, i), phases, part)
            for i in range(len(cohort.clients))
        ]
        return server.survey_totals(part, tree.stack(answers), cohort.jobs.info.weight)

    def personal(self, bound: Bound, cohort: Cohort, phases: Phases) -> tree.Weights:
        jobs = (take_jobs(cohort.jobs, i) for i in range(len(cohort.clients)))
        return tree.stack([client.personal(bound, job, phases) for job in jobs])
