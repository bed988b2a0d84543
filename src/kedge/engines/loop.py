"""One client after the other: the readable reference.

On a GPU the steps of a client are captured as CUDA graphs (:mod:`kedge.engines.capture`) and
replayed, and several clients may run side by side, each on its own stream.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from kedge.core import client, server, tree
from kedge.core.bound import Bound
from kedge.core.client import Carry
from kedge.core.part import Part
from kedge.core.server import Totals
from kedge.core.shell import in_channels_last
from kedge.core.tree import Tree, Weights
from kedge.core.view import Job
from kedge.engines.capture import CapturedSteps, Captures, shapes_of, side_by_side
from kedge.engines.cohort import Cohort, How, Phases, Trained, copied, take_jobs
from kedge.engines.compiled import compiled
from kedge.engines.oom import fitting, ran_out_of_memory
from kedge.errors import HookError, KedgeError

T = TypeVar("T")


class Ask(NamedTuple):
    """What the clients of a cohort are asked for: ``train``, ``survey`` or ``personal``."""

    what: str
    phases: Phases
    part: str = ""  # whose survey it is


class Loop:
    """One client after the other, by plain autograd."""

    name = "loop"

    def __init__(self, how: How | None = None, capture: bool = True) -> None:
        self.how = how or How(self.name)
        self._captures = Captures(capture)
        self._fused: dict[Any, Callable[..., Any]] = {}
        self.streams = self.how.streams  # fewer where memory runs out
        self._sides: list[torch.cuda.Stream] = []

    def train(self, bound: Bound, cohort: Cohort, phases: Phases) -> tuple[Totals, Tree]:
        return self._fitting(lambda: self._train(bound, cohort, phases))

    def survey(self, bound: Bound, cohort: Cohort, phases: Phases, part: Part) -> Totals:
        answers = self._fitting(lambda: self._rows(bound, cohort, Ask("survey", phases, part.name)))
        return server.survey_totals(part, answers, cohort.jobs.info.weight)

    def personal(self, bound: Bound, cohort: Cohort, phases: Phases) -> Weights:
        return self._fitting(lambda: self._rows(bound, cohort, Ask("personal", phases)))

    def _train(self, bound: Bound, cohort: Cohort, phases: Phases) -> tuple[Totals, Tree]:
        total: Totals = {}
        rows: Tree = None
        for i, done in enumerate(self.each(bound, cohort, Ask("train", phases))):
            total = server.add_totals(total, done.totals, own=True) if i else copied(done.totals)
            rows = _put(rows, i, done.kept, len(cohort.clients))
        return total, rows

    def _rows(self, bound: Bound, cohort: Cohort, ask: Ask) -> Tree:
        rows: Tree = None
        for i, answer in enumerate(self.each(bound, cohort, ask)):
            rows = _put(rows, i, answer, len(cohort.clients))
        return rows

    def each(self, bound: Bound, cohort: Cohort, ask: Ask) -> Iterator[Any]:
        """The clients' answers in their order; each one is valid until the next is asked for."""
        jobs = cohort.jobs
        jobs = jobs._replace(anchor=laid(bound, jobs.anchor), sent=laid(bound, jobs.sent))

        def client_number(i: int, slot: int = 0) -> Any:
            plan = cohort.plan[i, : cohort.steps[i]]
            return self.answer(bound, take_jobs(jobs, i), plan, cohort.clients[i], ask, slot)

        count = len(cohort.clients)
        if self.streams > 1 and cohort.plan.is_cuda:
            while len(self._sides) < self.streams:
                self._sides.append(torch.cuda.Stream(cohort.plan.device))
            return side_by_side(client_number, count, self._sides[: self.streams])
        return map(client_number, range(count))

    def answer(
        self, bound: Bound, job: Job, plan: Tensor, who: int, ask: Ask, slot: int = 0
    ) -> Any:
        """What one client answers. Its anchor and what was sent are laid out already; clients that
        run at the same time have different slots, each with graphs of its own."""
        job, t = job._replace(client=laid(bound, job.client)), -1
        try:
            if ask.what == "personal":
                return client.personal(bound, job, ask.phases)
            if ask.what == "survey":
                part = next(p for p in bound.parts if p.name == ask.part)
                return client.survey(bound, job, ask.phases, part)
            done = self._recorded(bound, job, plan, ask.phases, slot)
            if done is not None:
                return done
            carry = client.begin(bound, job, ask.phases)
            for t, index in enumerate(plan.unbind()):
                own = t > 0 and index.device.type == "cpu"  # the first weights are the anchor's
                carry = client.step(bound, job, carry, index, ask.phases, False, own)
            return _trained(bound, job, carry, ask.phases)
        except HookError as error:
            raise HookError(f"{error} (client {who}, step {t})") from error

    def _fitting(self, work: Callable[[], T]) -> T:
        return fitting(self._captures, work, self._narrow)

    def _narrow(self) -> None:
        """From now on half as many clients side by side."""
        if self.streams < 2:
            raise KedgeError(
                "one client alone does not fit into the memory. Make the batch smaller (--batch), "
                "or use a smaller model or --precision bf16"
            )
        for side in self._sides:
            side.synchronize()
        before, self.streams = self.streams, self.streams // 2
        warnings.warn(
            f"{before} clients side by side do not fit into the memory: going on with "
            f"{self.streams}",
            stacklevel=2,
        )

    def _recorded(
        self, bound: Bound, job: Job, plan: Tensor, phases: Phases, slot: int
    ) -> Trained | None:
        """What a client returns, by graphs, or None where there are none."""
        if not self._captures.enabled or plan.device.type != "cuda":
            return None
        what = (id(bound), tuple(phases.items()), shapes_of(job), plan.shape[1])
        key = (*what, slot)

        def begin(job: Job) -> Carry:
            return client.begin(bound, job, phases)

        def step(job: Job, carry: Carry, index: Tensor) -> Carry:
            return client.step(bound, job, carry, index, phases, functional=False)

        def end(job: Job, carry: Carry) -> Trained:
            return _trained(bound, job, carry, phases)

        def fuse(function: Callable[..., Any], *examples: Any) -> Callable[..., Any]:
            """Compiled once for all slots."""
            name = (*what, function.__name__)
            if name not in self._fused:
                self._fused[name] = compiled(function, *examples)
            return self._fused[name]

        rows, fused = tuple(plan.shape[1:]), fuse if self.how.compile else None
        try:
            steps = self._captures.get(
                key, lambda: CapturedSteps(begin, step, end, job, begin(job), rows, fused)
            )
            if steps is None:
                return None
            steps.start(job)
            steps.run(plan)
            return cast(Trained, steps.finish())
        except (RuntimeError, HookError) as error:
            if ran_out_of_memory(error):
                raise
            self._captures.give_up(key, error)
            return None


def _trained(bound: Bound, job: Job, carry: Carry, phases: Phases) -> Trained:
    reply = client.end(bound, job, carry, phases)
    alone = tree.map(lambda x: x.unsqueeze(0), reply)
    return Trained(server.totals(bound, alone, job.anchor), reply.client)


def laid(bound: Bound, value: Tree) -> Tree:
    """Tensors in one piece, those of convolutions as they like it, so that no step turns them."""
    return in_channels_last(value) if bound.model.channels_last else tree.map(_dense, value)


def _dense(x: Tensor) -> Tensor:
    return x.contiguous()


def _put(rows: Tree, i: int, value: Tree, count: int) -> Tree:
    """Write one client's row into a stack of so many, which the first one makes."""
    if i == 0:
        rows = tree.map(lambda x: x.new_empty((count, *x.shape)), value)
    tree.map(lambda row, x: row[i].copy_(x), rows, value)
    return rows
