"""Clients on this machine: jobs from a request, answers from an engine, states between rounds.

:class:`Clients` are all clients of a run, a shard of them, or the one client of a silo. A job
depends on the request, the clients' data and states, and the workload, and on nothing else. Keys,
numbers and batch indices are drawn for all clients at once, and for several runs that train
together. They do not depend on training, so the next round is drawn while the GPU computes the
present one.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.core import rng, tree
from kedge.core.bound import Bound
from kedge.core.client import Trained
from kedge.core.tree import Tree, Weights
from kedge.core.update import Totals
from kedge.core.view import Info, Job, SweepPieces
from kedge.core.work import LocalWork, Workload, batches, client_keys, infos, round_key, take_jobs
from kedge.data.federation import Federation
from kedge.engines.cohort import Cohort, RunGroup, on_device, to_device
from kedge.engines.engine import Engine
from kedge.engines.lane_bound import LaneBound, difference
from kedge.session.purity import Checks, check_client, check_survey, watching
from kedge.session.session import Request

MAX_HOST_INDICES = 1 << 14  # above this count, batch indices are drawn on the device


class States(Protocol):
    """The clients' states between rounds; clients are counted as in the data."""

    @property
    def where(self) -> str:
        """``device``, or a place to which next states move."""
        ...

    def gather(self, clients: Sequence[int]) -> Tree:
        """States of some clients on the device, ``[len(clients), ...]``."""
        ...

    def put(self, clients: Sequence[int], values: Tree) -> None:
        """Write states ``[len(clients), ...]``."""
        ...


class Clients:
    """Some clients of a run.

    Args:
        bound: the method, bound to their data.
        workload: how much each client trains.
        data: of these clients.
        engine: computes the answers.
        states: their states.
        ids: the clients' numbers in the run, in the order of the data; 0, 1, 2, ... for None.

    Example::

        totals = clients.answer(request)
        clients.accept()                      # once the round is accepted
    """

    def __init__(
        self,
        bound: Bound,
        workload: Workload,
        data: Federation,
        engine: Engine,
        states: States,
        ids: Sequence[int] | None = None,
    ) -> None:
        self.bound, self.workload, self.data = bound, workload, data
        self.engine, self.states = engine, states
        self.key = rng.key(workload.seed)
        self.checks = Checks(bound.parts)
        #: Samples per class on each client, [clients, C]; no columns if no part reads them.
        self.label_counts = torch.zeros((data.num_clients, 0), device=data.device)
        if bound.needs("labels"):
            self.label_counts = data.label_counts()
        #: CUDA runs asynchronously; the next round is drawn while the GPU computes.
        self.draws_ahead = data.device.type == "cuda"
        self._places = None if ids is None else {k: place for place, k in enumerate(ids)}
        self._next: list[tuple[list[int], Tree]] = []
        self._stack = Together([weakref.proxy(self)])  # weak: no reference cycle

    def places(self, clients: Sequence[int]) -> list[int]:
        """Where clients stand in the data."""
        return list(clients) if self._places is None else [self._places[k] for k in clients]

    # -- answers ------------------------------------------------------------------------------

    def answer(self, request: Request) -> Totals:
        """The totals of a request. Next states wait until :meth:`accept`."""
        self.check(request)
        cohort = self.cohort(request, states=False)
        if request.part:
            totals = self.engine.survey(cohort, self.bound.part(request.part))
            return totals.of(request.clients, request.round)
        [done] = self.engine.train(cohort)
        self.park(request, done.next_states)
        return done.totals

    def updates(self, request: Request) -> Iterator[Trained]:
        """What each client sends, and its next state, in the order of the request. Nothing is kept
        for :meth:`accept`."""
        self.check(request)
        return self.engine.updates(self.cohort(request), request.part)

    def park(self, request: Request, states: list[tuple[list[int], Tree]]) -> None:
        """Keep next states, by positions in the request, until they are accepted."""
        places = self.places(request.clients)
        self._next = [([places[i] for i in positions], state) for positions, state in states]

    def accept(self) -> None:
        """The states after the last answer become those from which clients go on."""
        for places, states in self._next:
            self.states.put(places, states)
        self._next = []

    def personal(self, request: Request) -> Weights:
        """The personal weights of the clients of a request, stacked."""
        return self.engine.personal(self.cohort(request))

    def cohort(self, request: Request, states: bool = True) -> Cohort:
        """The engine's input; ``states``: the clients' states are loaded already."""
        return self._stack.cohort([request], states)

    def rows(self, client: int, round: int) -> Tensor:
        """The rows of the batches of a client in a round, ``[steps, batch]``."""
        [place] = self.places([client])
        lane = self.workload.lane(self.bound, client, self.data.sizes[place], round)
        drawn = batches(client_keys(round_key(self.key, round), [client]), [lane])[0]
        return self.data.rows[self.data.offsets[place] + drawn.to(self.data.device)]

    def with_work(self, work: LocalWork) -> Clients:
        """The same clients with other local work, for measurements."""
        workload = dataclasses.replace(self.workload, work=work)
        return Clients(self.bound, workload, self.data, self.engine, self.states)

    def draw_ahead(self, round: int, clients: list[int]) -> None:
        """Draw a later round while the GPU computes the present one."""
        self._stack.draw_ahead(round, [clients])

    def check(self, request: Request) -> None:
        """Check third-party parts on one client before the first round of each phase, see
        :mod:`kedge.session.purity`."""
        with watching(self.checks.foreign):
            phases = self.bound.at(request.round).phases
        with self.checks.once(request.part, phases) as due:
            if due:
                first = request._replace(clients=request.clients[:1])
                cohort = self.cohort(first)
                job, [who] = take_jobs(cohort.jobs, 0), first.clients
                if request.part:
                    check_survey(cohort.bound, job, self.bound.part(request.part), who)
                else:
                    check_client(cohort.bound, job, cohort.batches[0, 0], who)


class Draw(NamedTuple):
    """The draws of a round: a function of its number, its clients and their work."""

    inputs: tuple[int, list[list[int]], list[Workload]]  # the cache key
    keys: Tensor  # [lanes, 2]
    steps: list[int]
    info: Info
    positions: Tensor  # [lanes, max steps, batch] positions in the rows of all runs


class Together:
    """The clients of one run, or of several runs of one structure, as one computation."""

    def __init__(self, runs: Sequence[Clients]) -> None:
        self.runs = list(runs)
        self.bound, self._rows = runs[0].bound, runs[0].data.rows
        #: Fields that differ between the runs, by owner and name, with one value for each run.
        self.differing: dict[str, dict[str, list[float]]] = {}
        self._starts, self._fields = [0], dict[str, dict[str, Tensor]]()
        self._ahead: Draw | None = None
        if len(runs) > 1:
            bounds = [run.bound for run in runs]
            data, self._starts = _join([run.data for run in runs])
            self.bound = several = LaneBound(bounds, data)
            self._fields, self.differing = several.fields(bounds), several.differing
            pairs = zip(runs, self._starts, strict=True)
            self._rows = torch.cat([run.data.rows + start for run, start in pairs])
        self._first_row = [0, *accumulate(len(run.data.rows) for run in runs)]

    def cohort(self, requests: Sequence[Request], states: bool = False) -> Cohort:
        """The cohort of one request for each run, all of one round.

        Args:
            requests: one for each run.
            states: whether jobs include the clients' states; for a single run only.
        """
        round = requests[0].round
        draw = self._draw([request.clients for request in requests], round)
        groups, start = [], 0
        for run, request in zip(self.runs, requests, strict=True):
            bound, clients = run.bound, request.clients
            steps, start = draw.steps[start : start + len(clients)], start + len(clients)
            anchor = all_weights(bound, request.broadcast.weights)
            groups.append(RunGroup(bound, round, clients, steps, anchor, request.broadcast.sent))
        gather, park = self._stores(groups)
        jobs = self._jobs(groups, draw)
        if states:
            jobs = jobs._replace(client=gather(0, list(range(len(groups[0].clients)))))
        rows = self._rows[to_device(draw.positions, self._rows.device)]
        return Cohort(self.bound.at(round), groups, jobs, rows, gather, park)

    def draw_ahead(self, round: int, clients: Sequence[list[int]]) -> None:
        """Draw a later round while the GPU computes the present one."""
        if self.runs[0].draws_ahead and all(clients):
            self._ahead = self._draw(clients, round)

    def _draw(self, clients: Sequence[list[int]], round: int) -> Draw:
        inputs = round, [list(cohort) for cohort in clients], [run.workload for run in self.runs]
        if self._ahead is not None and self._ahead.inputs == inputs:
            return self._ahead
        pairs = list(zip(self.runs, clients, strict=True))
        places = [run.places(cohort) for run, cohort in pairs]
        lanes = [
            run.workload.lane(run.bound, k, run.data.sizes[place], round)
            for (run, cohort), found in zip(pairs, places, strict=True)
            for k, place in zip(cohort, found, strict=True)
        ]
        round_keys = round_key(self.runs[0].key, round)
        if len(self.runs) > 1:
            keys_by_run = (round_key(run.key, round).expand(len(c), 2) for run, c in pairs)
            round_keys = torch.cat(list(keys_by_run))
        keys = client_keys(round_keys, [lane.client for lane in lanes])
        steps = [lane.steps for lane in lanes]
        # a small draw is faster on the host than kernel launches on a GPU; the result is the same
        many = len(lanes) * max(steps) * lanes[0].work.batch > MAX_HOST_INDICES
        local = batches(keys.to(self._rows.device) if many else keys, lanes)
        first = [
            start + run.data.offsets[place]
            for run, found, start in zip(self.runs, places, self._first_row, strict=False)
            for place in found
        ]
        positions = local + on_device(first, local.device)[:, None, None]
        return Draw(inputs, keys, steps, infos(lanes, round, self.runs[0].data.dtype), positions)

    def _jobs(self, groups: list[RunGroup], draw: Draw) -> Job:
        device = self._rows.device
        info: Info = tree.map(lambda x: to_device(x, device), draw.info)
        empty = torch.zeros((len(draw.keys), 0), device=device)
        counts, sweep = empty, SweepPieces(empty, empty)
        pairs = list(zip(self.runs, groups, strict=True))
        places = [run.places(group.clients) for run, group in pairs]
        if self.bound.needs("labels"):
            known = zip(self.runs, places, strict=True)
            counts = torch.cat([r.label_counts[on_device(found, device)] for r, found in known])
        if self.bound.needs("sweep"):
            known = zip(self.runs, places, strict=True)
            sweep = _join_sweeps([r.data.sweep_pieces(found) for r, found in known], self._starts)
        anchor: Weights = groups[0].anchor
        sent = groups[0].sent
        if len(groups) > 1:
            anchor = tree.stack([group.anchor for group in groups])
            sent = tree.stack([group.sent for group in groups])
        keys = to_device(draw.keys, device)
        return Job(anchor, sent, {}, info, keys, counts, sweep, self._fields)

    def _stores(
        self, groups: Sequence[RunGroup]
    ) -> tuple[Callable[[int, list[int]], Tree], Callable[[Tree], Tree]]:
        """Functions with which an engine gathers clients' states and parks the next ones."""
        # not the runs, which may be weak references: a cohort may outlive them
        stores = [(run.states, run.places) for run in self.runs]

        def gather(run: int, positions: list[int]) -> Tree:
            states, places = stores[run]
            return states.gather(places([groups[run].clients[i] for i in positions]))

        def park(state: Tree) -> Tree:
            on_device = stores[0][0].where == "device"
            return state if on_device else tree.map(lambda x: x.cpu(), state)

        return gather, park


def all_weights(bound: Bound, public: Weights) -> Weights:
    """All weights in the model's order: public ones as received, and initial values as placeholders
    for private ones, which the client's state contains."""
    initial = bound.initial
    return Weights(
        {name: public.params.get(name, value) for name, value in initial.params.items()},
        {name: public.buffers.get(name, value) for name, value in initial.buffers.items()},
    )


def share(first: Federation, other: Federation) -> None:
    """Let two federations share the tensors that are equal in both."""
    for name in ("x", "y"):
        if _same(getattr(first, name), getattr(other, name)):
            setattr(other, name, getattr(first, name))
    test, other_test = first.test_data, other.test_data
    if test is not None and other_test is not None and all(map(_same, test, other_test)):
        other.test_data = test


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


def unlike(first: Clients, other: Clients) -> str:
    """Why two runs cannot train together; empty if they can."""
    same_size = first.workload.work.batch == other.workload.work.batch
    if not same_size or not _same_batches(first.data, other.data):
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
        padded.append(tree.map(lambda x, n=missing: F.pad(x, (0, 0, 0, n)), shifted))
    return tree.concat(padded)
