"""All clients of a round as one batched computation.

Their weights are stacked along a first axis and the same ``begin``, ``step`` and ``end`` are mapped
over it. Clients with fewer steps than others are not padded: sorted by their number of steps, those
still running at step t are the first k_t of the stack, and step t runs on just these. On a GPU the
steps are recorded as CUDA graphs (:mod:`kedge.sim.capture`) and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from kedge.core import client, server, tree
from kedge.core.bound import Bound
from kedge.core.client import Carry, Reply
from kedge.core.part import Part
from kedge.core.server import Totals
from kedge.core.view import Job
from kedge.errors import HookError
from kedge.sim.capture import CapturedSteps, Captures, shapes_of, take_jobs
from kedge.sim.cohort import Cohort, How, Phases

SHARED: Any = Job(anchor=None, sent=None, client=0, info=0, key=0, counts=0, chunks=0)  # type: ignore[arg-type]
Begin = Callable[[Job], Carry]
Step = Callable[[Job, Carry, Tensor], Carry]
End = Callable[[Job, Carry], Reply]


class Vector:
    """All clients at once, by ``vmap``."""

    name = "vector"

    def __init__(self, how: How | None = None, capture: bool = True) -> None:
        self.how = how or How(self.name)
        self._captures = Captures(capture)

    def train(self, bound: Bound, cohort: Cohort, phases: Phases) -> tuple[Totals, tree.Tree]:
        order = sorted(range(len(cohort.clients)), key=lambda i: -cohort.steps[i])
        sorted_already = order == list(range(len(order)))
        jobs = cohort.jobs if sorted_already else take_jobs(cohort.jobs, order)
        plan = cohort.plan if sorted_already else cohort.plan[order]
        steps = [cohort.steps[i] for i in order]
        try:
            replies = self.replies(bound, jobs, steps, plan, phases)
        except HookError as error:
            raise HookError(
                f"{error} (all clients at once; engine=loop names the client)"
            ) from error
        if not sorted_already:
            back = sorted(range(len(order)), key=lambda i: order[i])
            replies = tree.take(replies, torch.tensor(back, device=plan.device))
        return server.totals(bound, replies, jobs.anchor), replies.client

    def replies(
        self, bound: Bound, jobs: Job, steps: Sequence[int], plan: Tensor, phases: Phases
    ) -> Reply:
        """What clients return, who are sorted by falling number of steps."""
        begin, step, end = _mapped(bound, phases)
        done = self._recorded(begin, step, end, (id(bound), phases), jobs, steps, plan)
        return (
            done if done is not None else end(jobs, self._stepwise(begin, step, jobs, steps, plan))
        )

    def _stepwise(
        self, begin: Begin, step: Step, jobs: Job, steps: Sequence[int], plan: Tensor
    ) -> Carry:
        carry = begin(jobs)
        finished: list[Carry] = []  # those that ran out of steps, last clients first
        running = jobs
        for k, first, last in _stairs(steps):
            if k < len(running.key):
                finished.insert(0, tree.take(carry, slice(k, None)))
                carry, running = tree.take(carry, slice(k)), take_jobs(running, slice(k))
            for t in range(first, last):
                carry = step(running, carry, plan[:k, t])
        return tree.concat([carry, *finished])

    def _recorded(
        self,
        begin: Begin,
        step: Step,
        end: End,
        what: tuple[int, Phases],
        jobs: Job,
        steps: Sequence[int],
        plan: Tensor,
    ) -> Reply | None:
        """The same by graphs, or None where there are none.

        A graph is recorded for few sizes of the stack only: with k clients left, the next larger
        size runs, and what it does to clients that have finished is overwritten in the end.
        """
        if not self._captures.enabled or plan.device.type != "cuda":
            return None
        total = len(steps)
        key = (what[0], tuple(what[1].items()), shapes_of(jobs), plan.shape[2])
        rows = (total, plan.shape[2])
        try:
            captured = self._captures.get(
                key, lambda: CapturedSteps(begin, step, end, jobs, begin(jobs), rows)
            )
            if captured is None:
                return None
            captured.start(jobs)
            finished: list[tuple[slice, Carry]] = []
            running = total
            by_step = plan.transpose(0, 1)  # [steps, K, batch]
            for k, first, last in _stairs(steps):
                if k < running:
                    rest = slice(k, running)
                    left = tree.take(captured.carry, rest)
                    finished.append((rest, tree.map(torch.clone, left)))
                    running = k
                lanes = _size(k, total)
                captured.run(by_step[first:last, :lanes], lanes)
            for rest, left in finished:
                tree.map(lambda t, s: t.copy_(s), tree.take(captured.carry, rest), left)
            return captured.finish()
        except (RuntimeError, HookError) as error:
            self._captures.give_up(key, error)
            return None

    def survey(self, bound: Bound, cohort: Cohort, phases: Phases, part: Part) -> Totals:
        ask = vmap(lambda job: client.survey(bound, job, phases, part), in_dims=(SHARED,))
        return server.survey_totals(part, ask(cohort.jobs), cohort.jobs.info.weight)

    def personal(self, bound: Bound, cohort: Cohort, phases: Phases) -> tree.Weights:
        return vmap(lambda job: client.personal(bound, job, phases), in_dims=(SHARED,))(cohort.jobs)


def _mapped(bound: Bound, phases: Phases) -> tuple[Begin, Step, End]:
    """The three functions of a client round, over all clients at once."""

    def begin(job: Job) -> Carry:
        return client.begin(bound, job, phases)

    def step(job: Job, carry: Carry, index: Tensor) -> Carry:
        return client.step(bound, job, carry, index, phases, functional=True)

    def end(job: Job, carry: Carry) -> Reply:
        return client.end(bound, job, carry, phases)

    return (
        vmap(begin, in_dims=(SHARED,)),
        vmap(step, in_dims=(SHARED, 0, 0)),
        vmap(end, in_dims=(SHARED, 0)),
    )


def _stairs(steps: Sequence[int]) -> list[tuple[int, int, int]]:
    """``(clients, first step, last step)`` of every stretch in which the same clients run.

    >>> _stairs([5, 5, 2])
    [(3, 0, 2), (2, 2, 5)]
    """
    ends = sorted(set(steps))
    starts = [0, *ends[:-1]]
    return [(sum(s >= end for s in steps), a, end) for a, end in zip(starts, ends, strict=True)]


def _size(k: int, total: int) -> int:
    """The smallest recorded size that holds k clients: the total, its half, its quarter, ..."""
    size = total
    while size > 1 and (size + 1) // 2 >= k:
        size = (size + 1) // 2
    return size
