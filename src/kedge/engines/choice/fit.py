"""Whether a run fits into the memory, how many clients at once, and where their own state lies."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from kedge.core import tree
from kedge.engines.choice import memory
from kedge.engines.choice.memory import Need
from kedge.engines.registry import How
from kedge.errors import KedgeError
from kedge.runs.config import Config
from kedge.sim.simulation import Simulation

FILLED = 0.8  # the share of the free memory that a run may fill
ON_DEVICE, ON_HOST = 0.25, 0.5  # shares of what is free that clients' own state may take


class Fit(NamedTuple):
    """A way to compute a run, made to fit, and the bytes that it will take on the device."""

    how: How
    at_once: int  # clients that train at the same time
    lane: int  # of each of them; 0: not known
    total: int
    available: int
    notes: tuple[str, ...] = ()


def together(how: How, cohort: int, seeds: int) -> int:
    """How many seeds train side by side."""
    if how.engine != "vector":
        return 1
    return min(seeds, max(1, how.chunk // cohort)) if how.chunk else seeds


def fit(how: How, need: Need | None, config: Config, sim: Simulation) -> Fit:
    """What the user set stays as it is; a run of which not even one client fits is refused."""
    state = tree.nbytes(sim.bound.client())
    data, server = _data_bytes(sim), tree.nbytes(sim.server)
    free = memory.available(sim.federation.device) + data + server  # which lie there already
    cohort, seeds = sim.per_round, together(how, sim.per_round, len(config.seeds))
    kept = state * sim.federation.num_clients * seeds
    where = _place(kept, free) if config.state == "auto" else config.state
    how, notes = dataclasses.replace(how, state=where), []
    if kept and where != "device":
        place = "the host's memory" if where == "host" else "a file"
        notes.append(f"clients' own state, {in_bytes(kept)}, is kept in {place}")
    if need is None:
        return Fit(how, cohort, 0, 0, free, tuple(notes))

    def held(seeds: int) -> int:
        """Bytes beside training; the next state of clients is there until a round ends."""
        own = state * (sim.federation.num_clients + cohort) if where == "device" else 0
        return data + seeds * (server + own)

    if held(1) + need.first > free:
        raise _too_large(need, held(1), free, bool(state) and where == "device", config)
    if how.engine != "vector":
        beside = held(1) + need.lane * (cohort - 1)
        at_once = max(1, how.workers)
        if how.streams:
            room = int((FILLED * free - beside) // max(1, need.first))
            at_once = max(1, min(how.streams, cohort, room))
            how = dataclasses.replace(how, streams=at_once if at_once > 1 else 0)
        total = beside + need.first * at_once
        return Fit(how, at_once, need.first, total, free, tuple(notes))
    if seeds > 1:  # whose lanes have no anchor in common
        copied = tree.nbytes(sim.server.weights)
        need = need._replace(first=need.first + copied, lane=need.lane + copied)
    wanted = min(how.chunk or seeds * cohort, seeds * cohort)
    lanes = wanted
    if not how.chunk:
        sizes = (n * cohort for n in range(seeds, 0, -1) if _fits(need, held(n), n * cohort, free))
        lanes = next(sizes, max(1, need.lanes(FILLED * free - held(1))))
    if lanes < wanted:
        size = in_bytes(held(seeds) + need.of(wanted))
        notes.append(f"{wanted} clients at once would take {size}, so {lanes} train at once")
        how = dataclasses.replace(how, chunk=lanes)
    total = held(together(how, cohort, seeds)) + need.of(lanes)
    return Fit(how, lanes, need.lane, total, free, tuple(notes))


def _fits(need: Need, held: int, lanes: int, free: int) -> bool:
    return need.lanes(FILLED * free - held) >= lanes


def _place(kept: int, free: int) -> str:
    if not kept or kept < ON_DEVICE * free:
        return "device"
    return "host" if kept < ON_HOST * memory.host_available() else "file"


def _data_bytes(sim: Simulation) -> int:
    fed = sim.federation
    return sum(tree.nbytes(x) for x in (fed.x, fed.y, fed.rows, *(fed._test or ())))


def _too_large(need: Need, held: int, free: int, movable: bool, config: Config) -> KedgeError:
    elsewhere = ", or keep clients' state elsewhere: --state host" if movable else ""
    return KedgeError(
        f"this run does not fit into the memory: one client takes {in_bytes(need.first)} beside "
        f"{in_bytes(held)} for data, server and state, and {in_bytes(free)} are free. Make the "
        f"batch smaller (--batch, now {config.batch}), use --precision bf16 or a smaller model"
        + elsewhere
    )


def in_bytes(size: float) -> str:
    """
    >>> in_bytes(1_234_000_000), in_bytes(52_300_000), in_bytes(800)
    ('1.2 GB', '52 MB', '1 MB')
    """
    if size < 995e6:
        return f"{max(1, round(size / 1e6))} MB"
    return f"{size / 1e9:.1f} GB" if size < 99.5e9 else f"{size / 1e9:.0f} GB"
