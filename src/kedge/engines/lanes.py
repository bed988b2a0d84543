"""Clients of one or several runs as lanes of one computation, trained chunk by chunk.

Lanes are sorted by falling number of steps and cut into chunks of one size. The replies of a chunk
are reduced run by run before the next chunk starts, so that single updates take the memory of one
chunk only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge.core import server, tree
from kedge.core.client import Reply
from kedge.core.part import Stack
from kedge.core.server import Totals
from kedge.core.tree import Tree, Weights
from kedge.core.view import Job
from kedge.engines.cohort import Cohort, Outcome, Trained, take_rows
from kedge.engines.ops import MAPPED

Replies = Callable[..., Any]  # of bound, jobs, steps, batches, and whether to reduce
PER_CLIENT = {"terms", "client_weights"}  # totals that are no sums; they may lie in the replies


class Lane(NamedTuple):
    """One client of one run."""

    run: int
    at: int  # the client's place in its cohort
    steps: int


def train(replies: Replies, cohort: Cohort, chunk: int) -> list[Outcome]:
    """Train all lanes, at most ``chunk`` at once (0: all of them)."""
    pieces = cut([group.steps for group in cohort.groups], chunk)
    if len(pieces) == len(cohort.groups) == 1:
        return [_train_whole(replies, cohort, pieces[0])]
    totals: list[Totals] = [{} for _ in cohort.groups]
    order: list[list[int]] = [[] for _ in cohort.groups]
    states: list[list[tuple[list[int], Tree]]] = [[] for _ in cohort.groups]
    size = len(pieces[0])
    for piece in pieces:
        full = [*piece, *[piece[-1]] * (size - len(piece))]  # one size: one captured graph
        jobs, batches = some_jobs(cohort, full)
        done: Reply = replies(cohort.bound, jobs, [lane.steps for lane in full], batches)
        for run, rows in _by_run(piece).items():
            places, mine = [piece[i].at for i in rows], take_rows(done, rows)
            group, before = cohort.groups[run], totals[run]
            found = server.totals(group.bound, mine, group.anchor, MAPPED)
            state = cohort.park(mine.client)
            # a captured graph writes its replies to the same place again
            found |= {n: tree.map(torch.clone, found[n]) for n in found.keys() & PER_CLIENT}
            if len(pieces) > 1:
                state = tree.map(torch.clone, state)
            totals[run] = server.add_totals(before, found) if before else found
            order[run] += places
            states[run].append((places, state))
        del done, mine, state, jobs
    triples = zip(totals, order, states, strict=True)
    return [Outcome(_in_order(found, places), some) for found, places, some in triples]


def _train_whole(replies: Replies, cohort: Cohort, piece: list[Lane]) -> Outcome:
    """One run in one chunk: replies are reduced where they are computed."""
    jobs, batches = some_jobs(cohort, piece)
    done: Trained = replies(cohort.bound, jobs, [lane.steps for lane in piece], batches, True)
    places = [lane.at for lane in piece]
    return Outcome(_in_order(done.totals, places), [(places, cohort.park(done.next_state))])


def cut(steps: Sequence[Sequence[int]], chunk: int) -> list[list[Lane]]:
    """Lanes sorted by falling number of steps, in chunks of one size but for the last.

    >>> [[lane.steps for lane in piece] for piece in cut([[1, 5], [3, 5, 2]], 2)]
    [[5, 5], [3, 2], [1]]
    """
    lanes = [Lane(s, i, count) for s, own in enumerate(steps) for i, count in enumerate(own)]
    lanes.sort(key=lambda lane: -lane.steps)
    pieces = math.ceil(len(lanes) / chunk) if chunk else 1
    size = math.ceil(len(lanes) / pieces)
    return [lanes[i : i + size] for i in range(0, len(lanes), size)]


def some_jobs(cohort: Cohort, piece: list[Lane]) -> tuple[Job, Tensor]:
    """The jobs of some lanes, and what they train on."""
    first = [0, *accumulate(len(group.clients) for group in cohort.groups)]
    places = [first[lane.run] + lane.at for lane in piece]
    common = {name: getattr(cohort.jobs, name) for name in ("anchor", "sent", "fields")}
    own = cohort.jobs._replace(anchor=Weights({}, {}), sent={}, fields={})
    if len(cohort.groups) > 1:
        common = take_rows(common, [lane.run for lane in piece])
    jobs = take_rows(own, places)
    client = jobs.client or _states(cohort, piece)
    return jobs._replace(client=client, **common), take_rows(cohort.batches, places)


def _states(cohort: Cohort, piece: list[Lane]) -> Tree:
    """Clients' own state in the order of the lanes."""
    runs = _by_run(piece)
    found = [cohort.states(run, [piece[i].at for i in rows]) for run, rows in runs.items()]
    together = [i for rows in runs.values() for i in rows]
    where = sorted(range(len(piece)), key=together.__getitem__)
    return take_rows(tree.concat(found), where)


def _by_run(piece: list[Lane]) -> dict[int, list[int]]:
    """Which of some lanes belong to each run."""
    found: dict[int, list[int]] = {}
    for i, lane in enumerate(piece):
        found.setdefault(lane.run, []).append(i)
    return found


def _in_order(found: Totals, places: list[int]) -> Totals:
    """What totals say of single clients, in the order of the cohort."""
    back = sorted(range(len(places)), key=places.__getitem__)
    if back == list(range(len(places))):
        return found

    def take(value: Any) -> Any:
        return take_rows(value, back)

    out = found | {n: take(found[n]) for n in found.keys() & {*PER_CLIENT, "clients"}}
    out["uploads"] = {
        path: Stack(take(up.value)) if isinstance(up, Stack) else up
        for path, up in found["uploads"].items()
    }
    return out
