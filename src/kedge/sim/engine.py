"""Two ways to run the clients of a round, with the same result.

``loop`` trains one client after the other: the readable reference. ``vector`` trains all of them
as one batched computation: their weights are stacked along a first axis and the same ``begin``,
``step`` and ``end`` are mapped over it. Clients with fewer steps than others are not padded:
sorted by their number of steps, those still running at step t are the first k_t of the stack, and
step t runs on just these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from kedge.core import client, server, tree
from kedge.core.bound import Bound
from kedge.core.client import Carry, Reply
from kedge.core.part import Part
from kedge.core.server import Totals
from kedge.core.view import Job
from kedge.errors import HookError, UnknownName


class Cohort(NamedTuple):
    """The clients of a round: their jobs, stacked, and what they will train on."""

    clients: list[int]
    jobs: Job  # anchor and sent are shared, everything else is stacked [K, ...]
    steps: list[int]
    plan: Tensor  # [K, max steps, batch] rows of the federation


SHARED = Job(anchor=None, sent=None, client=0, info=0, key=0, counts=0, chunks=0)  # type: ignore[arg-type]


class Loop:
    """One client after the other, by plain autograd."""

    name = "loop"

    def train(
        self, bound: Bound, cohort: Cohort, phases: dict[str, str]
    ) -> tuple[Totals, tree.Tree]:
        total: Totals | None = None
        kept = []
        for i in range(len(cohort.clients)):
            reply = self._client(bound, cohort, i, phases)
            found = server.totals(bound, tree.stack([reply]), cohort.jobs.anchor)
            total = found if total is None else server.add_totals(total, found)
            kept.append(reply.client)
        assert total is not None
        return total, tree.stack(kept)

    def _client(self, bound: Bound, cohort: Cohort, i: int, phases: dict[str, str]) -> Reply:
        job, t = one_job(cohort.jobs, i), -1
        try:
            carry = client.begin(bound, job, phases)
            for t in range(cohort.steps[i]):
                carry = client.step(bound, job, carry, cohort.plan[i, t], phases, functional=False)
            return client.end(bound, job, carry, phases)
        except HookError as error:
            raise HookError(f"{error} (client {cohort.clients[i]}, step {t})") from error

    def survey(self, bound: Bound, cohort: Cohort, phases: dict[str, str], part: Part) -> Totals:
        answers = [
            client.survey(bound, one_job(cohort.jobs, i), phases, part)
            for i in range(len(cohort.clients))
        ]
        return server.survey_totals(part, tree.stack(answers), cohort.jobs.info.weight)

    def personal(self, bound: Bound, cohort: Cohort, phases: dict[str, str]) -> tree.Weights:
        jobs = (one_job(cohort.jobs, i) for i in range(len(cohort.clients)))
        return tree.stack([client.personal(bound, job, phases) for job in jobs])


class Vector:
    """All clients at once, by ``vmap``."""

    name = "vector"

    def train(
        self, bound: Bound, cohort: Cohort, phases: dict[str, str]
    ) -> tuple[Totals, tree.Tree]:
        order = sorted(range(len(cohort.clients)), key=lambda i: -cohort.steps[i])
        jobs, plan = take_jobs(cohort.jobs, order), cohort.plan[order]
        steps = [cohort.steps[i] for i in order]
        try:
            replies = self._clients(bound, jobs, steps, plan, phases)
        except HookError as error:
            raise HookError(
                f"{error} (all clients at once; engine=loop names the client)"
            ) from error
        back = torch.argsort(torch.tensor(order, device=plan.device))
        replies = tree.take(replies, back)
        return server.totals(bound, replies, jobs.anchor), replies.client

    def _clients(
        self, bound: Bound, jobs: Job, steps: Sequence[int], plan: Tensor, phases: dict[str, str]
    ) -> Reply:
        def step(job: Job, carry: Carry, index: Tensor) -> Carry:
            return client.step(bound, job, carry, index, phases, functional=True)

        step_all = vmap(step, in_dims=(SHARED, 0, 0))
        carry = vmap(lambda job: client.begin(bound, job, phases), in_dims=(SHARED,))(jobs)
        finished: list[Carry] = []  # those that ran out of steps, last clients first
        running = jobs
        for t in range(steps[0]):
            k = sum(s > t for s in steps)
            if k < len(running.key):
                finished.insert(0, tree.take(carry, slice(k, None)))
                carry, running = tree.take(carry, slice(k)), take_jobs(running, slice(k))
            carry = step_all(running, carry, plan[:k, t])
        carry = tree.concat([carry, *finished])
        return vmap(lambda j, c: client.end(bound, j, c, phases), in_dims=(SHARED, 0))(jobs, carry)

    def survey(self, bound: Bound, cohort: Cohort, phases: dict[str, str], part: Part) -> Totals:
        ask = vmap(lambda job: client.survey(bound, job, phases, part), in_dims=(SHARED,))
        return server.survey_totals(part, ask(cohort.jobs), cohort.jobs.info.weight)

    def personal(self, bound: Bound, cohort: Cohort, phases: dict[str, str]) -> tree.Weights:
        return vmap(lambda job: client.personal(bound, job, phases), in_dims=(SHARED,))(cohort.jobs)


Engine = Loop | Vector
ENGINES: dict[str, type[Engine]] = {"loop": Loop, "vector": Vector}


def make_engine(name: str) -> Engine:
    if name not in ENGINES:
        raise UnknownName("engine", name, ENGINES)
    return ENGINES[name]()


def one_job(jobs: Job, i: int) -> Job:
    return take_jobs(jobs, i)


def take_jobs(jobs: Job, index: int | slice | Sequence[int]) -> Job:
    """Some clients' jobs; what is shared stays shared."""
    stacked = {"client": jobs.client, "info": jobs.info, "key": jobs.key}
    stacked |= {"counts": jobs.counts, "chunks": jobs.chunks}
    return jobs._replace(**tree.take(stacked, index))
