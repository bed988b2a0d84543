"""All clients of a round as one batched computation.

Their weights are stacked along a first axis and the same ``begin``, ``step`` and ``end`` are mapped
over it. Clients with fewer steps than others are not padded: sorted by their number of steps, those
still running at step t are the first k_t of the stack, and step t runs on just these. On a GPU the
steps are recorded as CUDA graphs (:mod:`kedge.engines.capture`) and replayed.

A stack may hold clients of several simulations (:mod:`kedge.sim.fleet`), and one that is too large
for the memory is trained in pieces (:mod:`kedge.engines.lanes`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from kedge.core import client, server, tree
from kedge.core.bound import Bound
from kedge.core.client import Carry, Reply
from kedge.core.part import Part
from kedge.core.server import Totals
from kedge.core.view import Job
from kedge.engines import lanes
from kedge.engines.capture import CapturedSteps, Captures, shapes_of
from kedge.engines.cohort import Cohort, How, Phases, Trained, copied, take_jobs
from kedge.engines.compiled import compiled
from kedge.engines.lane_bound import LaneBound
from kedge.engines.lanes import Lane, Outcome, Stack
from kedge.engines.mapped import over_clients
from kedge.engines.oom import fitting, ran_out_of_memory
from kedge.errors import HookError, KedgeError

SHARED: Any = Job(anchor=None, sent=None, client=0, info=0, key=0, counts=0, chunks=0, fields=None)  # type: ignore[arg-type]
SPARE = 4  # a compiled step of all lanes is worth it as long as one in so many still runs
Begin = Callable[[Job], Carry]
Step = Callable[[Job, Carry, Tensor], Carry]
End = Callable[[Job, Carry], Reply]
What = tuple[int, Phases, bool]  # what steps are of, and whether what they give is summed up
T = TypeVar("T")


class Vector:
    """All clients at once, by ``vmap``."""

    name = "vector"

    def __init__(self, how: How | None = None, capture: bool = True) -> None:
        self.how = how or How(self.name)
        self.chunk = self.how.chunk  # lanes at once, at most (0: all); less where memory runs out
        self._captures = Captures(capture)
        self._compiled: dict[Any, Step] = {}

    def train(self, bound: Bound, cohort: Cohort, phases: Phases) -> tuple[Totals, tree.Tree]:
        """Totals of a cohort, and the next state of its clients."""
        [done] = self.train_stack(lanes.single(bound, cohort), phases)
        order = [place for places, _ in done.kept for place in places]
        kept = tree.concat([state for _, state in done.kept])
        back = sorted(range(len(order)), key=order.__getitem__)
        return done.totals, lanes.take_some(kept, back)

    def train_stack(self, stack: Stack, phases: Phases) -> list[Outcome]:
        """The same of one or several simulations, as many lanes at once as there is memory for."""
        return self._fitting(
            stack.lanes, lambda: lanes.train(self._named, stack, phases, self.chunk)
        )

    def attempt(self, stack: Stack, phases: Phases) -> str:
        """Why a stack's lanes cannot be mapped, seen on one step of two of them; empty if they
        can."""
        two = [Lane(owner, 0, 1) for owner in range(len(stack.groups))][:2]
        jobs, plan = lanes.some_jobs(stack, two)
        begin, step, end = _mapped(stack.bound, phases, bool(jobs.fields))
        try:
            end(jobs, step(jobs, begin(jobs), plan[:, 0]))
        except Exception as error:  # noqa: BLE001  (whatever it is, they run one by one)
            return str(error) or type(error).__name__
        return ""

    def replies(
        self,
        bound: Bound,
        jobs: Job,
        steps: Sequence[int],
        plan: Tensor,
        phases: Phases,
        summed: bool = False,
    ) -> Any:
        """What clients return, who are sorted by falling number of steps: a :class:`Reply`, or,
        ``summed`` up to what the server takes in, :class:`Trained`."""
        begin, step, reply = _mapped(bound, phases, bool(jobs.fields))

        def trained(jobs: Job, carry: Carry) -> Trained:
            every = reply(jobs, carry)
            return Trained(server.totals(bound, every, jobs.anchor), every.client)

        end, what = trained if summed else reply, (id(bound), phases, summed)
        done = self._recorded(begin, step, end, what, jobs, steps, plan)
        if done is not None:
            return done._replace(totals=copied(done.totals)) if summed else done
        return end(jobs, self._stepwise(begin, step, what, jobs, steps, plan))

    def _named(self, *args: Any) -> Any:
        try:
            return self.replies(*args)
        except HookError as error:
            raise HookError(
                f"{error} (all clients at once; engine=loop names the client)"
            ) from error

    def _stepwise(
        self,
        begin: Begin,
        step: Step,
        what: What,
        jobs: Job,
        steps: Sequence[int],
        plan: Tensor,
    ) -> Carry:
        carry, total = begin(jobs), len(steps)
        whole = self._fused(step, what, jobs, carry, plan[:, 0])  # for all lanes
        finished: list[Carry] = []  # those that ran out of steps, last clients first
        lanes = running = total
        for k, first, last in _stairs(steps):
            if k < running:
                finished.insert(0, tree.take(carry, slice(k, running)))
                running = k
            if k < lanes and (whole is step or k * SPARE < total):
                carry, jobs, lanes = tree.take(carry, slice(k)), take_jobs(jobs, slice(k)), k
            advance = whole if lanes == total else step
            for t in range(first, last):
                carry = advance(jobs, carry, plan[:lanes, t])
        return tree.concat([tree.take(carry, slice(running)), *finished])

    def _fused(self, step: Step, what: What, jobs: Job, carry: Carry, index: Tensor) -> Step:
        """The step as the compiler made it, if it is to: once for every shape."""
        if not self.how.compile or jobs.key.is_cuda:
            return step
        key = (what[0], tuple(what[1].items()), shapes_of((jobs, carry, index)))
        if key not in self._compiled:
            self._compiled[key] = compiled(step, jobs, carry, index)
        return self._compiled[key]

    def _recorded(
        self,
        begin: Begin,
        step: Step,
        end: Callable[[Job, Carry], Any],
        what: What,
        jobs: Job,
        steps: Sequence[int],
        plan: Tensor,
    ) -> Any:
        """The same by graphs, or None where there are none.

        A graph is recorded for few sizes of the stack only: with k clients left, the next larger
        size runs, and what it does to clients that have finished is overwritten in the end.
        """
        if not self._captures.enabled or plan.device.type != "cuda":
            return None
        total = len(steps)
        key = (what[0], tuple(what[1].items()), what[2], shapes_of(jobs), plan.shape[2])
        rows, fused = (total, plan.shape[2]), compiled if self.how.compile else None
        try:
            captured = self._captures.get(
                key, lambda: CapturedSteps(begin, step, end, jobs, begin(jobs), rows, fused)
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
                size = _size(k, total)
                captured.run(by_step[first:last, :size], size)
            for rest, left in finished:
                tree.map(lambda t, s: t.copy_(s), tree.take(captured.carry, rest), left)
            return captured.finish()
        except (RuntimeError, HookError) as error:
            if ran_out_of_memory(error):
                raise
            self._captures.give_up(key, error)
            return None

    def survey(self, bound: Bound, cohort: Cohort, phases: Phases, part: Part) -> Totals:
        ask = over_clients(lambda job: client.survey(bound, job, phases, part), SHARED)

        def work() -> Totals:
            total: Totals = {}
            for jobs in self._pieces(cohort):
                found = server.survey_totals(part, ask(jobs), jobs.info.weight)
                total = server.add_totals(total, found) if total else found
            return total

        return self._fitting(len(cohort.clients), work)

    def personal(self, bound: Bound, cohort: Cohort, phases: Phases) -> tree.Weights:
        ask = over_clients(lambda job: client.personal(bound, job, phases), SHARED)
        return self._fitting(
            len(cohort.clients), lambda: tree.concat([ask(jobs) for jobs in self._pieces(cohort)])
        )

    # -- memory -------------------------------------------------------------------------------

    def _pieces(self, cohort: Cohort) -> Iterator[Job]:
        count, size = len(cohort.clients), self.chunk or len(cohort.clients)
        for i in range(0, count, size):
            yield cohort.jobs if size >= count else take_jobs(cohort.jobs, slice(i, i + size))

    def _fitting(self, count: int, work: Callable[[], T]) -> T:
        """Do some work on so many lanes; where memory runs out, again on fewer at once."""
        return fitting(self._captures, work, partial(self._shrink, count))

    def _shrink(self, count: int) -> None:
        """From now on half as many lanes at once."""
        before = min(self.chunk or count, count)
        if before == 1:
            raise KedgeError(
                "one client alone does not fit into the memory. Make the batch smaller (--batch), "
                "use a smaller model or --precision bf16, or try --engine loop"
            )
        self.chunk = before // 2
        warnings.warn(
            f"{before} clients at once do not fit into the memory: going on with {self.chunk}",
            stacklevel=2,
        )


def _mapped(bound: Bound, phases: Phases, fleet: bool = False) -> tuple[Begin, Step, End]:
    """The three functions of a client round, over all clients at once; those of a fleet have
    nothing in common."""

    def own(job: Job) -> Bound:
        return bound.lane(job.fields) if isinstance(bound, LaneBound) else bound

    def begin(job: Job) -> Carry:
        return client.begin(own(job), job, phases)

    def step(job: Job, carry: Carry, index: Tensor) -> Carry:
        return client.step(own(job), job, carry, index, phases, functional=True)

    def end(job: Job, carry: Carry) -> Reply:
        return client.end(own(job), job, carry, phases)

    job = 0 if fleet else SHARED
    return over_clients(begin, job), over_clients(step, job, 0, 0), over_clients(end, job, 0)


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
