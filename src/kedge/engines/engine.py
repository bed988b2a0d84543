"""The protocol of an engine, the registry of engines, and the reference engine.

A new engine is one class in one file. It derives from :class:`Engine`, is decorated with
``@engines.register("name")`` and imported by :mod:`kedge.engines`. The laws compare it with the
reference engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kedge.core import client, tree
from kedge.core.bound import Bound
from kedge.core.client import Trained
from kedge.core.model import Model
from kedge.core.part import Part
from kedge.core.task import Batch
from kedge.core.tree import Weights
from kedge.core.update import Totals, total
from kedge.core.work import take_jobs
from kedge.engines.capture import Captures
from kedge.engines.cohort import Cohort, Outcome
from kedge.engines.execution import Execution
from kedge.errors import FieldError, KedgeError
from kedge.registry import Registry

engines: Registry[type[Engine]] = Registry("engine")


EVALUATION_ROWS = 1024  # per forward pass


class RunFacts(NamedTuple):
    """The facts about a run that decide which executions are candidates."""

    device: torch.device
    cohort: int  # clients per round
    convolves: bool  # the model has convolutions
    chunk: int = 0  # clients at once, set by the user; 0: not set
    cores: int = 1
    can_fork: bool = False  # worker processes can start
    can_compile: bool = False


class Engine(ABC):
    """Computes the rounds of one run, or of several runs that train together.

    The class variables declare the abilities of an engine. Callers ask for these, never for the
    name.
    """

    name: ClassVar[str]
    #: Trains all clients as one computation, also those of several runs.
    batches_clients: ClassVar[bool] = False
    #: Can share its clients among worker processes.
    has_workers: ClassVar[bool] = False
    #: Is a candidate of ``--engine auto``.
    is_candidate: ClassVar[bool] = True

    #: Where graphs are kept; None: this engine captures none.
    captures: Captures | None = None

    def __init__(self, execution: Execution | None = None) -> None:
        self.execution = execution or Execution(self.name)

    @classmethod
    def create(cls, execution: Execution, device: torch.device) -> Engine:
        """An engine with these settings.

        Raises:
            FieldError: the engine, or the device, does not support one of the settings.
        """
        if execution.workers:
            raise FieldError(
                f"workers = {execution.workers}: worker processes share the clients of a loop; set "
                f"engine = loop, or leave workers out"
            )
        if execution.streams:
            raise cls._without_streams(execution, device)
        return cls(execution)

    @classmethod
    def _without_streams(cls, execution: Execution, device: torch.device) -> FieldError:
        return FieldError(
            f"streams = {execution.streams}: clients of a loop train side by side on a GPU, "
            f"but this is engine = {cls.name} on {device.type}; leave streams out"
        )

    @classmethod
    def candidates(cls, request: RunFacts) -> list[Execution]:
        """Executions of this engine to compare for a run, the simplest first."""
        return [Execution(cls.name)] if cls.is_candidate else []

    @classmethod
    def fusible(cls, device: torch.device) -> bool:
        """Whether this engine can compile steps on a device."""
        return False

    @classmethod
    def is_default(cls, request: RunFacts) -> bool:
        """Whether this engine is the default for a run that is not measured."""
        return False

    @property
    def shrunk(self) -> bool:
        """Whether fewer clients than set train at once, after out of memory."""
        return False

    @abstractmethod
    def prepare(self, model: Model, device: torch.device, dtype: torch.dtype) -> Model:
        """A copy of the model with this engine's layout; see ``Model.prepared``.

        Args:
            model: as the user gave it; it is not changed.
            device: of the run.
            dtype: of weights and inputs.
        """

    @abstractmethod
    def train(self, cohort: Cohort) -> list[Outcome]:
        """Train all clients of a round. Returns one outcome per run."""

    @abstractmethod
    def survey(self, cohort: Cohort, part: Part) -> Totals:
        """The totals of the answers to a part's survey, without the numbers of the clients."""

    def updates(self, cohort: Cohort, part: str = "") -> Iterator[Trained]:
        """What each client sends, one after the other, after training or as its answer to a part's
        survey, and its next state."""
        raise KedgeError(f"engine {self.name} reduces the updates of all clients at once")

    @abstractmethod
    def personal(self, cohort: Cohort) -> Weights:
        """The personal weights of every client, stacked along a first axis."""

    def evaluate(
        self, bound: Bound, weights: Weights, rows: Sequence[Tensor], personal: bool
    ) -> list[dict[str, Tensor]]:
        """The task's sums over rows of the data, one dictionary per client.

        Args:
            bound: the method and the data.
            weights: of one model, or of one per client, stacked.
            rows: of each client, ``[n_k]``.
            personal: whether ``weights`` are stacked.

        Returns:
            ``{}`` for a client without rows.
        """
        each = (tree.take(weights, k) if personal else weights for k in range(len(rows)))
        return [sums_over(bound, w, indices) for w, indices in zip(each, rows, strict=True)]

    def why_not_together(self, cohort: Cohort) -> str:
        """Why the runs of a cohort cannot train as one computation; empty if they can."""
        return f"engine {self.name} trains one run at a time"


def make_engine(execution: Execution, device: torch.device) -> Engine:
    """The engine of an execution.

    >>> make_engine(Execution("loop"), torch.device("cpu")).name
    'loop'

    Raises:
        UnknownName: there is no such engine.
        FieldError: the engine, or the device, does not support one of the settings.
    """
    return engines[execution.engine].create(execution, device)


def as_execution(engine: Any) -> Execution:
    """The execution, made from a name if need be."""
    return engine if isinstance(engine, Execution) else Execution(engine)


def sums_over(bound: Bound, weights: Weights, rows: Tensor) -> dict[str, Tensor]:
    """The task's sums of one model over rows ``[n]`` of the data; ``{}`` for no rows."""
    pieces = torch.split(rows, EVALUATION_ROWS) if len(rows) else ()
    return metric_sums(bound, weights, map(bound.data.clean, pieces))


@torch.no_grad()
def metric_sums(bound: Bound, weights: Weights, batches: Iterable[Batch]) -> dict[str, Tensor]:
    """The task's sums of one model over batches; ``{}`` for no batch."""
    total: dict[str, Tensor] = {}
    for batch in batches:
        logits = bound.model.forward(weights, batch.x, "eval").logits
        ones = torch.ones(len(logits), dtype=logits.dtype, device=logits.device)
        sums = bound.sums(logits, batch, ones)
        total = tree.add(total, sums) if total else sums
    return total


# -- The reference engine: one client after the other, in plain PyTorch ----------------------------


@engines.register("reference")
class Reference(Engine):
    """Plain PyTorch on the model as the user gave it: slow, easy to read, and the standard of
    correctness with which the laws compare every other engine."""

    name = "reference"
    is_candidate = False

    def prepare(self, model: Model, device: torch.device, dtype: torch.dtype) -> Model:
        return model.prepared(model.layout, device, dtype)

    def train(self, cohort: Cohort) -> list[Outcome]:
        done: Trained = tree.stack(list(self.updates(cohort)))
        [group] = cohort.groups
        totals = total(cohort.bound, done.update, cohort.jobs.anchor)
        states = [(list(range(cohort.size)), done.next_state)]
        return [Outcome(totals.of(group.clients, group.round), states)]

    def survey(self, cohort: Cohort, part: Part) -> Totals:
        updates = tree.stack([done.update for done in self.updates(cohort, part.name)])
        return total(cohort.bound, updates, cohort.jobs.anchor)

    def updates(self, cohort: Cohort, part: str = "") -> Iterator[Trained]:
        bound, jobs = cohort.bound, cohort.with_states().jobs
        for i in range(cohort.size):
            job = take_jobs(jobs, i)
            if part:
                yield Trained(client.survey(bound, job, bound.part(part)), job.client)
                continue
            carry = client.begin(bound, job)
            for index in cohort.batches[i, : cohort.steps[i]]:
                carry = client.step(bound, job, carry, index)
            yield client.end(bound, job, carry)

    def personal(self, cohort: Cohort) -> Weights:
        jobs = cohort.with_states().jobs
        each = (take_jobs(jobs, i) for i in range(cohort.size))
        return tree.stack([client.personal(cohort.bound, job) for job in each])
