"""The simulation and the settings of a run, as the choice of an engine sees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kedge.core.bound import Bound, Server
from kedge.core.part import Part
from kedge.core.task import Batch
from kedge.core.tree import Weights
from kedge.core.work import LocalWork
from kedge.engines.cohort import Cohort
from kedge.engines.engine import Engine
from kedge.engines.execution import Execution


@dataclass(frozen=True)
class Settings:
    """Settings of a run that affect its execution.

    ``engine="auto"``, ``compile="auto"``, ``state="auto"``, ``workers=0``, ``chunk=0`` and
    ``threads=0`` leave the choice to the plan.
    """

    rounds: int
    seeds: int = 1
    eval_every: int = 1
    engine: str = "auto"
    workers: int = 0
    threads: int = 0  # on a CPU
    chunk: int = 0
    compile: str = "auto"  # on, off or auto
    state: str = "auto"  # device, host, file or auto
    augment: str = "none"


class Samples(Protocol):
    """The federation of a simulation: its device and sizes."""

    device: torch.device
    sizes: list[int]
    held_out: list[Tensor]
    angles: tuple[float, ...]
    x: Tensor

    @property
    def num_clients(self) -> int: ...

    @property
    def input_shape(self) -> tuple[int, ...]: ...

    @property
    def num_test(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def test_batches(self, angle: float = 0.0, rows: int = 1024) -> Iterator[Batch]: ...


class Subject(Protocol):
    """A simulation on which rounds can be tried."""

    engine: Engine
    bound: Bound

    @property
    def federation(self) -> Samples: ...

    @property
    def server(self) -> Server: ...

    @property
    def weights(self) -> Weights: ...

    @property
    def round(self) -> int: ...

    @property
    def per_round(self) -> int: ...

    work: LocalWork

    def trial(self, execution: Execution, round: int) -> Subject: ...

    def draw_cohort(self, round: int) -> list[int]: ...

    def cohort(self, clients: Sequence[int]) -> Cohort: ...

    def personal(self, clients: Sequence[int] | None = None) -> Weights: ...

    def survey(self, part: Part, clients: Sequence[int] | None) -> int: ...

    def aggregate(self, totals: dict[str, Any]) -> Server: ...

    def sums(self, weights: Weights, batches: Iterable[Batch]) -> dict[str, Tensor]: ...
