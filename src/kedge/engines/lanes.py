"""Clients of one or several runs as lanes of one computation, trained chunk by chunk.

Lanes are sorted by decreasing number of steps and split into chunks of equal size. The updates of a
chunk are reduced run by run before the next chunk starts, so memory holds the updates of one chunk
at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from kedge.core import tree
from kedge.core.client import Trained
from kedge.core.tree import Tree, Weights
from kedge.core.update import ZERO, Totals, add, total
from kedge.core.view import Job
from kedge.engines.cohort import Cohort, Outcome, Reduced, clone, take_rows
from kedge.engines.ops import MAPPED

TrainLanes = Callable[..., Any]  # Vector.train_lanes


class Lane(NamedTuple):
    """One client of one run."""

    run: int
    position: int  # in its cohort
    steps: int


def train(train_lanes: TrainLanes, cohort: Cohort, chunk: int) -> list[Outcome]:
    """Train all lanes, at most ``chunk`` at once (0: all of them)."""
    chunks = split([group.steps for group in cohort.groups], chunk)
    if len(chunks) == len(cohort.groups) == 1:
        return [_train_whole(train_lanes, cohort, chunks[0])]
    totals = [ZERO for _ in cohort.groups]
    order: list[list[int]] = [[] for _ in cohort.groups]
    states: list[list[tuple[list[int], Tree]]] = [[] for _ in cohort.groups]
    size = len(chunks[0])
    for lanes in chunks:
        padded = [*lanes, *[lanes[-1]] * (size - len(lanes))]  # one size: one captured graph
        jobs, batches = jobs_of(cohort, padded)
        done: Trained = train_lanes(cohort.bound, jobs, [lane.steps for lane in padded], batches)
        for run, rows in _rows_by_run(lanes).items():
            positions, own = [lanes[i].position for i in rows], take_rows(done, rows)
            group = cohort.groups[run]
            new = total(group.bound, own.update, group.anchor, MAPPED)
            state = cohort.park(own.next_state)
            # the next replay of a captured graph overwrites what was not computed from it
            stacked = new.stacked
            cloned = clone({"weight": stacked.weight, "losses": stacked.losses})
            new = new._replace(stacked=stacked._replace(**cloned))
            if len(chunks) > 1:
                state = clone(state)
            asked = [group.clients[i] for i in positions]
            totals[run] = add(totals[run], new.of(asked, group.round))
            order[run] += positions
            states[run].append((positions, state))
        del done, own, state, jobs
    triples = zip(totals, order, states, strict=True)
    return [Outcome(_in_order(found, positions), some) for found, positions, some in triples]


def _train_whole(train_lanes: TrainLanes, cohort: Cohort, lanes: list[Lane]) -> Outcome:
    """Train one run in one chunk, with updates reduced inside the computation."""
    jobs, batches = jobs_of(cohort, lanes)
    done: Reduced = train_lanes(cohort.bound, jobs, [lane.steps for lane in lanes], batches, True)
    positions, [group] = [lane.position for lane in lanes], cohort.groups
    totals = done.totals.of([group.clients[i] for i in positions], group.round)
    return Outcome(_in_order(totals, positions), [(positions, cohort.park(done.next_state))])


def split(steps: Sequence[Sequence[int]], chunk: int) -> list[list[Lane]]:
    """Lanes sorted by decreasing number of steps, in chunks of equal size but for the last.

    Args:
        steps: the number of steps of every client of every run.
        chunk: the maximal size of a chunk; 0: no limit.

    >>> [[lane.steps for lane in lanes] for lanes in split([[1, 5], [3, 5, 2]], 2)]
    [[5, 5], [3, 2], [1]]
    """
    lanes = [Lane(run, i, n) for run, counts in enumerate(steps) for i, n in enumerate(counts)]
    lanes.sort(key=lambda lane: -lane.steps)
    num_chunks = math.ceil(len(lanes) / chunk) if chunk else 1
    size = math.ceil(len(lanes) / num_chunks)
    return [lanes[i : i + size] for i in range(0, len(lanes), size)]


def jobs_of(cohort: Cohort, lanes: list[Lane]) -> tuple[Job, Tensor]:
    """The jobs of some lanes, and their batch indices ``[lanes, max steps, batch]``."""
    first = [0, *accumulate(len(group.clients) for group in cohort.groups)]
    rows = [first[lane.run] + lane.position for lane in lanes]
    shared = {name: getattr(cohort.jobs, name) for name in ("anchor", "sent", "fields")}
    stacked = cohort.jobs._replace(anchor=Weights({}, {}), sent={}, fields={})
    if len(cohort.groups) > 1:
        shared = take_rows(shared, [lane.run for lane in lanes])
    jobs = take_rows(stacked, rows)
    client = jobs.client or _states(cohort, lanes)
    return jobs._replace(client=client, **shared), take_rows(cohort.batches, rows)


def _states(cohort: Cohort, lanes: list[Lane]) -> Tree:
    """Client state in the order of the lanes."""
    runs = _rows_by_run(lanes)
    states = [cohort.states(run, [lanes[i].position for i in rows]) for run, rows in runs.items()]
    by_run = [i for rows in runs.values() for i in rows]
    inverse = sorted(range(len(lanes)), key=by_run.__getitem__)
    return take_rows(tree.concat(states), inverse)


def _rows_by_run(lanes: list[Lane]) -> dict[int, list[int]]:
    """The rows among some lanes that belong to each run."""
    found: dict[int, list[int]] = {}
    for i, lane in enumerate(lanes):
        found.setdefault(lane.run, []).append(i)
    return found


def _in_order(totals: Totals, positions: list[int]) -> Totals:
    """Totals whose clients are in the order of the cohort."""
    inverse = sorted(range(len(positions)), key=positions.__getitem__)
    if inverse == list(range(len(positions))):
        return totals
    asked = list(totals.clients.items())
    stacked = take_rows(totals.stacked, inverse)
    return totals._replace(clients=dict(asked[i] for i in inverse), stacked=stacked)
