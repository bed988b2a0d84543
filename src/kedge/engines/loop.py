"""The loop engine: one client after the other, with plain autograd.

On a GPU the steps of a client are captured as CUDA graphs (:mod:`kedge.engines.capture`) and
replayed, and several clients may run side by side, each on its own stream.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from kedge.core import client, tree
from kedge.core.bound import Bound
from kedge.core.client import Carry, Trained
from kedge.core.model import Model
from kedge.core.ops import Objective, gradient_by, no_saved_tensor_hooks
from kedge.core.part import Part
from kedge.core.tree import Params, Tree, Weights
from kedge.core.update import ZERO, Stacked, Summed, Totals, Update, add, total
from kedge.core.view import Job
from kedge.core.work import single_jobs
from kedge.engines.capture import (
    CapturedSteps,
    Captures,
    Functions,
    is_out_of_memory,
    retry_smaller,
    shapes_of,
    side_by_side,
)
from kedge.engines.cohort import Cohort, Outcome, Reduced, clone
from kedge.engines.compiled import compile_function
from kedge.engines.device import keep_freed_memory
from kedge.engines.engine import Engine, RunFacts, engines
from kedge.engines.execution import Execution
from kedge.engines.layout import EngineLayout, LoopLayout, layout_of, prefers_channels_last
from kedge.engines.ops import FOREACH, IN_PLACE, MAX_DOT_ELEMENTS, may_overwrite
from kedge.engines.torch_private import foreach_add_, gradients
from kedge.errors import HookError, KedgeError

MAX_STREAMS = 4  # eight are no faster on the ResNets of `python -m bench`
T = TypeVar("T")


class Query(NamedTuple):
    """The question to the clients of a cohort."""

    kind: str  # train (reduced), end (as it leaves the client), survey or personal
    phases: dict[str, str]
    part: str = ""  # that surveys


@engines.register("loop")
class Loop(Engine):
    """One client after the other, with plain autograd."""

    name = "loop"
    has_workers = True
    captures: Captures
    #: The loop whose clients are shared among worker processes.
    shared: ClassVar[type[Loop] | None] = None

    def __init__(self, execution: Execution | None = None, capture: bool = True) -> None:
        super().__init__(execution)
        self.captures = Captures(capture)
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self.streams = self.execution.streams  # fewer after CUDA runs out of memory
        self._streams: list[torch.cuda.Stream] = []

    @classmethod
    def create(cls, execution: Execution, device: torch.device) -> Engine:
        if execution.streams and device.type != "cuda":
            raise cls._without_streams(execution, device)
        if not execution.workers:
            return cls(execution)
        assert Loop.shared is not None  # set by kedge.engines.workers
        return Loop.shared.create(execution, device)

    @classmethod
    def candidates(cls, request: RunFacts) -> list[Execution]:
        plain = Execution(cls.name)
        found = [plain]
        streams = min(MAX_STREAMS, request.cohort, request.chunk or MAX_STREAMS)
        if request.device.type == "cuda" and streams > 1:
            found.append(dataclasses.replace(plain, streams=streams))
        workers = min(request.cores, request.cohort)
        if request.device.type == "cpu" and request.can_fork and workers > 1:
            found.append(dataclasses.replace(plain, workers=workers))
        return found

    @classmethod
    def fusible(cls, device: torch.device) -> bool:
        return device.type == "cuda"

    @classmethod
    def is_default(cls, request: RunFacts) -> bool:
        # on a CPU, a grouped convolution over clients is slower than one client at a time
        return request.convolves and request.device.type == "cpu"

    @property
    def shrunk(self) -> bool:
        return self.streams != self.execution.streams

    def prepare(self, model: Model, device: torch.device, dtype: torch.dtype) -> Model:
        layout = LoopLayout if device.type == "cpu" else EngineLayout
        chosen = layout(channels_last=prefers_channels_last(model, device, dtype))
        return model.prepared(chosen, device, dtype)

    def train(self, cohort: Cohort) -> list[Outcome]:
        if cohort.batches.device.type == "cpu":
            keep_freed_memory()
        cohort = cohort.with_states()
        totals, states = self._with_retry(lambda: self._train(cohort))
        return [Outcome(totals, [(list(range(cohort.size)), states)])]

    def survey(self, cohort: Cohort, part: Part) -> Totals:
        cohort, query = cohort.with_states(), Query("survey", cohort.bound.phases, part.name)
        updates = self._with_retry(lambda: self._stack_answers(cohort, query))
        return total(cohort.bound, updates, cohort.jobs.anchor, FOREACH)

    def updates(self, cohort: Cohort, part: str = "") -> Iterator[Trained]:
        cohort = cohort.with_states()
        found = self.answers(cohort, Query("survey" if part else "end", cohort.bound.phases, part))
        return (Trained(update, {}) for update in found) if part else found

    def personal(self, cohort: Cohort) -> Weights:
        cohort, query = cohort.with_states(), Query("personal", cohort.bound.phases)
        return self._with_retry(lambda: self._stack_answers(cohort, query))

    def _train(self, cohort: Cohort) -> tuple[Totals, Tree]:
        found, states, [group] = ZERO, None, cohort.groups
        for i, done in enumerate(self.answers(cohort, Query("train", cohort.bound.phases))):
            new = done.totals.of([group.clients[i]], group.round)
            found = add(found, new, foreach_add_) if i else clone(new)
            states = _write_row(states, i, done.next_state, cohort.size)
        return found, states

    def _stack_answers(self, cohort: Cohort, query: Query) -> Tree:
        rows: Tree = None
        for i, answer in enumerate(self.answers(cohort, query)):
            rows = _write_row(rows, i, answer, cohort.size)
        return rows

    def answers(self, cohort: Cohort, query: Query) -> Iterator[Any]:
        """The clients' answers in the order of the cohort. Each is valid until the next one."""
        bound, jobs, place = cohort.bound, cohort.jobs, layout_of(cohort.bound.model).place
        jobs = jobs._replace(anchor=place(jobs.anchor), sent=place(jobs.sent))
        each = single_jobs(jobs)

        def answer_of(i: int, slot: int = 0) -> Any:
            batches = cohort.batches[i, : cohort.steps[i]]
            return self.answer(bound, each(i), batches, cohort.clients[i], query, slot)

        if self.streams > 1 and cohort.batches.is_cuda:
            while len(self._streams) < self.streams:
                self._streams.append(torch.cuda.Stream(cohort.batches.device))
            return side_by_side(answer_of, cohort.size, self._streams[: self.streams])
        return map(answer_of, range(cohort.size))

    def answer(
        self, bound: Bound, job: Job, batches: Tensor, number: int, query: Query, slot: int = 0
    ) -> Any:
        """The answer of one client.

        Args:
            bound: with the phases of the round.
            job: of the client; ``anchor`` and ``sent`` have the engine's layout.
            batches: ``[steps, batch]`` rows of the data.
            number: of the client, for error messages.
            query: the question.
            slot: of clients that run at the same time, each has its own slot and captured graphs.
        """
        job = job._replace(client=layout_of(bound.model).place(job.client))
        if query.kind == "train" and (done := self._replay(bound, job, batches, slot)):
            return done
        trains = query.kind in ("train", "end")
        carry = run_steps(bound, job, batches, number) if trains else None
        try:
            if carry is not None:
                return (_end if query.kind == "train" else client.end)(bound, job, carry)
            if query.kind == "personal":
                return client.personal(bound, job)
            return client.survey(bound, job, bound.part(query.part))
        except HookError as error:
            raise HookError(f"{error} (client {number})") from error

    def _with_retry(self, work: Callable[[], T]) -> T:
        return retry_smaller(self.captures, work, self._halve_streams)

    def _halve_streams(self) -> None:
        """Run half as many clients side by side from now on."""
        if self.streams < 2:
            raise KedgeError(
                "one client alone does not fit into memory. Make the batch smaller (--batch), "
                "or use a smaller model or --precision bf16"
            )
        for stream in self._streams:
            stream.synchronize()
        before, self.streams = self.streams, self.streams // 2
        warnings.warn(
            f"{before} clients side by side do not fit into memory: continuing with {self.streams}",
            stacklevel=2,
        )

    def _replay(self, bound: Bound, job: Job, batches: Tensor, slot: int) -> Reduced | None:
        """Train one client by replaying captured graphs; None if there are none."""
        if not self.captures.enabled or batches.device.type != "cuda":
            return None
        shapes = (id(bound), shapes_of(job), batches.shape[1])
        key = (*shapes, slot)

        def begin(job: Job) -> Carry:
            return client.begin(bound, job)

        def step(job: Job, carry: Carry, index: Tensor) -> Carry:
            return client.step(bound, job, carry, index, FOREACH)

        def end(job: Job, carry: Carry) -> Reduced:
            return _end(bound, job, carry)

        def fuse(function: Callable[..., Any], *examples: Any) -> Callable[..., Any]:
            """Compile once for all slots."""
            name = (*shapes, function.__name__)
            if name not in self._compiled:
                self._compiled[name] = compile_function(function, *examples)
            return self._compiled[name]

        rows, compiler = tuple(batches.shape[1:]), fuse if self.execution.compile else None
        try:
            steps = self.captures.get(
                key, lambda: CapturedSteps(Functions(begin, step, end), job, rows, compiler)
            )
            if steps is None:
                return None
            steps.start(job)
            steps.run(batches)
            return cast(Reduced, steps.finish())
        except (RuntimeError, HookError) as error:
            if is_out_of_memory(error):
                raise
            self.captures.give_up(key, error)
            return None


def run_steps(bound: Bound, job: Job, batches: Tensor, number: int) -> Carry:
    """Begin a client's round and take its steps.

    Args:
        bound: with the phases of the round.
        job: of the client.
        batches: ``[steps, batch]`` rows of the data.
        number: of the client, for error messages.

    Raises:
        HookError: a hook of a part failed; the message names client and step.
    """
    on_cpu, step = batches.device.type == "cpu", ""
    first = FIRST_STEP if on_cpu else FOREACH
    later = LATER_STEPS if on_cpu and may_overwrite(bound) else first
    try:
        carry = client.begin(bound, job)
        with no_saved_tensor_hooks():
            for t, index in enumerate(batches.unbind()):
                step = f", step {t}"
                carry = client.step(bound, job, carry, index, later if t else first)
    except HookError as error:
        raise HookError(f"{error} (client {number}{step})") from error
    return carry


def _end(bound: Bound, job: Job, carry: Carry) -> Reduced:
    done = client.end(bound, job, carry)
    return Reduced(total_of_one(bound, done.update, job.anchor), done.next_state)


def _write_row(rows: Tree, i: int, value: Tree, count: int) -> Tree:
    """Write one client's row into a stack of ``count``, which row 0 allocates."""
    if i == 0:
        rows = tree.map(lambda x: x.new_empty((count, *x.shape)), value)
    tree.map(lambda row, x: row[i].copy_(x), rows, value)
    return rows


def gradient(objective: Objective, params: Params) -> tuple[Params, Tree]:
    """:func:`kedge.core.ops.gradient`. The caller rejects hooks on saved tensors, once for all
    steps of a client."""
    return gradient_by(gradients, objective, params)


#: The first step of a client, which reads the anchor.
FIRST_STEP = FOREACH._replace(gradient=gradient)
#: Later steps, if they may overwrite the parameters.
LATER_STEPS = IN_PLACE._replace(gradient=gradient)


def total_of_one(bound: Bound, update: Update, anchor: Weights) -> Totals:
    """:func:`kedge.core.update.total` of one client's update."""
    needed = any(bound.needs(what) for what in ("sum", "share_sum", "clients"))
    delta, weight = update.delta, update.weight
    if needed or update.uploads or update.contribution or weight.device.type != "cpu":
        return total(bound, tree.map(lambda x: x.unsqueeze(0), update), anchor, FOREACH)
    sq_norm = _sq_norm(delta.params, weight) * weight
    losses = {name: value.reshape(1) for name, value in update.losses.items()}
    summed = Summed(weight, tree.scale(delta, weight), sq_norm)
    return Totals({}, summed, Stacked(weight.reshape(1), losses), tree.nbytes(delta))


def _sq_norm(params: Params, like: Tensor) -> Tensor:
    """The squared norm of an update; the same sum as in :data:`~kedge.engines.ops.FOREACH`."""
    if any(x.numel() > MAX_DOT_ELEMENTS for x in params.values()):
        stacked = {name: x.unsqueeze(0) for name, x in params.items()}
        return FOREACH.sq_norms(stacked, like.reshape(1))[0]
    dots = (torch.dot(x, x) for x in map(_flat, params.values()))
    return functools.reduce(torch.add, dots) if params else torch.zeros_like(like)


def _flat(x: Tensor) -> Tensor:
    """All elements in the order of memory, so that there is no copy."""
    if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
        x = x.permute(0, 2, 3, 1)
    return x.reshape(-1)
