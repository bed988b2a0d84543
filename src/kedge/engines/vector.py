"""All clients of a round as one batched computation.

Their weights are stacked along a first axis and the same ``begin``, ``step`` and ``end`` are mapped
over it. Clients with fewer steps than others are not padded: sorted by their number of steps, those
still running at step t are the first k_t of the stack, and step t runs on just these (a staircase).
On a GPU the steps are captured as CUDA graphs (:mod:`kedge.engines.capture`) and replayed.

A cohort may hold clients of several runs (:mod:`kedge.sim.fleet`), and one that is too large for
the memory is trained chunk by chunk (:mod:`kedge.engines.lanes`).
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
from kedge.core.model import Model
from kedge.core.part import Part
from kedge.core.server import Totals
from kedge.core.tree import Weights
from kedge.core.view import Job
from kedge.core.work import take_jobs
from kedge.engines import lanes, stacked
from kedge.engines.capture import CapturedSteps, Captures, shapes_of
from kedge.engines.cohort import Cohort, Outcome, Trained, cloned
from kedge.engines.compiled import compiled
from kedge.engines.engine import Engine, Request, engines
from kedge.engines.execution import Execution
from kedge.engines.lane_bound import LaneBound
from kedge.engines.lanes import Lane
from kedge.engines.layout import EngineLayout
from kedge.engines.oom import is_out_of_memory, retry_smaller
from kedge.engines.ops import MAPPED
from kedge.engines.reference import EVALUATION_ROWS, sums_over
from kedge.engines.torch_private import over_clients
from kedge.errors import HookError, KedgeError

SHARED: Any = Job(anchor=None, sent=None, client=0, info=0, key=0, counts=0, chunks=0, fields=None)  # type: ignore[arg-type]
MAX_IDLE = 4  # a compiled step of all lanes is taken as long as one in so many still runs
Begin = Callable[[Job], Carry]
Step = Callable[[Job, Carry, Tensor], Carry]
End = Callable[[Job, Carry], Reply]
What = tuple[int, bool]  # the binding, and whether replies are reduced
T = TypeVar("T")


@engines.register("vector")
class Vector(Engine):
    """All clients at once, by ``vmap``."""

    name = "vector"
    batches_clients = True

    def __init__(self, execution: Execution | None = None, capture: bool = True) -> None:
        super().__init__(execution)
        self.chunk = self.execution.chunk  # lanes at once, at most; less after out of memory
        self._captures = Captures(capture)
        self._compiled: dict[Any, Step] = {}

    @classmethod
    def candidates(cls, request: Request) -> list[Execution]:
        return [Execution(cls.name, chunk=request.chunk)]

    @classmethod
    def fusible(cls, device: torch.device) -> bool:
        return True

    @classmethod
    def is_default(cls, request: Request) -> bool:
        return not (request.convolves and request.device.type == "cpu")

    @property
    def shrunk(self) -> bool:
        return self.chunk != self.execution.chunk

    def prepare(self, model: Model, device: torch.device, dtype: torch.dtype) -> Model:
        on_gpu = device.type == "cuda"
        return model.prepared(EngineLayout(stacked=on_gpu and stacked.available()))

    def train(self, cohort: Cohort) -> list[Outcome]:
        """As many lanes at once as there is memory for."""
        return self._retrying(cohort.size, lambda: lanes.train(self._named, cohort, self.chunk))

    def why_not_together(self, cohort: Cohort) -> str:
        """Seen on one step of two lanes."""
        two = [Lane(run, 0, 1) for run in range(len(cohort.groups))][:2]
        jobs, batches = lanes.some_jobs(cohort, two)
        begin, step, end = _mapped(cohort.bound, bool(jobs.fields))
        try:
            end(jobs, step(jobs, begin(jobs), batches[:, 0]))
        except Exception as error:  # noqa: BLE001  (whatever it is, they run one by one)
            return str(error) or type(error).__name__
        return ""

    def replies(
        self,
        bound: Bound,
        jobs: Job,
        steps: Sequence[int],
        batches: Tensor,
        reduced: bool = False,
    ) -> Any:
        """What clients return, who are sorted by falling number of steps: a :class:`Reply`, or,
        ``reduced`` to what the server takes in, :class:`Trained`."""
        begin, step, reply = _mapped(bound, bool(jobs.fields))

        def trained(jobs: Job, carry: Carry) -> Trained:
            every = reply(jobs, carry)
            return Trained(server.totals(bound, every, jobs.anchor, MAPPED), every.client)

        end, what = trained if reduced else reply, (id(bound), reduced)
        done = self._replayed(begin, step, end, what, jobs, steps, batches)
        if done is not None:
            return done._replace(totals=cloned(done.totals)) if reduced else done
        return end(jobs, self._stepwise(begin, step, what, jobs, steps, batches))

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
        batches: Tensor,
    ) -> Carry:
        carry, total = begin(jobs), len(steps)
        whole = self._fused(step, what, jobs, carry, batches[:, 0])  # for all lanes
        finished: list[Carry] = []  # those that ran out of steps, last clients first
        running_lanes = running = total
        for k, first, last in _stairs(steps):
            if k < running:
                finished.insert(0, tree.take(carry, slice(k, running)))
                running = k
            if k < running_lanes and (whole is step or k * MAX_IDLE < total):
                carry, jobs = tree.take(carry, slice(k)), take_jobs(jobs, slice(k))
                running_lanes = k
            advance = whole if running_lanes == total else step
            for t in range(first, last):
                carry = advance(jobs, carry, batches[:running_lanes, t])
        return tree.concat([tree.take(carry, slice(running)), *finished])

    def _fused(self, step: Step, what: What, jobs: Job, carry: Carry, index: Tensor) -> Step:
        """The step as the compiler made it, if it is to: once for every shape."""
        if not self.execution.compile or jobs.key.is_cuda:
            return step
        key = (what[0], shapes_of((jobs, carry, index)))
        if key not in self._compiled:
            self._compiled[key] = compiled(step, jobs, carry, index)
        return self._compiled[key]

    def _replayed(
        self,
        begin: Begin,
        step: Step,
        end: Callable[[Job, Carry], Any],
        what: What,
        jobs: Job,
        steps: Sequence[int],
        batches: Tensor,
    ) -> Any:
        """The same by captured graphs, or None where there are none.

        A graph is captured for few sizes of the stack only: with k clients left, the next larger
        size runs, and what it does to clients that have finished is overwritten in the end.
        """
        if not self._captures.enabled or batches.device.type != "cuda":
            return None
        total = len(steps)
        key = (*what, shapes_of(jobs), batches.shape[2])
        rows, fused = (total, batches.shape[2]), compiled if self.execution.compile else None
        try:
            captured = self._captures.get(
                key, lambda: CapturedSteps(begin, step, end, jobs, begin(jobs), rows, fused)
            )
            if captured is None:
                return None
            captured.start(jobs)
            finished: list[tuple[slice, Carry]] = []
            running = total
            by_step = batches.transpose(0, 1)  # [steps, K, batch]
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
            if is_out_of_memory(error):
                raise
            self._captures.give_up(key, error)
            return None

    def survey(self, cohort: Cohort, part: Part) -> Totals:
        cohort, bound = cohort.with_states(), cohort.bound
        ask = over_clients(lambda job: client.survey(bound, job, part), SHARED)

        def work() -> Totals:
            total: Totals = {}
            for jobs in self._chunks(cohort):
                found = server.survey_totals(part, ask(jobs), jobs.info.weight, MAPPED)
                total = server.add_totals(total, found) if total else found
            return total

        return self._retrying(cohort.size, work)

    def personal(self, cohort: Cohort) -> Weights:
        cohort, bound = cohort.with_states(), cohort.bound
        ask = over_clients(lambda job: client.personal(bound, job), SHARED)
        return self._retrying(
            cohort.size, lambda: tree.concat([ask(jobs) for jobs in self._chunks(cohort)])
        )

    @torch.no_grad()
    def evaluate(
        self, bound: Bound, weights: Weights, rows: Sequence[Tensor], personal: bool
    ) -> list[dict[str, Tensor]]:
        if bound.model.batchnorm == "batch":
            # normalised by the batch at hand, a client's result would depend on the others
            every = [tree.take(weights, k) if personal else weights for k in range(len(rows))]
            return [sums_over(bound, w, own) for w, own in zip(every, rows, strict=True)]
        counts = [len(own) for own in rows]
        index = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)  # [N, most]
        place = torch.arange(index.shape[1], device=index.device)
        mask = (place < torch.tensor(counts, device=index.device)[:, None]).to(bound.spec.dtype)

        def test(weights: Weights, rows: Tensor, mask: Tensor) -> dict[str, Tensor]:
            batch = bound.data.clean(rows)
            logits = bound.model.forward(weights, batch.x, "eval").logits
            return bound.task.sums(logits, batch, mask.to(logits.dtype))

        every_client = over_clients(test, 0 if personal else None, 0, 0)
        total: dict[str, Tensor] = {}
        for piece in torch.split(place, max(1, EVALUATION_ROWS // len(rows))):
            sums = every_client(weights, index[:, piece], mask[:, piece])
            total = tree.add(total, sums) if total else sums
        total = tree.map(lambda x: x.cpu(), total)
        return [tree.take(total, k) if n else {} for k, n in enumerate(counts)]

    # -- memory -------------------------------------------------------------------------------

    def _chunks(self, cohort: Cohort) -> Iterator[Job]:
        count, size = cohort.size, self.chunk or cohort.size
        for i in range(0, count, size):
            yield cohort.jobs if size >= count else take_jobs(cohort.jobs, slice(i, i + size))

    def _retrying(self, count: int, work: Callable[[], T]) -> T:
        """Do some work on so many lanes; after out of memory, again on fewer at once."""
        return retry_smaller(self._captures, work, partial(self._shrink, count))

    def _shrink(self, count: int) -> None:
        """Train half as many lanes at once from now on."""
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


def _mapped(bound: Bound, several: bool = False) -> tuple[Begin, Step, End]:
    """The three functions of a client round, over all clients at once; those of several runs share
    nothing."""

    def own(job: Job) -> Bound:
        return bound.lane(job.fields) if isinstance(bound, LaneBound) else bound

    def begin(job: Job) -> Carry:
        return client.begin(own(job), job)

    def step(job: Job, carry: Carry, index: Tensor) -> Carry:
        return client.step(own(job), job, carry, index, MAPPED)

    def end(job: Job, carry: Carry) -> Reply:
        return client.end(own(job), job, carry)

    job = 0 if several else SHARED
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
