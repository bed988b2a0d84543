"""The clients of a round as an engine gets them, and how it is to compute them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from kedge.core.view import Job

Phases = dict[str, str]


class Cohort(NamedTuple):
    """The clients of a round: their jobs, stacked, and what they will train on."""

    clients: list[int]
    jobs: Job  # anchor and sent are shared, everything else is stacked [K, ...]
    steps: list[int]
    plan: Tensor  # [K, max steps, batch] rows of the federation


@dataclass(frozen=True)
class How:
    """How rounds are computed. None of it changes what is computed, but for rounding."""

    engine: str = "vector"
    workers: int = 0  # processes that share the clients of a loop on a CPU; 0: this one alone
    chunk: int = 0  # clients at once, at most; 0: the whole cohort
    streams: int = 0  # clients of a loop side by side on a GPU; 0: one
    compile: bool = False  # let torch's compiler fuse the steps (of a loop: on a GPU)
    state: str = "device"  # where clients' own state lies: device, host or file
    folder: str = ""  # where such a file lies; "": where temporary files do
