"""Two ways to run the clients of a round, with the same result.

``loop`` trains one client after the other: the readable reference. ``vector`` trains all of them as
one batched computation: their weights are stacked along a first axis and the same ``begin``,
``step`` and ``end`` are mapped over it. Clients with fewer steps than others are not padded: sorted
by their number of steps, those still running at step t are the first k_t of the stack, and step t
runs on just these.

On a GPU both record their steps as CUDA graphs (:mod:`kedge.sim.capture`) and replay them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
from kedge.sim.capture import CapturedSteps, shapes_of, take_jobs


class Cohort(NamedTuple):
    """The clients of a round: their jobs, stacked, and what they will train on."""

    clients: list[int]
    jobs: Job  # anchor and sent are shared, everything else is stacked [K, ...]
    steps: list[int]
    plan: Tensor  # [K, max steps, batch] rows of the federation


SHARED: Any = Job(anchor=None, sent=None, client=0, info=0, key=0, counts=0, chunks=0)  # type: ignore[arg-type]
Phases = dict[str, str]
Begin = Callable[[Job], Carry]
Step = Callable[[Job, Carry, Tensor], Carry]
End = Callable[[Job, Carry], Reply]


class _Captures:
    """Graphs by what they were recorded for; recording that fails is remembered, too."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._made: dict[Any, CapturedSteps | None] = {}

    def get(self, key: Any, make: Callable[[], CapturedSteps]) -> CapturedSteps | None:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def give_up(self, key: Any, error: Exception) -> None:
        self._made[key] = None
        warnings.warn(
            f"steps could not be recorded as a CUDA graph and run one by one: {error}", stacklevel=2
        )


class Loop:
    """One client after the other, by plain autograd."""

    name = "loop"

    def __init__(self, capture: bool = True) -> None:
        self._captures = _Captures(capture)

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


class Vector:
    """All clients at once, by ``vmap``."""

    name = "vector"

    def __init__(self, capture: bool = True) -> None:
        self._captures = _Captures(capture)

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


Engine = Loop | Vector
ENGINES: dict[str, type[Engine]] = {"loop": Loop, "vector": Vector}


def make_engine(name: str) -> Engine:
    if name not in ENGINES:
        raise UnknownName("engine", name, ENGINES)
    return ENGINES[name]()
