"""The vector engine: all clients of a round as one batched computation.

Weights are stacked along a client axis, and ``begin``, ``step`` and ``end`` are mapped over it.
Clients with fewer steps than others are not padded. Sorted by decreasing number of steps, the
clients still running at step t are the first k_t of the stack, and step t runs on these alone (a
staircase). On a GPU the steps are captured as CUDA graphs (:mod:`kedge.engines.capture`) and
replayed.

A cohort may hold clients of several runs (:mod:`kedge.sim.fleet`). A cohort that does not fit into
memory is trained chunk by chunk (:func:`train_lanes`): lanes are sorted by decreasing number of
steps and split into chunks of equal size, and the updates of a chunk are reduced run by run before
the next one starts, so memory holds the updates of one chunk at a time.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from kedge.core import client, tree
from kedge.core.bound import Bound
from kedge.core.client import Carry, Trained
from kedge.core.model import Model
from kedge.core.part import Part
from kedge.core.tree import Tree, Weights
from kedge.core.update import ZERO, Totals, add, total
from kedge.core.view import Job
from kedge.core.work import take_jobs
from kedge.engines import convolutions
from kedge.engines.capture import (
    CapturedSteps,
    Captures,
    Functions,
    Step,
    is_out_of_memory,
    retry_smaller,
    shapes_of,
)
from kedge.engines.cohort import Cohort, Outcome, Reduced, clone, take_rows
from kedge.engines.compiled import compile_function
from kedge.engines.engine import EVALUATION_ROWS, Engine, RunFacts, engines
from kedge.engines.execution import Execution
from kedge.engines.lane_bound import LaneBound
from kedge.engines.layout import EngineLayout
from kedge.engines.ops import MAPPED
from kedge.engines.torch_private import over_clients
from kedge.errors import HookError, KedgeError

SHARED: Any = Job(anchor=None, sent=None, client=0, info=0, key=0, counts=0, sweep=0, fields=None)  # type: ignore[arg-type]
MIN_RUNNING_SHARE = 0.25  # of the lanes, for the compiled step of all lanes to run
Variant = tuple[int, bool]  # the binding, and whether updates are reduced
T = TypeVar("T")


class Lanes(NamedTuple):
    """Clients that train as one computation, sorted by decreasing number of steps."""

    jobs: Job
    steps: Sequence[int]
    batches: Tensor  # [lanes, max steps, batch]


@engines.register("vector")
class Vector(Engine):
    """All clients at once, with ``vmap``."""

    name = "vector"
    batches_clients = True
    captures: Captures

    def __init__(self, execution: Execution | None = None, capture: bool = True) -> None:
        super().__init__(execution)
        #: Maximal number of lanes at once; smaller after out of memory.
        self.chunk = self.execution.chunk
        self.captures = Captures(capture)
        self._compiled: dict[Any, Step] = {}

    @classmethod
    def candidates(cls, request: RunFacts) -> list[Execution]:
        return [Execution(cls.name, chunk=request.chunk)]

    @classmethod
    def fusible(cls, device: torch.device) -> bool:
        return True

    @classmethod
    def is_default(cls, request: RunFacts) -> bool:
        return not (request.convolves and request.device.type == "cpu")

    @property
    def shrunk(self) -> bool:
        return self.chunk != self.execution.chunk

    def prepare(self, model: Model, device: torch.device, dtype: torch.dtype) -> Model:
        on_gpu = device.type == "cuda"
        layout = EngineLayout(stacked=on_gpu and convolutions.available())
        return model.prepared(layout, device, dtype)

    def train(self, cohort: Cohort) -> list[Outcome]:
        return self._with_retry(
            cohort.size, lambda: train_lanes(self._train_or_hint, cohort, self.chunk)
        )

    def why_not_together(self, cohort: Cohort) -> str:
        """Tried on one step of two lanes."""
        two = [Position(run, 0, 1) for run in range(len(cohort.groups))][:2]
        jobs, batches = jobs_of(cohort, two)
        begin, step, end = _map_over_clients(cohort.bound, bool(jobs.fields))
        try:
            end(jobs, step(jobs, begin(jobs), batches[:, 0]))
        except Exception as error:  # noqa: BLE001  (the runs then train one by one)
            return str(error) or type(error).__name__
        return ""

    def train_chunk(
        self,
        bound: Bound,
        jobs: Job,
        steps: Sequence[int],
        batches: Tensor,
        reduced: bool = False,
    ) -> Any:
        """Train lanes that are sorted by decreasing number of steps.

        Args:
            bound: in the phases of the round.
            jobs: stacked by lane.
            steps: of every lane.
            batches: ``[lanes, max steps, batch]`` rows of the data.
            reduced: whether to reduce the updates to totals.

        Returns:
            A stacked :class:`Trained`, or :class:`Reduced` if ``reduced``.
        """
        functions = _map_over_clients(bound, bool(jobs.fields))

        def reduce(jobs: Job, carry: Carry) -> Reduced:
            done = end(jobs, carry)
            return Reduced(total(bound, done.update, jobs.anchor, MAPPED), done.next_state)

        end, lanes, variant = functions.end, Lanes(jobs, steps, batches), (id(bound), reduced)
        functions = functions._replace(end=reduce if reduced else end)
        done = self._replay(functions, variant, lanes)
        if done is not None:
            return done._replace(totals=clone(done.totals)) if reduced else done
        return functions.end(jobs, self._run_steps(functions, variant, lanes))

    def _train_or_hint(self, *args: Any) -> Any:
        """:meth:`train_chunk`, with a hint in the message of a HookError."""
        try:
            return self.train_chunk(*args)
        except HookError as error:
            raise HookError(
                f"{error} (all clients at once; engine=loop names the client)"
            ) from error

    def _run_steps(self, functions: Functions, variant: Variant, lanes: Lanes) -> Carry:
        (begin, step, _), (jobs, steps, batches) = functions, lanes
        carry, total = begin(jobs), len(steps)
        full_step = self._compile(step, variant, jobs, carry, batches[:, 0])  # for all lanes
        finished: list[Carry] = []  # in the order of lanes
        stack_size = running = total
        for k, first, last in _staircase(steps):
            if k < running:
                finished.insert(0, tree.take(carry, slice(k, running)))
                running = k
            if k < stack_size and (full_step is step or k < MIN_RUNNING_SHARE * total):
                carry, jobs = tree.take(carry, slice(k)), take_jobs(jobs, slice(k))
                stack_size = k
            advance = full_step if stack_size == total else step
            for t in range(first, last):
                carry = advance(jobs, carry, batches[:stack_size, t])
        return tree.concat([tree.take(carry, slice(running)), *finished])

    def _compile(
        self, step: Step, variant: Variant, jobs: Job, carry: Carry, index: Tensor
    ) -> Step:
        """The step, compiled once for every shape if the execution says so."""
        if not self.execution.compile or jobs.key.is_cuda:
            return step
        key = (variant[0], shapes_of((jobs, carry, index)))
        if key not in self._compiled:
            self._compiled[key] = compile_function(step, jobs, carry, index)
        return self._compiled[key]

    def _replay(self, functions: Functions, variant: Variant, lanes: Lanes) -> Any:
        """Train by replaying captured graphs; None if there are none.

        Graphs are captured for few sizes of the stack. With k clients still running, the next
        larger size is replayed, and the carries of finished clients are restored at the end.
        """
        jobs, steps, batches = lanes
        if not self.captures.enabled or batches.device.type != "cuda":
            return None
        total = len(steps)
        key = (*variant, shapes_of(jobs), batches.shape[2])
        rows = (total, batches.shape[2])
        compiler = compile_function if self.execution.compile else None
        try:
            captured = self.captures.get(
                key, lambda: CapturedSteps(functions, jobs, rows, compiler)
            )
            if captured is None:
                return None
            captured.start(jobs)
            finished: list[tuple[slice, Carry]] = []
            running = total
            by_step = batches.transpose(0, 1)  # [steps, K, batch]
            for k, first, last in _staircase(steps):
                if k < running:
                    span = slice(k, running)
                    carry = tree.take(captured.carry, span)
                    finished.append((span, tree.map(torch.clone, carry)))
                    running = k
                size = _captured_size(k, total)
                captured.run(by_step[first:last, :size], size)
            for span, carry in finished:
                tree.map(lambda t, s: t.copy_(s), tree.take(captured.carry, span), carry)
            return captured.finish()
        except (RuntimeError, HookError) as error:
            if is_out_of_memory(error):
                raise
            self.captures.give_up(key, error)
            return None

    def survey(self, cohort: Cohort, part: Part) -> Totals:
        cohort, bound = cohort.with_states(), cohort.bound
        answer = over_clients(lambda job: client.survey(bound, job, part), SHARED)

        def work() -> Totals:
            found, done, [group] = ZERO, 0, cohort.groups
            for jobs in self._chunks(cohort):
                new = total(bound, answer(jobs), jobs.anchor, MAPPED)
                asked, done = group.clients[done : done + len(jobs.key)], done + len(jobs.key)
                found = add(found, new.of(asked, group.round))
            return found

        return self._with_retry(cohort.size, work)

    def personal(self, cohort: Cohort) -> Weights:
        cohort, bound = cohort.with_states(), cohort.bound
        answer = over_clients(lambda job: client.personal(bound, job), SHARED)
        return self._with_retry(
            cohort.size, lambda: tree.concat([answer(jobs) for jobs in self._chunks(cohort)])
        )

    @torch.no_grad()
    def evaluate(
        self, bound: Bound, weights: Weights, rows: Sequence[Tensor], personal: bool
    ) -> list[dict[str, Tensor]]:
        if bound.model.batchnorm == "batch":
            # batch statistics over padded rows would depend on other clients
            return super().evaluate(bound, weights, rows, personal)
        counts = [len(indices) for indices in rows]
        index = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)  # [clients, max rows]
        column = torch.arange(index.shape[1], device=index.device)
        mask = (column < torch.tensor(counts, device=index.device)[:, None]).to(bound.spec.dtype)

        def test(weights: Weights, rows: Tensor, mask: Tensor) -> dict[str, Tensor]:
            batch = bound.data.clean(rows)
            logits = bound.model.forward(weights, batch.x, "eval").logits
            return bound.sums(logits, batch, mask.to(logits.dtype))

        test_all = over_clients(test, 0 if personal else None, 0, 0)
        total: dict[str, Tensor] = {}
        for piece in torch.split(column, max(1, EVALUATION_ROWS // len(rows))):
            sums = test_all(weights, index[:, piece], mask[:, piece])
            total = tree.add(total, sums) if total else sums
        total = tree.map(lambda x: x.cpu(), total)
        return [tree.take(total, k) if n else {} for k, n in enumerate(counts)]

    # -- memory -------------------------------------------------------------------------------

    def _chunks(self, cohort: Cohort) -> Iterator[Job]:
        count, size = cohort.size, self.chunk or cohort.size
        for i in range(0, count, size):
            yield cohort.jobs if size >= count else take_jobs(cohort.jobs, slice(i, i + size))

    def _with_retry(self, count: int, work: Callable[[], T]) -> T:
        """Call ``work`` on ``count`` lanes; after out of memory, retry with fewer at once."""
        return retry_smaller(self.captures, work, partial(self._shrink, count))

    def _shrink(self, count: int) -> None:
        """Train half as many lanes at once from now on."""
        before = min(self.chunk or count, count)
        if before == 1:
            raise KedgeError(
                "one client alone does not fit into memory. Make the batch smaller (--batch), "
                "use a smaller model or --precision bf16, or try --engine loop"
            )
        self.chunk = before // 2
        warnings.warn(
            f"{before} clients at once do not fit into memory: continuing with {self.chunk}",
            stacklevel=2,
        )


def _map_over_clients(bound: Bound, several: bool = False) -> Functions:
    """``begin``, ``step`` and ``end`` of a client round, mapped over clients. Clients of several
    runs share nothing."""

    def bound_of(job: Job) -> Bound:
        return bound.lane(job.fields) if isinstance(bound, LaneBound) else bound

    def begin(job: Job) -> Carry:
        return client.begin(bound_of(job), job)

    def step(job: Job, carry: Carry, index: Tensor) -> Carry:
        return client.step(bound_of(job), job, carry, index, MAPPED)

    def end(job: Job, carry: Carry) -> Trained:
        return client.end(bound_of(job), job, carry)

    dims = 0 if several else SHARED
    return Functions(
        over_clients(begin, dims), over_clients(step, dims, 0, 0), over_clients(end, dims, 0)
    )


def _staircase(steps: Sequence[int]) -> list[tuple[int, int, int]]:
    """``(clients, first step, end)`` of every range of steps in which the same clients run.

    >>> _staircase([5, 5, 2])
    [(3, 0, 2), (2, 2, 5)]
    """
    ends = sorted(set(steps))
    starts = [0, *ends[:-1]]
    return [(sum(s >= end for s in steps), a, end) for a, end in zip(starts, ends, strict=True)]


def _captured_size(k: int, total: int) -> int:
    """The smallest captured stack of at least k clients: the total, its half, its quarter, ...

    >>> [_captured_size(k, 10) for k in (10, 6, 5, 3, 1)]
    [10, 10, 5, 3, 1]
    """
    size = total
    while size > 1 and (size + 1) // 2 >= k:
        size = (size + 1) // 2
    return size


Train = Callable[..., Any]  # Vector.train_chunk


class Position(NamedTuple):
    """One client of one run."""

    run: int
    position: int  # in its cohort
    steps: int


def train_lanes(train: Train, cohort: Cohort, chunk: int) -> list[Outcome]:
    """Train all lanes, at most ``chunk`` at once (0: all of them)."""
    chunks = split([group.steps for group in cohort.groups], chunk)
    if len(chunks) == len(cohort.groups) == 1:
        return [_train_whole(train, cohort, chunks[0])]
    totals = [ZERO for _ in cohort.groups]
    order: list[list[int]] = [[] for _ in cohort.groups]
    states: list[list[tuple[list[int], Tree]]] = [[] for _ in cohort.groups]
    size = len(chunks[0])
    for lanes in chunks:
        padded = [*lanes, *[lanes[-1]] * (size - len(lanes))]  # one size: one captured graph
        jobs, batches = jobs_of(cohort, padded)
        done: Trained = train(cohort.bound, jobs, [lane.steps for lane in padded], batches)
        for run, rows in _rows_by_run(lanes).items():
            positions, own = [lanes[i].position for i in rows], take_rows(done, rows)
            group = cohort.groups[run]
            new = total(group.bound, own.update, group.anchor, MAPPED)
            state = cohort.park(own.next_state)
            # the next replay of a captured graph overwrites what was not computed from it
            stacked = new.stacked
            cloned = clone({"weight": stacked.weight, "losses": stacked.losses})
            new = new._replace(stacked=stacked._replace(**cloned))
            if len(chunks) > 1:
                state = clone(state)
            asked = [group.clients[i] for i in positions]
            totals[run] = add(totals[run], new.of(asked, group.round))
            order[run] += positions
            states[run].append((positions, state))
        del done, own, state, jobs
    triples = zip(totals, order, states, strict=True)
    return [Outcome(_in_order(found, positions), some) for found, positions, some in triples]


def _train_whole(train: Train, cohort: Cohort, lanes: list[Position]) -> Outcome:
    """Train one run in one chunk, with updates reduced inside the computation."""
    jobs, batches = jobs_of(cohort, lanes)
    done: Reduced = train(cohort.bound, jobs, [lane.steps for lane in lanes], batches, True)
    positions, [group] = [lane.position for lane in lanes], cohort.groups
    totals = done.totals.of([group.clients[i] for i in positions], group.round)
    return Outcome(_in_order(totals, positions), [(positions, cohort.park(done.next_state))])


def split(steps: Sequence[Sequence[int]], chunk: int) -> list[list[Position]]:
    """Lanes sorted by decreasing number of steps, in chunks of equal size but for the last.

    Args:
        steps: the number of steps of every client of every run.
        chunk: the maximal size of a chunk; 0: no limit.

    >>> [[lane.steps for lane in lanes] for lanes in split([[1, 5], [3, 5, 2]], 2)]
    [[5, 5], [3, 2], [1]]
    """
    lanes = [Position(run, i, n) for run, counts in enumerate(steps) for i, n in enumerate(counts)]
    lanes.sort(key=lambda lane: -lane.steps)
    num_chunks = math.ceil(len(lanes) / chunk) if chunk else 1
    size = math.ceil(len(lanes) / num_chunks)
    return [lanes[i : i + size] for i in range(0, len(lanes), size)]


def jobs_of(cohort: Cohort, lanes: list[Position]) -> tuple[Job, Tensor]:
    """The jobs of some lanes, and their batch indices ``[lanes, max steps, batch]``."""
    first = [0, *accumulate(len(group.clients) for group in cohort.groups)]
    rows = [first[lane.run] + lane.position for lane in lanes]
    shared = {name: getattr(cohort.jobs, name) for name in ("anchor", "sent", "fields")}
    stacked = cohort.jobs._replace(anchor=Weights({}, {}), sent={}, fields={})
    if len(cohort.groups) > 1:
        shared = take_rows(shared, [lane.run for lane in lanes])
    jobs = take_rows(stacked, rows)
    client = jobs.client or _states(cohort, lanes)
    return jobs._replace(client=client, **shared), take_rows(cohort.batches, rows)


def _states(cohort: Cohort, lanes: list[Position]) -> Tree:
    """Client state in the order of the lanes."""
    runs = _rows_by_run(lanes)
    states = [cohort.states(run, [lanes[i].position for i in rows]) for run, rows in runs.items()]
    by_run = [i for rows in runs.values() for i in rows]
    inverse = sorted(range(len(lanes)), key=by_run.__getitem__)
    return take_rows(tree.concat(states), inverse)


def _rows_by_run(lanes: list[Position]) -> dict[int, list[int]]:
    """The rows among some lanes that belong to each run."""
    found: dict[int, list[int]] = {}
    for i, lane in enumerate(lanes):
        found.setdefault(lane.run, []).append(i)
    return found


def _in_order(totals: Totals, positions: list[int]) -> Totals:
    """Totals whose clients are in the order of the cohort."""
    inverse = sorted(range(len(positions)), key=positions.__getitem__)
    if inverse == list(range(len(positions))):
        return totals
    asked = list(totals.clients.items())
    stacked = take_rows(totals.stacked, inverse)
    return totals._replace(clients=dict(asked[i] for i in inverse), stacked=stacked)
