"""The clients of a round as an engine gets them, how it is to compute them, and what that gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.server import Totals
from kedge.core.tree import Tree
from kedge.core.view import Info, Job

Phases = dict[str, str]


def on_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """A tensor of numbers. Unlike ``torch.tensor(values, device=...)``, this does not wait until a
    GPU has done all that it was given before."""
    return sent(torch.tensor(values), device)


def sent(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, where that is a GPU without waiting for it."""
    return x.to(device, non_blocking=device.type == "cuda")


class Draw(NamedTuple):
    """What of a round depends on its number, its clients and their work alone, on the host but for
    large plans, so that it can be drawn while the device still works on the round before."""

    round: int
    clients: list[int]
    settings: tuple[Any, ...]
    keys: Tensor
    steps: list[int]
    info: Info
    plan: Tensor  # [K, max steps, batch] positions among the rows of the federation


class Cohort(NamedTuple):
    """The clients of a round: their jobs, stacked, and what they will train on."""

    clients: list[int]
    jobs: Job  # anchor and sent are shared, everything else is stacked [K, ...]
    steps: list[int]
    plan: Tensor  # [K, max steps, batch] rows of the federation


def take_jobs(jobs: Job, index: Any) -> Job:
    """Some clients' jobs; what is shared stays shared."""
    stacked = jobs._asdict()
    if not jobs.fields:  # all of one simulation
        del stacked["anchor"], stacked["sent"]
    return jobs._replace(**tree.take(stacked, index))


class Trained(NamedTuple):
    """What training gave: what the server takes in, and what the clients keep."""

    totals: Totals
    kept: Tree


def copied(totals: Totals) -> Totals:
    """Totals in memory of their own: a recorded graph writes to the same place again."""
    return tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, totals)


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
