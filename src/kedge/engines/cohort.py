"""The clients of a round as an engine gets them, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.bound import Bound
from kedge.core.server import Totals
from kedge.core.tree import Tree, Weights
from kedge.core.view import Job


class Group(NamedTuple):
    """The clients of one run, and what the server sent them."""

    bound: Bound
    clients: list[int]
    steps: list[int]
    anchor: Weights
    sent: dict[str, Tree]


class Cohort(NamedTuple):
    """The clients of a round, of one run or of several that train together.

    ``states(run, places)`` gathers the clients' own state when a chunk is about to start, unless
    ``jobs`` hold it already, and ``park`` puts the next state where it waits for the end of the
    round. Of one run, ``anchor`` and ``sent`` are shared and all else in ``jobs`` is stacked; of
    several, these and ``fields`` are stacked run by run.
    """

    bound: Bound  # with the phases of the round
    groups: list[Group]
    jobs: Job
    batches: Tensor  # [clients, max steps, batch] rows of the data
    states: Callable[[int, list[int]], Tree]
    park: Callable[[Tree], Tree] = lambda state: state

    @property
    def size(self) -> int:
        """Clients of all runs."""
        return len(self.batches)

    @property
    def clients(self) -> list[int]:
        """The clients of the first run."""
        return self.groups[0].clients

    @property
    def steps(self) -> list[int]:
        """Their numbers of steps."""
        return self.groups[0].steps

    def with_states(self) -> Cohort:
        """The same with the clients' own state in ``jobs``; for one run."""
        if self.jobs.client:
            return self
        states = self.states(0, list(range(self.size)))
        return self._replace(jobs=self.jobs._replace(client=states))


class Trained(NamedTuple):
    """What training gave: what the server takes in, and the clients' next state."""

    totals: Totals
    next_state: Tree


class Outcome(NamedTuple):
    """What a run has of a round: totals, and the next state of its clients in pieces."""

    totals: Totals
    next_states: list[tuple[list[int], Tree]]  # (places in the cohort, state)


def cloned(totals: Totals) -> Totals:
    """Totals in memory of their own: a captured graph writes to the same place again."""
    return tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, totals)


def take_rows(stacked: Tree, rows: list[int]) -> Tree:
    """Some rows of every leaf; all of them, or neighbours, are not copied."""
    first, last = rows[0], rows[-1] + 1
    if rows == list(range(first, last)):
        return tree.map(lambda x: x if last - first == len(x) else x[first:last], stacked)
    places: dict[torch.device, Tensor] = {}

    def take(x: Tensor) -> Tensor:
        if x.device not in places:
            places[x.device] = on_device(rows, x.device)
        return x[places[x.device]]

    return tree.map(take, stacked)


def on_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """A tensor of numbers. Unlike ``torch.tensor(values, device=...)``, this does not wait until a
    GPU has done all that it was given before."""
    return to_device(torch.tensor(values), device)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, without waiting for a GPU."""
    return x.to(device, non_blocking=device.type == "cuda")
