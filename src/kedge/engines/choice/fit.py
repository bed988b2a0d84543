"""Whether a run fits into the memory, how many clients at once, and where their own state lies."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from kedge.core import tree
from kedge.engines.choice import memory
from kedge.engines.choice.memory import Need
from kedge.engines.choice.subject import Settings, Subject
from kedge.engines.engine import engines
from kedge.engines.execution import Execution
from kedge.errors import KedgeError

MAX_FILLED = 0.8  # the share of the free memory that a run may fill
MAX_STATE_ON_DEVICE, MAX_STATE_ON_HOST = 0.25, 0.5  # shares of what is free, for clients' state


class Fit(NamedTuple):
    """A way to compute a run, made to fit, and the bytes that it will take on the device."""

    execution: Execution
    at_once: int  # clients that train at the same time
    lane: int  # of each of them; 0: not known
    total: int
    available: int
    notes: tuple[str, ...] = ()


def together(execution: Execution, cohort: int, seeds: int) -> int:
    """How many seeds train side by side."""
    if not engines[execution.engine].batches_clients:
        return 1
    return min(seeds, max(1, execution.chunk // cohort)) if execution.chunk else seeds


def fit(execution: Execution, need: Need | None, settings: Settings, sim: Subject) -> Fit:
    """What the user set stays as it is; a run of which not even one client fits is refused."""
    state = tree.nbytes(sim.bound.client())
    data, server = sim.federation.nbytes, tree.nbytes(sim.server)
    free = memory.available(sim.federation.device) + data + server  # which lie there already
    cohort, seeds = sim.per_round, together(execution, sim.per_round, settings.seeds)
    kept = state * sim.federation.num_clients * seeds
    where = _place(kept, free) if settings.state == "auto" else settings.state
    execution, notes = dataclasses.replace(execution, state=where), []
    if kept and where != "device":
        place = "the host's memory" if where == "host" else "a file"
        notes.append(f"clients' own state, {in_bytes(kept)}, is kept in {place}")
    if need is None:
        return Fit(execution, cohort, 0, 0, free, tuple(notes))

    def held(seeds: int) -> int:
        """Bytes beside training; the next state of clients is there until a round ends."""
        own = state * (sim.federation.num_clients + cohort) if where == "device" else 0
        return data + seeds * (server + own)

    if held(1) + need.first > free:
        raise _too_large(need, held(1), free, bool(state) and where == "device", sim.work.batch)
    if not engines[execution.engine].batches_clients:
        beside = held(1) + need.lane * (cohort - 1)
        at_once = max(1, execution.workers)
        if execution.streams:
            room = int((MAX_FILLED * free - beside) // max(1, need.first))
            at_once = max(1, min(execution.streams, cohort, room))
            execution = dataclasses.replace(execution, streams=at_once if at_once > 1 else 0)
        total = beside + need.first * at_once
        return Fit(execution, at_once, need.first, total, free, tuple(notes))
    if seeds > 1:  # whose lanes have no anchor in common
        copied = tree.nbytes(sim.server.weights)
        need = need._replace(first=need.first + copied, lane=need.lane + copied)
    wanted = min(execution.chunk or seeds * cohort, seeds * cohort)
    lanes = wanted
    if not execution.chunk:
        sizes = (n * cohort for n in range(seeds, 0, -1) if _fits(need, held(n), n * cohort, free))
        lanes = next(sizes, max(1, need.lanes(MAX_FILLED * free - held(1))))
    if lanes < wanted:
        size = in_bytes(held(seeds) + need.of(wanted))
        notes.append(f"{wanted} clients at once would take {size}, so {lanes} train at once")
        execution = dataclasses.replace(execution, chunk=lanes)
    total = held(together(execution, cohort, seeds)) + need.of(lanes)
    return Fit(execution, lanes, need.lane, total, free, tuple(notes))


def _fits(need: Need, held: int, lanes: int, free: int) -> bool:
    return need.lanes(MAX_FILLED * free - held) >= lanes


def _place(kept: int, free: int) -> str:
    if not kept or kept < MAX_STATE_ON_DEVICE * free:
        return "device"
    return "host" if kept < MAX_STATE_ON_HOST * memory.host_available() else "file"


def _too_large(need: Need, held: int, free: int, movable: bool, batch: int) -> KedgeError:
    elsewhere = ", or keep clients' state elsewhere: --state host" if movable else ""
    return KedgeError(
        f"this run does not fit into the memory: one client takes {in_bytes(need.first)} beside "
        f"{in_bytes(held)} for data, server and state, and {in_bytes(free)} are free. Make the "
        f"batch smaller (--batch, now {batch}), use --precision bf16 or a smaller model" + elsewhere
    )


def in_bytes(size: float) -> str:
    """
    >>> in_bytes(1_234_000_000), in_bytes(52_300_000), in_bytes(800)
    ('1.2 GB', '52 MB', '1 MB')
    """
    if size < 995e6:
        return f"{max(1, round(size / 1e6))} MB"
    return f"{size / 1e9:.1f} GB" if size < 99.5e9 else f"{size / 1e9:.0f} GB"
