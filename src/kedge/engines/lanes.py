"""Clients of one or several simulations as lanes of one stack, trained piece by piece.

Lanes are sorted by falling number of steps and cut into pieces of one size. What a piece's clients
return is summed up simulation by simulation before the next piece starts, so that single updates
take the memory of one piece only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge.core import server, tree
from kedge.core.bound import Bound
from kedge.core.client import Reply
from kedge.core.part import Stack as Stacked
from kedge.core.server import Totals
from kedge.core.tree import Tree, Weights
from kedge.core.view import Job
from kedge.engines.cohort import Cohort, Phases, Trained, on_device

Replies = Callable[..., Any]  # of bound, jobs, steps, plan, phases and whether to sum up
PLAIN = {"terms", "client_weights"}  # totals that are no sums, and may lie where the replies do


class Lane(NamedTuple):
    """One client of one simulation."""

    owner: int  # the simulation
    at: int  # the client's place in its cohort
    steps: int


class Group(NamedTuple):
    """The clients of one simulation, and what the server gave them."""

    bound: Bound
    clients: list[int]
    steps: list[int]
    anchor: Weights
    sent: dict[str, Tree]

    @classmethod
    def of(cls, bound: Bound, cohort: Cohort) -> Group:
        return cls(bound, cohort.clients, cohort.steps, cohort.jobs.anchor, cohort.jobs.sent)


class Stack(NamedTuple):
    """The clients of one or several simulations, to be trained together.

    ``jobs`` have no state: ``states(owner, places)`` gathers it when a piece is about to start,
    and ``park`` puts the next one where it may wait for the end of the round. Of several
    simulations, what jobs share and their ``fields`` are stacked by simulation.
    """

    bound: Bound  # that mapped functions are given
    groups: list[Group]
    jobs: Job
    plan: Tensor  # [lanes, max steps, batch] rows of the data
    states: Callable[[int, list[int]], Tree]
    park: Callable[[Tree], Tree] = lambda state: state

    @property
    def lanes(self) -> int:
        return len(self.plan)


class Outcome(NamedTuple):
    """What a simulation has of a round: totals, and the next state of its clients in pieces."""

    totals: Totals
    kept: list[tuple[list[int], Tree]]  # (places in the cohort, state)


def single(bound: Bound, cohort: Cohort) -> Stack:
    """A cohort by itself."""
    state, jobs = cohort.jobs.client, cohort.jobs._replace(client={})
    group = Group.of(bound, cohort)
    return Stack(bound, [group], jobs, cohort.plan, lambda _, places: take_some(state, places))


def train(replies: Replies, stack: Stack, phases: Phases, chunk: int) -> list[Outcome]:
    """Train all lanes, at most ``chunk`` at once (0: all of them)."""
    pieces = cut([group.steps for group in stack.groups], chunk)
    if len(pieces) == len(stack.groups) == 1:
        return [_train_whole(replies, stack, phases, pieces[0])]
    totals: list[Totals] = [{} for _ in stack.groups]
    order: list[list[int]] = [[] for _ in stack.groups]
    kept: list[list[tuple[list[int], Tree]]] = [[] for _ in stack.groups]
    size = len(pieces[0])
    for piece in pieces:
        full = [*piece, *[piece[-1]] * (size - len(piece))]  # one size: one recorded graph
        jobs, plan = some_jobs(stack, full)
        done: Reply = replies(stack.bound, jobs, [lane.steps for lane in full], plan, phases)
        for owner, rows in _by_owner(piece).items():
            places, mine = [piece[i].at for i in rows], take_some(done, rows)
            group, before = stack.groups[owner], totals[owner]
            found = server.totals(group.bound, mine, group.anchor)
            state = stack.park(mine.client)
            # a recorded graph writes its replies to the same place again
            found |= {n: tree.map(torch.clone, found[n]) for n in found.keys() & PLAIN}
            if len(pieces) > 1:
                state = tree.map(torch.clone, state)
            totals[owner] = server.add_totals(before, found) if before else found
            order[owner] += places
            kept[owner].append((places, state))
        del done, mine, state, jobs
    triples = zip(totals, order, kept, strict=True)
    return [Outcome(_in_order(found, places), some) for found, places, some in triples]


def _train_whole(replies: Replies, stack: Stack, phases: Phases, piece: list[Lane]) -> Outcome:
    """One simulation in one piece: what it gives is summed up where it is computed."""
    jobs, plan = some_jobs(stack, piece)
    done: Trained = replies(stack.bound, jobs, [lane.steps for lane in piece], plan, phases, True)
    places = [lane.at for lane in piece]
    return Outcome(_in_order(done.totals, places), [(places, stack.park(done.kept))])


def cut(steps: Sequence[Sequence[int]], chunk: int) -> list[list[Lane]]:
    """Lanes sorted by falling number of steps, in pieces of one size but for the last.

    >>> [[lane.steps for lane in piece] for piece in cut([[1, 5], [3, 5, 2]], 2)]
    [[5, 5], [3, 2], [1]]
    """
    lanes = [Lane(s, i, count) for s, own in enumerate(steps) for i, count in enumerate(own)]
    lanes.sort(key=lambda lane: -lane.steps)
    pieces = math.ceil(len(lanes) / chunk) if chunk else 1
    size = math.ceil(len(lanes) / pieces)
    return [lanes[i : i + size] for i in range(0, len(lanes), size)]


def take_some(stacked: Tree, rows: list[int]) -> Tree:
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


def some_jobs(stack: Stack, piece: list[Lane]) -> tuple[Job, Tensor]:
    """The jobs of some lanes, and what they train on."""
    first = [0, *accumulate(len(group.clients) for group in stack.groups)]
    places = [first[lane.owner] + lane.at for lane in piece]
    common = {name: getattr(stack.jobs, name) for name in ("anchor", "sent", "fields")}
    own = stack.jobs._replace(anchor=Weights({}, {}), sent={}, fields={})
    if len(stack.groups) > 1:
        common = take_some(common, [lane.owner for lane in piece])
    jobs = take_some(own, places)._replace(client=_states(stack, piece), **common)
    return jobs, take_some(stack.plan, places)


def _states(stack: Stack, piece: list[Lane]) -> Tree:
    """Clients' own state in the order of the lanes."""
    groups = _by_owner(piece)
    found = [stack.states(owner, [piece[i].at for i in rows]) for owner, rows in groups.items()]
    together = [i for rows in groups.values() for i in rows]
    where = sorted(range(len(piece)), key=together.__getitem__)
    return take_some(tree.concat(found), where)


def _by_owner(piece: list[Lane]) -> dict[int, list[int]]:
    """Which of some lanes belong to each simulation."""
    found: dict[int, list[int]] = {}
    for i, lane in enumerate(piece):
        found.setdefault(lane.owner, []).append(i)
    return found


def _in_order(found: Totals, places: list[int]) -> Totals:
    """What totals say of single clients, in the order of the cohort."""
    back = sorted(range(len(places)), key=places.__getitem__)
    if back == list(range(len(places))):
        return found

    def take(value: Any) -> Any:
        return take_some(value, back)

    out = found | {n: take(found[n]) for n in found.keys() & {*PLAIN, "clients"}}
    out["uploads"] = {
        path: Stacked(take(up.value)) if isinstance(up, Stacked) else up
        for path, up in found["uploads"].items()
    }
    return out
