"""The clients of a round, as an engine gets them."""

from __future__ import annotations

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
