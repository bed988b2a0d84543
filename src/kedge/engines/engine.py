"""The protocol of an engine, and the registry in which engines are found by name.

A new engine is one class in one file: it derives from :class:`Engine`, is decorated with
``@engines.register("name")``, and is imported by :mod:`kedge.engines`. The laws test it against the
reference.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kedge.core.bound import Bound
from kedge.core.model import Model
from kedge.core.part import Part
from kedge.core.server import Totals
from kedge.core.tree import Weights
from kedge.engines.cohort import Cohort, Outcome
from kedge.engines.execution import Execution
from kedge.errors import FieldError
from kedge.registry import Registry

engines: Registry[type[Engine]] = Registry("engine")


class Request(NamedTuple):
    """What is known of a run before its engine is chosen."""

    device: torch.device
    cohort: int  # clients of a round
    convolves: bool  # whether the model has convolutions
    chunk: int = 0  # clients at once, as the user set it; 0: not set
    cores: int = 1
    can_fork: bool = False  # worker processes can be started
    can_compile: bool = False


class Engine(ABC):
    """Computes the rounds of one simulation, or of several that train together.

    The class variables declare what an engine is able to do; nobody asks for its name.
    """

    name: ClassVar[str]
    #: Clients train as one computation, and so can those of several runs.
    batches_clients: ClassVar[bool] = False
    #: Worker processes can share its clients.
    has_workers: ClassVar[bool] = False
    #: A candidate of ``--engine auto``.
    is_candidate: ClassVar[bool] = True

    def __init__(self, execution: Execution | None = None) -> None:
        self.execution = execution or Execution(self.name)

    @classmethod
    def create(cls, execution: Execution, device: torch.device) -> Engine:
        """An engine for these settings, or a FieldError that says which of them do not fit."""
        if execution.workers:
            raise FieldError(
                f"workers = {execution.workers}: worker processes share the clients of a loop; set "
                f"engine = loop, or leave workers out"
            )
        if execution.streams:
            raise FieldError(
                f"streams = {execution.streams}: clients of a loop train side by side on a GPU, "
                f"but this is engine = {cls.name} on {device.type}; leave streams out"
            )
        return cls(execution)

    @classmethod
    def candidates(cls, request: Request) -> list[Execution]:
        """Settings of this engine that may be the fastest, the simplest first."""
        return [Execution(cls.name)] if cls.is_candidate else []

    @classmethod
    def fusible(cls, device: torch.device) -> bool:
        """Whether steps can be compiled on a device."""
        return False

    @classmethod
    def is_default(cls, request: Request) -> bool:
        """Whether this engine is the one to take where nothing was measured."""
        return False

    @property
    def shrunk(self) -> bool:
        """Whether memory was too small for as many clients at once as there were to be."""
        return False

    @abstractmethod
    def prepare(self, model: Model, device: torch.device, dtype: torch.dtype) -> Model:
        """The model as this engine computes it; the given one stays as it is."""

    @abstractmethod
    def train(self, cohort: Cohort) -> list[Outcome]:
        """Train all clients of a round; one outcome for each run."""

    @abstractmethod
    def survey(self, cohort: Cohort, part: Part) -> Totals:
        """Reduced answers to a part's survey."""

    @abstractmethod
    def personal(self, cohort: Cohort) -> Weights:
        """The weights that each client would use itself, stacked."""

    @abstractmethod
    def evaluate(
        self, bound: Bound, weights: Weights, rows: Sequence[Tensor], personal: bool
    ) -> list[dict[str, Tensor]]:
        """The task's sums over rows of the data, for each client; ``{}`` where it has none.
        ``personal`` says that weights are stacked, one model per client."""

    def why_not_together(self, cohort: Cohort) -> str:
        """Why the runs of a cohort cannot train as one computation; empty if they can."""
        return f"engine {self.name} trains one run at a time"


def make_engine(execution: Execution, device: torch.device) -> Engine:
    """The engine that the settings name."""
    return engines[execution.engine].create(execution, device)


def as_execution(engine: Any) -> Execution:
    """Settings from an engine's name, or as they are."""
    return engine if isinstance(engine, Execution) else Execution(engine)
