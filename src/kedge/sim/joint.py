"""The data and the cohorts of several simulations as one.

What a round needs for every client (keys, numbers, rows of the batches) is formed for the clients
of all simulations in one go.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kedge.core import rng, tree
from kedge.core.bound import client_key
from kedge.core.tree import Tree
from kedge.core.view import Chunks, Info, Job
from kedge.data.federation import HOST_PLAN, Federation, batch_plan
from kedge.engines.cohort import on_device
from kedge.engines.lane_bound import OPTIM, LaneBound, difference
from kedge.engines.lanes import Group, Stack

if TYPE_CHECKING:
    from kedge.sim.simulation import Simulation


class Joint:
    """Several simulations, and :meth:`stack`, which forms the stack of a round."""

    def __init__(self, sims: Sequence[Simulation]) -> None:
        self.sims, bounds = list(sims), [sim.bound for sim in sims]
        data, self._starts = _joined([sim.federation for sim in sims])
        self.bound = LaneBound(bounds, data)
        self._fields = self.bound.fields(bounds)
        self._roots = torch.stack([sim.key.cpu() for sim in sims])
        pairs = zip(sims, self._starts, strict=True)
        self._rows = torch.cat([sim.federation.rows + start for sim, start in pairs])
        self._first_row = [0, *accumulate(len(sim.federation.rows) for sim in sims)]
        self._ahead: tuple[Any, Tensor, Tensor] | None = None

    def draw_ahead(self, round: int) -> None:
        """Draw what a later round will do, while a GPU still works on the present one."""
        if self.sims[0].draws_ahead:
            clients = [sim.draw_cohort(round) for sim in self.sims]
            self._ahead = self._what(clients, round), *self._draw(clients, round)

    def stack(self, clients: Sequence[list[int]], round: int) -> Stack:
        """All cohorts of a round as one."""
        sims = self.sims
        groups = [
            Group(
                bound=sim.bound,
                clients=own,
                steps=[sim.work.steps_for(sim.federation.sizes[k]) for k in own],
                anchor=sim.server.weights,
                sent=sim.bound.sent(sim.server),
            )
            for sim, own in zip(sims, clients, strict=True)
        ]
        if self._ahead is not None and self._ahead[0] == self._what(clients, round):
            keys, plan = self._ahead[1:]
        else:
            keys, plan = self._draw(clients, round)
        rows = self._rows[plan.to(self._rows.device)]
        return Stack(
            self.bound, groups, self._jobs(groups, round, keys), rows, *stores(sims, groups)
        )

    def _what(self, clients: Sequence[list[int]], round: int) -> Any:
        """All that a draw depends on."""
        return round, list(clients), [sim.work for sim in self.sims]

    def _draw(self, clients: Sequence[list[int]], round: int) -> tuple[Tensor, Tensor]:
        """Keys of all lanes, and where in ``_rows`` the rows of their batches lie."""
        owners = torch.tensor([s for s, own in enumerate(clients) for _ in own])
        ids = torch.tensor([k for own in clients for k in own])
        keys = client_key(self._roots[owners], round, ids)  # on the host, which is quick at this
        return keys, self._plan(clients, rng.fold(keys, "plan"))

    def _jobs(self, groups: list[Group], round: int, keys: Tensor) -> Job:
        sims, fed = self.sims, self.sims[0].federation
        lanes = [(sims[s], k) for s, group in enumerate(groups) for k in group.clients]
        rates = {id(sim): sim.bound.lr(round) for sim in sims}
        sizes = [sim.federation.sizes[k] for sim, k in lanes]
        # formed on the host, whose columns travel to the device together
        ids = torch.tensor([[k for _, k in lanes], [round] * len(lanes)]).to(fed.device)
        steps = torch.tensor([n for group in groups for n in group.steps], dtype=fed.dtype)
        numbers = [
            [rates[id(sim)] for sim, _ in lanes],
            sizes,
            [n if sim.weighting == "size" else 1 for (sim, _), n in zip(lanes, sizes, strict=True)],
        ]
        columns = [steps, self._effective(groups, steps), *torch.tensor(numbers, dtype=fed.dtype)]
        taken, effective, lr, examples, weight = torch.stack(columns).to(fed.device)
        none = torch.zeros((len(lanes), 0), device=fed.device)
        counts, chunks = none, Chunks(none, none)
        if self.bound.needs("labels"):
            own = zip(sims, torch.split(ids[0], [len(g.clients) for g in groups]), strict=True)
            counts = torch.cat([sim.label_counts[some] for sim, some in own])
        if self.bound.needs("sweep"):
            pairs = zip(sims, groups, strict=True)
            chunks = _chunks([sim.federation.chunks(g.clients) for sim, g in pairs], self._starts)
        return Job(
            anchor=tree.stack([group.anchor for group in groups]),
            sent=tree.stack([group.sent for group in groups]),
            client={},
            info=Info(ids[0], ids[1], lr, taken, effective, examples, weight),
            key=keys.to(fed.device),
            counts=counts,
            chunks=chunks,
            fields=self._fields,
        )

    def _effective(self, groups: list[Group], steps: Tensor) -> Tensor:
        if "momentum" not in self.bound.every.get(OPTIM, {}):
            return self.sims[0].bound.optim.effective_steps(steps)
        pieces = torch.split(steps, [len(group.clients) for group in groups])
        pairs = zip(self.sims, pieces, strict=True)
        return torch.cat([sim.bound.optim.effective_steps(own) for sim, own in pairs])

    def _plan(self, clients: Sequence[list[int]], keys: Tensor) -> Tensor:
        sims, work = self.sims, self.sims[0].work
        lanes = [(s, k) for s, own in enumerate(clients) for k in own]
        sizes = [sims[s].federation.sizes[k] for s, k in lanes]
        steps = [sims[s].work.steps_for(n) for (s, _), n in zip(lanes, sizes, strict=True)]
        if len(lanes) * max(steps) * work.batch > HOST_PLAN:
            keys = keys.to(self._rows.device)
        ways = [sims[s].work.replacement for s, _ in lanes]
        drawn = {way: batch_plan(keys, sizes, steps, work.batch, way) for way in set(ways)}
        local = drawn[ways[0]]
        if len(drawn) > 1:
            again = on_device(ways, keys.device)[:, None, None]
            local = torch.where(again, drawn[True], drawn[False])
        first = [self._first_row[s] + sims[s].federation.offsets[k] for s, k in lanes]
        return local + on_device(first, keys.device)[:, None, None]


def stores(
    sims: Sequence[Simulation], groups: Sequence[Group]
) -> tuple[Callable[[int, list[int]], Tree], Callable[[Tree], Tree]]:
    """How a stack gathers clients' own state from the stores, and where the next one waits."""

    def states(owner: int, places: list[int]) -> Tree:
        return sims[owner].store.gather([groups[owner].clients[i] for i in places])

    def park(state: Tree) -> Tree:
        on_device = sims[0].store.where == "device"
        return state if on_device else tree.map(lambda x: x.cpu(), state)

    return states, park


def share(first: Federation, other: Federation) -> None:
    """Let two federations have one copy of what is equal in both."""
    for name in ("x", "y"):
        if _same(getattr(first, name), getattr(other, name)):
            setattr(other, name, getattr(first, name))
    mine, its = first._test, other._test
    if mine is not None and its is not None and all(map(_same, mine, its)):
        other._test = mine


def _joined(every: Sequence[Federation]) -> tuple[Federation, list[int]]:
    """The samples of all federations as one, and where those of each start in it."""
    first = every[0]
    different: list[Federation] = []
    owner: list[int] = []
    for fed in every:
        for known in different:
            share(known, fed)
        same = [i for i, known in enumerate(different) if fed.x is known.x and fed.y is known.y]
        owner.append(same[0] if same else len(different))
        different += [] if same else [fed]
    starts = [0]
    for fed in different:
        starts.append(starts[-1] + len(fed.x))
    data = first
    if len(different) > 1:
        data = copy.copy(first)
        data.x, data.y = (torch.cat([getattr(f, n) for f in different]) for n in ("x", "y"))
        for fed, i in zip(every, owner, strict=True):  # so that the samples are there once
            rows = slice(starts[i], starts[i + 1])
            fed.x, fed.y = data.x[rows], data.y[rows]
    return data, [starts[i] for i in owner]


def unlike(first: Simulation, other: Simulation) -> str:
    """What keeps two simulations from training side by side; empty if nothing does."""
    sizes = first.work.batch == other.work.batch
    if not sizes or not _same_batches(first.federation, other.federation):
        return "their batches"
    return difference(first.bound, other.bound)


def _same_batches(first: Federation, other: Federation) -> bool:
    """Whether two federations make the same batches of the same samples."""
    if (first.dtype, first.device) != (other.dtype, other.device):
        return False
    if first.x.dtype != other.x.dtype or first.is_random != other.is_random:
        return False
    probe = copy.copy(first)
    probe.x, probe.y = other.x, other.y
    rows, key = other.rows[:8], rng.key(1, other.device)
    return _same(probe.batch(rows, key).x, other.batch(rows, key).x)


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.dtype == b.dtype and torch.equal(a, b))


def _chunks(every: list[Chunks], starts: Sequence[int]) -> Chunks:
    """Whole data in pieces of one size, as many for every lane; those added hold nothing."""
    size = max(chunks.rows.shape[2] for chunks in every)
    count = max(math.ceil(chunks.rows[0].numel() / size) for chunks in every)
    found = []
    for chunks, start in zip(every, starts, strict=True):
        rows, mask = chunks.rows.flatten(1) + start, chunks.mask.flatten(1)
        wide = Chunks(_wider(rows, count * size), _wider(mask, count * size))
        found.append(tree.map(lambda x: x.unflatten(1, (count, size)), wide))
    return tree.concat(found)


def _wider(x: Tensor, size: int) -> Tensor:
    """Zeros added along the second axis."""
    return torch.nn.functional.pad(x, (0, size - x.shape[1]))
