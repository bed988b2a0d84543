"""The cohort of a round, formed in one place for one run and for several that train together.

What a round needs of every client (keys, numbers, batch indices) is drawn for the clients of all
runs at once. Nothing of it depends on training, so a GPU's next round is drawn while it works.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kedge.core import rng, tree
from kedge.core.tree import Tree, Weights
from kedge.core.view import Info, Job, SweepPieces
from kedge.core.work import Lane, batches, client_keys, infos
from kedge.data.federation import Federation
from kedge.engines.cohort import Cohort, Group, on_device, to_device
from kedge.engines.lane_bound import LaneBound, difference

if TYPE_CHECKING:
    from kedge.sim.simulation import Simulation

MAX_HOST_INDICES = 1 << 14  # more batch indices than these are drawn on the device


class Draw(NamedTuple):
    """What of a round depends on its number, its clients and their work alone."""

    what: Any  # all that it depends on
    keys: Tensor  # [lanes, 2]
    steps: list[int]
    info: Info
    positions: Tensor  # [lanes, max steps, batch] places among the rows of all runs


class Cohorts:
    """Forms the cohorts of one run, or of several of one structure."""

    def __init__(self, sims: Sequence[Simulation]) -> None:
        self.sims = list(sims)
        self.bound, self._rows = self.sims[0].bound, self.sims[0].federation.rows
        #: Fields that differ between the runs, by owner and name, with one value for each run.
        self.differing: dict[str, dict[str, list[float]]] = {}
        self._starts, self._fields = [0], dict[str, dict[str, Tensor]]()
        self._ahead: Draw | None = None
        if len(self.sims) > 1:
            bounds = [sim.bound for sim in self.sims]
            data, self._starts = _joined([sim.federation for sim in self.sims])
            self.bound = several = LaneBound(bounds, data)
            self._fields, self.differing = several.fields(bounds), several.differing
            pairs = zip(self.sims, self._starts, strict=True)
            self._rows = torch.cat([sim.federation.rows + start for sim, start in pairs])
        self._first_row = [0, *accumulate(len(sim.federation.rows) for sim in self.sims)]

    def form(self, clients: Sequence[list[int]], round: int, states: bool = False) -> Cohort:
        """The clients of a round, run by run; with ``states``, which is for one run, jobs hold the
        clients' own state."""
        drawn = self._draw(clients, round)
        groups, start = [], 0
        for sim, own in zip(self.sims, clients, strict=True):
            steps, start = drawn.steps[start : start + len(own)], start + len(own)
            server = sim.session.server
            groups.append(Group(sim.bound, own, steps, server.weights, sim.bound.sent(server)))
        gather, park = self._stores(groups)
        jobs = self._jobs(groups, drawn)
        if states:
            jobs = jobs._replace(client=gather(0, list(range(len(groups[0].clients)))))
        rows = self._rows[to_device(drawn.positions, self._rows.device)]
        return Cohort(self.bound.at(round), groups, jobs, rows, gather, park)

    def draw_ahead(self, round: int) -> None:
        """Draw a later round, while a GPU still works on the present one."""
        if self.sims[0].draws_ahead:
            clients = [sim.session.draw_clients(round) for sim in self.sims]
            self._ahead = self._draw(clients, round)

    def _draw(self, clients: Sequence[list[int]], round: int) -> Draw:
        runs = [(sim.session.work, sim.session.weighting) for sim in self.sims]
        what = round, [list(own) for own in clients], runs
        if self._ahead is not None and self._ahead.what == what:
            return self._ahead
        lanes: list[Lane] = []
        for sim, own in zip(self.sims, clients, strict=True):
            session, sizes = sim.session, sim.federation.sizes
            work, lr, optim = session.work, session.bound.lr(round), session.bound.optim
            lanes += [
                Lane(k, sizes[k], work.steps_for(sizes[k]), work, lr, session.weighting, optim)
                for k in own
            ]
        roots = torch.cat(
            [
                sim.session.key.expand(len(own), 2)
                for sim, own in zip(self.sims, clients, strict=True)
            ]
        )
        keys = client_keys(roots, round, [lane.client for lane in lanes])
        steps = [lane.steps for lane in lanes]
        # a small draw takes less time on the host than its launches on a GPU; both give the same
        many = len(lanes) * max(steps) * lanes[0].work.batch > MAX_HOST_INDICES
        local = batches(keys.to(self._rows.device) if many else keys, lanes)
        first = [
            start + sim.federation.offsets[k]
            for sim, own, start in zip(self.sims, clients, self._first_row, strict=False)
            for k in own
        ]
        positions = local + on_device(first, local.device)[:, None, None]
        return Draw(
            what, keys, steps, infos(lanes, round, self.sims[0].federation.dtype), positions
        )

    def _jobs(self, groups: list[Group], drawn: Draw) -> Job:
        device = self._rows.device
        info: Info = tree.map(lambda x: to_device(x, device), drawn.info)
        none = torch.zeros((len(drawn.keys), 0), device=device)
        counts, sweep = none, SweepPieces(none, none)
        if self.bound.needs("labels"):
            own = torch.split(info.client, [len(group.clients) for group in groups])
            pairs = zip(self.sims, own, strict=True)
            counts = torch.cat([sim.label_counts[some] for sim, some in pairs])
        if self.bound.needs("sweep"):
            every = [
                sim.federation.sweep_pieces(g.clients)
                for sim, g in zip(self.sims, groups, strict=True)
            ]
            sweep = _sweep(every, self._starts)
        anchor: Weights = groups[0].anchor
        sent = groups[0].sent
        if len(groups) > 1:
            anchor = tree.stack([group.anchor for group in groups])
            sent = tree.stack([group.sent for group in groups])
        keys = to_device(drawn.keys, device)
        return Job(anchor, sent, {}, info, keys, counts, sweep, self._fields)

    def _stores(
        self, groups: Sequence[Group]
    ) -> tuple[Callable[[int, list[int]], Tree], Callable[[Tree], Tree]]:
        """How an engine gathers clients' own state, and where the next one waits."""
        sims = self.sims

        def gather(run: int, places: list[int]) -> Tree:
            return sims[run].store.gather([groups[run].clients[i] for i in places])

        def park(state: Tree) -> Tree:
            on_device = sims[0].store.where == "device"
            return state if on_device else tree.map(lambda x: x.cpu(), state)

        return gather, park


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
    """What keeps two simulations from training together; empty if nothing does."""
    sizes = first.session.work.batch == other.session.work.batch
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


def _sweep(every: list[SweepPieces], starts: Sequence[int]) -> SweepPieces:
    """Whole data in as many pieces for every lane; those added hold nothing."""
    if len(every) == 1:
        return every[0]
    count = max(sweep.rows.shape[1] for sweep in every)
    found = []
    for sweep, start in zip(every, starts, strict=True):
        missing = count - sweep.rows.shape[1]
        wide = SweepPieces(sweep.rows + start, sweep.mask)
        found.append(tree.map(lambda x, n=missing: _with_empty(x, n), wide))
    return tree.concat(found)


def _with_empty(x: Tensor, count: int) -> Tensor:
    """So many pieces of zeros added along the second axis."""
    return torch.nn.functional.pad(x, (0, 0, 0, count))
