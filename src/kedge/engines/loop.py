"""One client after the other: the readable reference.

On a GPU the steps of a client are captured as CUDA graphs (:mod:`kedge.engines.capture`) and
replayed, and several clients may run side by side, each on its own stream.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from kedge.core import client, server, tree
from kedge.core.bound import Bound
from kedge.core.client import Carry, Reply
from kedge.core.model import Model
from kedge.core.part import Part
from kedge.core.server import Totals
from kedge.core.tree import Tree, Weights
from kedge.core.view import Job
from kedge.core.work import take_jobs
from kedge.engines.capture import CapturedSteps, Captures, shapes_of, side_by_side
from kedge.engines.cohort import Cohort, Outcome, Trained, cloned
from kedge.engines.compiled import compiled
from kedge.engines.engine import Engine, Request, engines
from kedge.engines.execution import Execution
from kedge.engines.layout import EngineLayout, layout_of, prefers_channels_last
from kedge.engines.oom import is_out_of_memory, retry_smaller
from kedge.engines.ops import FOREACH, IN_PLACE, may_overwrite
from kedge.engines.reference import sums_over
from kedge.errors import FieldError, HookError, KedgeError

MAX_STREAMS = 4  # clients side by side on a GPU; eight took no less on the ResNets of `kedge bench`
T = TypeVar("T")


class Ask(NamedTuple):
    """What the clients of a cohort are asked for: ``train``, ``survey`` or ``personal``."""

    what: str
    phases: dict[str, str]
    part: str = ""  # whose survey it is


@engines.register("loop")
class Loop(Engine):
    """One client after the other, by plain autograd."""

    name = "loop"
    has_workers = True

    def __init__(self, execution: Execution | None = None, capture: bool = True) -> None:
        super().__init__(execution)
        self._captures = Captures(capture)
        self._fused: dict[Any, Callable[..., Any]] = {}
        self.streams = self.execution.streams  # fewer after CUDA runs out of memory
        self._sides: list[torch.cuda.Stream] = []

    @classmethod
    def create(cls, execution: Execution, device: torch.device) -> Engine:
        from kedge.engines.workers import Workers, check_workers

        if execution.streams and device.type != "cuda":
            raise FieldError(
                f"streams = {execution.streams}: clients of a loop train side by side on a GPU, "
                f"but this is engine = {cls.name} on {device.type}; leave streams out"
            )
        if not execution.workers:
            return cls(execution)
        check_workers(execution.workers, device)
        return Workers(execution)

    @classmethod
    def candidates(cls, request: Request) -> list[Execution]:
        plain = Execution(cls.name)
        ways = [plain]
        streams = min(MAX_STREAMS, request.cohort, request.chunk or MAX_STREAMS)
        if request.device.type == "cuda" and streams > 1:
            ways.append(dataclasses.replace(plain, streams=streams))
        workers = min(request.cores, request.cohort)
        if request.device.type == "cpu" and request.can_fork and workers > 1:
            ways.append(dataclasses.replace(plain, workers=workers))
        return ways

    @classmethod
    def fusible(cls, device: torch.device) -> bool:
        return device.type == "cuda"

    @classmethod
    def is_default(cls, request: Request) -> bool:
        # on a CPU a grouped convolution over clients is slower than one client at a time
        return request.convolves and request.device.type == "cpu"

    @property
    def shrunk(self) -> bool:
        return self.streams != self.execution.streams

    def prepare(self, model: Model, device: torch.device, dtype: torch.dtype) -> Model:
        return model.prepared(
            EngineLayout(channels_last=prefers_channels_last(model, device, dtype))
        )

    def train(self, cohort: Cohort) -> list[Outcome]:
        cohort = cohort.with_states()
        totals, states = self._retrying(lambda: self._train(cohort))
        return [Outcome(totals, [(list(range(cohort.size)), states)])]

    def survey(self, cohort: Cohort, part: Part) -> Totals:
        cohort, ask = cohort.with_states(), Ask("survey", cohort.bound.phases, part.name)
        answers = self._retrying(lambda: self._stacked(cohort, ask))
        return server.survey_totals(part, answers, cohort.jobs.info.weight, FOREACH)

    def personal(self, cohort: Cohort) -> Weights:
        cohort, ask = cohort.with_states(), Ask("personal", cohort.bound.phases)
        return self._retrying(lambda: self._stacked(cohort, ask))

    def evaluate(
        self, bound: Bound, weights: Weights, rows: Sequence[Tensor], personal: bool
    ) -> list[dict[str, Tensor]]:
        every = [tree.take(weights, k) if personal else weights for k in range(len(rows))]
        return [sums_over(bound, w, own) for w, own in zip(every, rows, strict=True)]

    def _train(self, cohort: Cohort) -> tuple[Totals, Tree]:
        total: Totals = {}
        states: Tree = None
        for i, done in enumerate(self.each(cohort, Ask("train", cohort.bound.phases))):
            total = server.add_totals(total, done.totals, True) if i else cloned(done.totals)
            states = _put(states, i, done.next_state, cohort.size)
        return total, states

    def _stacked(self, cohort: Cohort, ask: Ask) -> Tree:
        rows: Tree = None
        for i, answer in enumerate(self.each(cohort, ask)):
            rows = _put(rows, i, answer, cohort.size)
        return rows

    def each(self, cohort: Cohort, ask: Ask) -> Iterator[Any]:
        """The clients' answers in their order; each one is valid until the next is asked for."""
        bound, jobs, place = cohort.bound, cohort.jobs, layout_of(cohort.bound.model).place
        jobs = jobs._replace(anchor=place(jobs.anchor), sent=place(jobs.sent))

        def client_number(i: int, slot: int = 0) -> Any:
            batches = cohort.batches[i, : cohort.steps[i]]
            return self.answer(bound, take_jobs(jobs, i), batches, cohort.clients[i], ask, slot)

        if self.streams > 1 and cohort.batches.is_cuda:
            while len(self._sides) < self.streams:
                self._sides.append(torch.cuda.Stream(cohort.batches.device))
            return side_by_side(client_number, cohort.size, self._sides[: self.streams])
        return map(client_number, range(cohort.size))

    def answer(
        self, bound: Bound, job: Job, batches: Tensor, who: int, ask: Ask, slot: int = 0
    ) -> Any:
        """What one client answers. Its anchor and what was sent are in the engine's layout already;
        clients that run at the same time have different slots, each with graphs of its own."""
        job = job._replace(client=layout_of(bound.model).place(job.client))
        if ask.what == "train":
            done = self._replayed(bound, job, batches, slot)
            if done is None:
                carry = run_steps(bound, job, batches, who)
                with _naming(who):
                    done = _trained(bound, job, carry)
            return done
        with _naming(who):
            if ask.what == "personal":
                return client.personal(bound, job)
            return client.survey(bound, job, bound.part(ask.part))

    def _retrying(self, work: Callable[[], T]) -> T:
        return retry_smaller(self._captures, work, self._narrow)

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

    def _replayed(self, bound: Bound, job: Job, batches: Tensor, slot: int) -> Trained | None:
        """What a client returns, by captured graphs, or None where there are none."""
        if not self._captures.enabled or batches.device.type != "cuda":
            return None
        what = (id(bound), shapes_of(job), batches.shape[1])
        key = (*what, slot)

        def begin(job: Job) -> Carry:
            return client.begin(bound, job)

        def step(job: Job, carry: Carry, index: Tensor) -> Carry:
            return client.step(bound, job, carry, index, FOREACH)

        def end(job: Job, carry: Carry) -> Trained:
            return _trained(bound, job, carry)

        def fuse(function: Callable[..., Any], *examples: Any) -> Callable[..., Any]:
            """Compiled once for all slots."""
            name = (*what, function.__name__)
            if name not in self._fused:
                self._fused[name] = compiled(function, *examples)
            return self._fused[name]

        rows, fused = tuple(batches.shape[1:]), fuse if self.execution.compile else None
        try:
            steps = self._captures.get(
                key, lambda: CapturedSteps(begin, step, end, job, begin(job), rows, fused)
            )
            if steps is None:
                return None
            steps.start(job)
            steps.run(batches)
            return cast(Trained, steps.finish())
        except (RuntimeError, HookError) as error:
            if is_out_of_memory(error):
                raise
            self._captures.give_up(key, error)
            return None


def run_steps(bound: Bound, job: Job, batches: Tensor, who: int) -> Carry:
    """Begin a client's round and take its steps; ``batches`` is ``[steps, batch]``. A hook that
    fails is reported with the client's number ``who``."""
    with _naming(who):
        carry = client.begin(bound, job)
    overwrite = batches.device.type == "cpu" and may_overwrite(bound)
    for t, index in enumerate(batches.unbind()):
        ops = IN_PLACE if overwrite and t else FOREACH  # the first weights are the anchor's
        try:
            carry = client.step(bound, job, carry, index, ops)
        except HookError as error:
            raise HookError(f"{error} (client {who}, step {t})") from error
    return carry


@contextmanager
def _naming(who: int) -> Iterator[None]:
    """Name the client in the error of a hook."""
    try:
        yield
    except HookError as error:
        raise HookError(f"{error} (client {who})") from error


def _trained(bound: Bound, job: Job, carry: Carry) -> Trained:
    done = client.end(bound, job, carry)
    return Trained(totals_of_one(bound, done, job.anchor), done.client)


def totals_of_one(bound: Bound, reply: Reply, anchor: Weights) -> Totals:
    """One client's reply as the server takes it in."""
    alone = tree.map(lambda x: x.unsqueeze(0), reply)
    return server.totals(bound, alone, anchor, FOREACH)


def _put(rows: Tree, i: int, value: Tree, count: int) -> Tree:
    """Write one client's row into a stack of so many, which the first one makes."""
    if i == 0:
        rows = tree.map(lambda x: x.new_empty((count, *x.shape)), value)
    tree.map(lambda row, x: row[i].copy_(x), rows, value)
    return rows
