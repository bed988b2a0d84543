"""Local steps as CUDA graphs: one launch runs several steps of all clients.

A captured graph reads and writes fixed memory, so everything a step depends on is copied into
static buffers at the start of a round: the jobs, the carry, and the rows of the batches. A graph
holds ``UNROLL`` steps where the round is long enough, so that what goes from step to step stays
inside it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.client import Carry, Reply
from kedge.core.view import Job

Step = Callable[[Job, Carry, Tensor], Carry]
UNROLL = 10


class CapturedSteps:
    """Replays ``step`` on static copies of a job and a carry. ``rows`` is the shape of one
    index."""

    def __init__(
        self,
        begin: Callable[[Job], Carry],
        step: Step,
        end: Callable[[Job, Carry], Reply],
        jobs: Job,
        carry: Carry,
        rows: tuple[int, ...],
    ) -> None:
        self.begin, self.step, self.end = begin, step, end
        self.jobs, self.carry = _static(jobs), _static(carry)
        self.rows = rows
        device = next(iter(tree.leaves(carry))).device
        self.index = torch.zeros((UNROLL, *rows), dtype=torch.int64, device=device)
        self._graphs: dict[Any, torch.cuda.CUDAGraph] = {}
        self._reply: Reply | None = None

    def start(self, jobs: Job) -> None:
        """Put a round's jobs into the static buffers and make the first carry of them."""
        _copy(self.jobs, jobs)
        self._run("begin", lambda: _copy(self.carry, self.begin(self.jobs)))

    def finish(self) -> Reply:
        """What the clients return; it stays valid until the next round."""

        def record() -> None:
            self._reply = self.end(self.jobs, self.carry)

        self._run("end", record)
        assert self._reply is not None
        return self._reply

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
        if name not in self._graphs:
            self._graphs[name] = self._capture(work)
        self._graphs[name].replay()

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record some work; the warm-up before it must leave no trace in the carry."""
        before = tree.map(torch.clone, self.carry)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(side)
        _copy(self.carry, before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph

    def _steps(self, count: int, lanes: int | None) -> None:
        carry, jobs = self.carry, self.jobs
        if lanes is not None:
            carry, jobs = tree.take(carry, slice(lanes)), take_jobs(jobs, slice(lanes))
        target = carry
        for t in range(count):
            index = self.index[t] if lanes is None else self.index[t, :lanes]
            carry = self.step(jobs, carry, index)
        _copy(target, carry)


def take_jobs(jobs: Job, index: Any) -> Job:
    """Some clients' jobs; what is shared stays shared."""
    stacked = {"client": jobs.client, "info": jobs.info, "key": jobs.key}
    stacked |= {"counts": jobs.counts, "chunks": jobs.chunks}
    return jobs._replace(**tree.take(stacked, index))


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

    def give_up(self, key: Any, error: Exception) -> None:
        self._made[key] = None
        warnings.warn(
            f"steps could not be recorded as a CUDA graph and run one by one: {error}", stacklevel=2
        )
