"""Form the cohort of a round, for one run or for several that train together.

Keys, numbers and batch indices are drawn for the clients of all runs at once. They do not depend
on training, so the next round is drawn while the GPU computes the present one.
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
from kedge.core.work import Lane, batches, client_keys, infos, round_key, share_of
from kedge.data.federation import Federation
from kedge.engines.cohort import Cohort, Group, on_device, to_device
from kedge.engines.lane_bound import LaneBound, difference

if TYPE_CHECKING:
    from kedge.sim.simulation import Simulation

MAX_HOST_INDICES = 1 << 14  # above this count, batch indices are drawn on the device


class Draw(NamedTuple):
    """The draws of a round: a function of its number, its clients and their work."""

    inputs: Any  # the cache key
    keys: Tensor  # [lanes, 2]
    steps: list[int]
    info: Info
    positions: Tensor  # [lanes, max steps, batch] positions in the rows of all runs


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
            data, self._starts = _join([sim.federation for sim in self.sims])
            self.bound = several = LaneBound(bounds, data)
            self._fields, self.differing = several.fields(bounds), several.differing
            pairs = zip(self.sims, self._starts, strict=True)
            self._rows = torch.cat([sim.federation.rows + start for sim, start in pairs])
        self._first_row = [0, *accumulate(len(sim.federation.rows) for sim in self.sims)]

    def form(self, clients: Sequence[list[int]], round: int, states: bool = False) -> Cohort:
        """The cohort of a round.

        Args:
            clients: client numbers, one list for each run.
            round: number of the round.
            states: whether jobs include the clients' states; for a single run only.
        """
        draw = self._draw(clients, round)
        groups, start = [], 0
        for sim, cohort in zip(self.sims, clients, strict=True):
            steps, start = draw.steps[start : start + len(cohort)], start + len(cohort)
            server = sim.session.server
            groups.append(Group(sim.bound, cohort, steps, server.weights, sim.bound.sent(server)))
        gather, park = self._stores(groups)
        jobs = self._jobs(groups, draw)
        if states:
            jobs = jobs._replace(client=gather(0, list(range(len(groups[0].clients)))))
        rows = self._rows[to_device(draw.positions, self._rows.device)]
        return Cohort(self.bound.at(round), groups, jobs, rows, gather, park)

    def draw_ahead(self, round: int) -> None:
        """Draw a later round while the GPU computes the present one."""
        if self.sims[0].draws_ahead:
            clients = [sim.session.draw_clients(round) for sim in self.sims]
            self._ahead = self._draw(clients, round)

    def _draw(self, clients: Sequence[list[int]], round: int) -> Draw:
        runs = [(sim.session.work, sim.session.weighting) for sim in self.sims]
        inputs = round, [list(cohort) for cohort in clients], runs
        if self._ahead is not None and self._ahead.inputs == inputs:
            return self._ahead
        lanes: list[Lane] = []
        for sim, cohort in zip(self.sims, clients, strict=True):
            session, sizes = sim.session, sim.federation.sizes
            work, lr, optim = session.work, session.bound.lr(round), session.bound.optim
            weighting = session.weighting
            lanes += [
                Lane(
                    k,
                    sizes[k],
                    work.steps_for(sizes[k]),
                    work,
                    lr,
                    weighting,
                    optim,
                    share_of(sizes[k], session.num_clients, session.examples, weighting),
                )
                for k in cohort
            ]
        round_keys = round_key(self.sims[0].session.key, round)
        if len(self.sims) > 1:
            pairs = zip(self.sims, clients, strict=True)
            keys_by_run = (round_key(sim.session.key, round).expand(len(c), 2) for sim, c in pairs)
            round_keys = torch.cat(list(keys_by_run))
        keys = client_keys(round_keys, [lane.client for lane in lanes])
        steps = [lane.steps for lane in lanes]
        # a small draw is faster on the host than kernel launches on a GPU; the result is the same
        many = len(lanes) * max(steps) * lanes[0].work.batch > MAX_HOST_INDICES
        local = batches(keys.to(self._rows.device) if many else keys, lanes)
        first = [
            start + sim.federation.offsets[k]
            for sim, cohort, start in zip(self.sims, clients, self._first_row, strict=False)
            for k in cohort
        ]
        positions = local + on_device(first, local.device)[:, None, None]
        return Draw(
            inputs, keys, steps, infos(lanes, round, self.sims[0].federation.dtype), positions
        )

    def _jobs(self, groups: list[Group], draw: Draw) -> Job:
        device = self._rows.device
        info: Info = tree.map(lambda x: to_device(x, device), draw.info)
        empty = torch.zeros((len(draw.keys), 0), device=device)
        counts, sweep = empty, SweepPieces(empty, empty)
        if self.bound.needs("labels"):
            ids = torch.split(info.client, [len(group.clients) for group in groups])
            pairs = zip(self.sims, ids, strict=True)
            counts = torch.cat([sim.label_counts[run_ids] for sim, run_ids in pairs])
        if self.bound.needs("sweep"):
            sweeps = [
                sim.federation.sweep_pieces(g.clients)
                for sim, g in zip(self.sims, groups, strict=True)
            ]
            sweep = _join_sweeps(sweeps, self._starts)
        anchor: Weights = groups[0].anchor
        sent = groups[0].sent
        if len(groups) > 1:
            anchor = tree.stack([group.anchor for group in groups])
            sent = tree.stack([group.sent for group in groups])
        keys = to_device(draw.keys, device)
        return Job(anchor, sent, {}, info, keys, counts, sweep, self._fields)

    def _stores(
        self, groups: Sequence[Group]
    ) -> tuple[Callable[[int, list[int]], Tree], Callable[[Tree], Tree]]:
        """Functions with which an engine gathers clients' states and parks the next ones."""
        sims = self.sims

        def gather(run: int, places: list[int]) -> Tree:
            return sims[run].store.gather([groups[run].clients[i] for i in places])

        def park(state: Tree) -> Tree:
            on_device = sims[0].store.where == "device"
            return state if on_device else tree.map(lambda x: x.cpu(), state)

        return gather, park


def share(first: Federation, other: Federation) -> None:
    """Let two federations share the tensors that are equal in both."""
    for name in ("x", "y"):
        if _same(getattr(first, name), getattr(other, name)):
            setattr(other, name, getattr(first, name))
    test, other_test = first._test, other._test
    if test is not None and other_test is not None and all(map(_same, test, other_test)):
        other._test = test


def _join(federations: Sequence[Federation]) -> tuple[Federation, list[int]]:
    """All samples as one federation, and the offset of each federation's samples in it."""
    first = federations[0]
    distinct: list[Federation] = []
    sources: list[int] = []
    for fed in federations:
        for source in distinct:
            share(source, fed)
        matches = [
            i for i, source in enumerate(distinct) if fed.x is source.x and fed.y is source.y
        ]
        sources.append(matches[0] if matches else len(distinct))
        distinct += [] if matches else [fed]
    starts = [0]
    for fed in distinct:
        starts.append(starts[-1] + len(fed.x))
    data = first
    if len(distinct) > 1:
        data = copy.copy(first)
        data.x, data.y = (torch.cat([getattr(f, n) for f in distinct]) for n in ("x", "y"))
        for fed, i in zip(federations, sources, strict=True):  # views: the samples are stored once
            rows = slice(starts[i], starts[i + 1])
            fed.x, fed.y = data.x[rows], data.y[rows]
    return data, [starts[i] for i in sources]


def unlike(first: Simulation, other: Simulation) -> str:
    """Why two simulations cannot train together; empty if they can."""
    same_size = first.session.work.batch == other.session.work.batch
    if not same_size or not _same_batches(first.federation, other.federation):
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


def _join_sweeps(sweeps: list[SweepPieces], starts: Sequence[int]) -> SweepPieces:
    """Sweeps of all runs, padded with empty pieces to the same number of pieces."""
    if len(sweeps) == 1:
        return sweeps[0]
    count = max(sweep.rows.shape[1] for sweep in sweeps)
    padded = []
    for sweep, start in zip(sweeps, starts, strict=True):
        missing = count - sweep.rows.shape[1]
        shifted = SweepPieces(sweep.rows + start, sweep.mask)
        padded.append(tree.map(lambda x, n=missing: _pad_pieces(x, n), shifted))
    return tree.concat(padded)


def _pad_pieces(x: Tensor, count: int) -> Tensor:
    """Append ``count`` pieces of zeros along the second axis."""
    return torch.nn.functional.pad(x, (0, 0, 0, count))
