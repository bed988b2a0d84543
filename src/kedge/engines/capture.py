"""Local steps as CUDA graphs: one launch runs several steps of all clients.

A captured graph reads and writes fixed memory, so everything a step depends on is copied into
static buffers at the start of a round: the jobs, the carry, and the rows of the batches. A graph
holds ``UNROLL`` steps where the round is long enough, so that what goes from step to step stays
inside it. Several clients may run their graphs at the same time, on streams of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.client import Carry
from kedge.core.view import Job
from kedge.core.work import take_jobs

Step = Callable[[Job, Carry, Tensor], Carry]
Fuse = Callable[..., Callable[..., Any]]  # of a function and examples of what it will be given
UNROLL = 10


class CapturedSteps:
    """Replays ``step`` on static copies of a job and a carry. ``rows`` is the shape of one
    index."""

    def __init__(
        self,
        begin: Callable[[Job], Carry],
        step: Step,
        end: Callable[[Job, Carry], Any],
        jobs: Job,
        carry: Carry,
        rows: tuple[int, ...],
        fuse: Fuse | None = None,
    ) -> None:
        self.begin, self.step, self.end = begin, step, end
        self.jobs, self.rows = _static(jobs), rows
        self._device = next(iter(tree.leaves(carry))).device
        self.index = torch.zeros((UNROLL, *rows), dtype=torch.int64, device=self._device)
        # laid out as a step returns it, so that every step finds what the one before it left
        self.carry = _static(step(self.jobs, carry, self.index[0]))
        self.whole = step  # for all lanes
        if fuse is not None:
            self.whole = fuse(step, self.jobs, self.carry, self.index[0])
            self.end = fuse(end, self.jobs, self.carry)
        self._graphs: dict[Any, torch.cuda.CUDAGraph] = {}
        # graphs run one after the other, and what they leave behind is copied or held, so that
        # they can share their memory
        self._pool = torch.cuda.graph_pool_handle()
        self._result: Any = None

    def start(self, jobs: Job) -> None:
        """Put a round's jobs into the static buffers and make the first carry of them."""
        _copy(self.jobs, jobs)
        self._run("begin", lambda: _copy(self.carry, self.begin(self.jobs)))

    def finish(self) -> Any:
        """What ``end`` gives; it stays valid until the next round."""

        def record() -> None:
            self._result = self.end(self.jobs, self.carry)

        self._run("end", record)
        return self._result

    def run(self, plan: Tensor, lanes: int | None = None) -> None:
        """Steps on ``plan`` ``[steps, *rows]``, on the first ``lanes`` clients (None: no such
        axis)."""
        done, total = 0, len(plan)
        while done < total:
            count = UNROLL if total - done >= UNROLL else 1
            if total <= UNROLL and done == 0:
                count = total  # a short round is one graph
            piece = plan[done : done + count]
            target = self.index[:count] if lanes is None else self.index[:count, :lanes]
            target.copy_(piece)
            self._run((count, lanes), partial(self._steps, count, lanes))
            done += count

    def _run(self, name: Any, work: Callable[[], None]) -> None:
        """Replay a piece of work, recorded the first time it is asked for."""
        with torch.cuda.device(self._device):  # of several, graphs belong to the current one
            if name not in self._graphs:
                self._graphs[name] = self._capture(work)
            self._graphs[name].replay()

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record some work; the warm-up before it must leave no trace in the carry.

        Graphs that were recorded on one stream share the memory in which its matrix products are
        computed, so what will run at the same time is recorded on the streams that it runs on.
        """
        before = tree.map(torch.clone, self.carry)
        here = torch.cuda.current_stream()
        alone = here == torch.cuda.default_stream()  # on which nothing can be recorded
        side = torch.cuda.Stream() if alone else here
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(2):
                work()
        here.wait_stream(side)
        _copy(self.carry, before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=None if alone else here):
            work()
        return graph

    def _steps(self, count: int, lanes: int | None) -> None:
        carry, jobs = self.carry, self.jobs
        if lanes is not None:
            carry, jobs = tree.take(carry, slice(lanes)), take_jobs(jobs, slice(lanes))
        target = carry
        step = self.whole if lanes is None or lanes == self.rows[0] else self.step
        for t in range(count):
            index = self.index[t] if lanes is None else self.index[t, :lanes]
            carry = step(jobs, carry, index)
        _copy(target, carry)


def _static(value: Any) -> Any:
    return tree.map(torch.clone, value)


def _copy(target: Any, source: Any) -> None:
    tree.map(lambda t, s: t.copy_(s), target, source)


def shapes_of(value: Any) -> tuple[Any, ...]:
    """What must stay the same for a graph to be reused."""
    return tuple((tuple(x.shape), x.dtype) for x in tree.leaves(value))


class Captures:
    """Graphs by what they were recorded for; recording that fails is remembered, too."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._made: dict[Any, CapturedSteps | None] = {}

    def get(self, key: Any, make: Callable[[], CapturedSteps]) -> CapturedSteps | None:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def __len__(self) -> int:
        return len(self._made)

    def forget(self) -> None:
        """Let all graphs go, which hold memory of their own."""
        self._made.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def give_up(self, key: Any, error: Exception) -> None:
        self._made[key] = None
        warnings.warn(
            f"steps could not be recorded as a CUDA graph and run one by one: {error}", stacklevel=2
        )


def side_by_side(
    work: Callable[[int, int], Any], count: int, sides: Sequence[torch.cuda.Stream]
) -> Iterator[Any]:
    """``work(i, slot)`` for every i, as many at a time as there are streams, in order."""
    main = torch.cuda.current_stream(sides[0].device)
    waiting: list[tuple[Any, torch.cuda.Stream]] = []

    def taken() -> Any:
        done, side = waiting.pop(0)
        main.wait_stream(side)
        for x in tree.leaves(done):
            if isinstance(x, Tensor):
                x.record_stream(main)  # its memory must not be given away before it is read
        return done

    try:
        for i in range(count):
            slot = i % len(sides)
            side = sides[slot]
            side.wait_stream(main)
            with torch.cuda.stream(side):
                waiting.append((work(i, slot), side))
            if len(waiting) == len(sides):
                yield taken()
        while waiting:
            yield taken()
    finally:  # whatever happens: what they read must not be given away before
        for side in sides:
            main.wait_stream(side)
