"""The input and the output of an engine: the cohort of a round, and its outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.bound import Bound
from kedge.core.tree import Tree, Weights
from kedge.core.update import Totals
from kedge.core.view import Job


class RunGroup(NamedTuple):
    """The clients of one run, and what the server sends them."""

    bound: Bound
    round: int
    clients: list[int]
    steps: list[int]
    anchor: Weights
    sent: dict[str, Tree]


class Cohort(NamedTuple):
    """The clients of a round, of one run or of several runs that train together.

    Of one run, ``jobs.anchor`` and ``jobs.sent`` are shared, and everything else in ``jobs`` is
    stacked by client. Of several, these two and ``jobs.fields`` are stacked by run.

    ``states(run, positions)`` loads client state when a chunk starts, unless ``jobs`` hold it
    already. ``park`` moves the next state to where it stays until the round ends.
    """

    bound: Bound  # in the phases of the round
    groups: list[RunGroup]
    jobs: Job
    batches: Tensor  # [clients, max steps, batch] rows of the data
    states: Callable[[int, list[int]], Tree]
    park: Callable[[Tree], Tree] = lambda state: state

    @property
    def size(self) -> int:
        """The number of clients of all runs."""
        return len(self.batches)

    @property
    def clients(self) -> list[int]:
        """The clients of the first run."""
        return self.groups[0].clients

    @property
    def steps(self) -> list[int]:
        """The numbers of steps of the clients of the first run."""
        return self.groups[0].steps

    def with_states(self) -> Cohort:
        """This cohort with client state in ``jobs``; for one run."""
        if self.jobs.client:
            return self
        states = self.states(0, list(range(self.size)))
        return self._replace(jobs=self.jobs._replace(client=states))


class Reduced(NamedTuple):
    """The result of training, reduced: totals for the server, and the clients' next state."""

    totals: Totals
    next_state: Tree


class Outcome(NamedTuple):
    """The result of a round of one run: totals, and the clients' next state by chunk."""

    totals: Totals
    next_states: list[tuple[list[int], Tree]]  # (positions in the cohort, state)


def clone(value: Tree) -> Tree:
    """A copy of the tensors of a tree. The next replay of a captured graph overwrites them."""
    return tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, value)


def take_rows(stacked: Tree, rows: list[int]) -> Tree:
    """Some rows of every leaf; a view if they are contiguous."""
    first, last = rows[0], rows[-1] + 1
    if rows == list(range(first, last)):
        return tree.map(lambda x: x if last - first == len(x) else x[first:last], stacked)
    indices: dict[torch.device, Tensor] = {}

    def take(x: Tensor) -> Tensor:
        if x.device not in indices:
            indices[x.device] = on_device(rows, x.device)
        return x[indices[x.device]]

    return tree.map(take, stacked)


def on_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """A tensor of numbers. Unlike ``torch.tensor(values, device=...)``, this does not synchronize
    with a GPU."""
    return to_device(torch.tensor(values), device)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device, without synchronizing with a GPU."""
    return x.to(device, non_blocking=device.type == "cuda")
