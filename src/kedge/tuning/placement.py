"""Placement of a run in memory: clients at once, streams, and the location of client state."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from kedge.core import tree
from kedge.engines.engine import engines
from kedge.engines.execution import Execution
from kedge.errors import KedgeError
from kedge.sim.simulation import Simulation
from kedge.tuning import memory
from kedge.tuning.memory import Need

MAX_MEMORY_SHARE = 0.8  # of the free memory, for a whole run
MAX_STATE_ON_DEVICE, MAX_STATE_ON_HOST = 0.25, 0.5  # shares of the free memory, for client state


@dataclass(frozen=True)
class Settings:
    """Settings of a run that affect its execution.

    ``engine="auto"``, ``compile="auto"``, ``state="auto"``, ``workers=0``, ``chunk=0`` and
    ``threads=0`` leave the choice to the plan.
    """

    rounds: int
    seeds: int = 1
    eval_every: int = 1
    engine: str = "auto"
    workers: int = 0
    threads: int = 0  # on a CPU
    chunk: int = 0
    compile: str = "auto"  # on, off or auto
    state: str = "auto"  # device, host, file or auto
    augment: str = "none"


class Placement(NamedTuple):
    """An execution adapted to the free memory, and the bytes it needs on the device."""

    execution: Execution
    at_once: int  # clients that train at the same time
    lane: int  # bytes of each of them; 0: unknown
    total: int
    available: int
    notes: tuple[str, ...] = ()


def seeds_at_once(execution: Execution, cohort: int, seeds: int) -> int:
    """The number of seeds that train side by side."""
    if not engines[execution.engine].batches_clients:
        return 1
    return min(seeds, max(1, execution.chunk // cohort)) if execution.chunk else seeds


def place(
    execution: Execution, need: Need | None, settings: Settings, sim: Simulation
) -> Placement:
    """Adapt an execution to the free memory.

    ``need`` is the memory of training, None if unknown. Settings of the user are not changed.

    Raises:
        KedgeError: not even one client fits.
    """
    client_state = tree.nbytes(sim.bound.client())
    data, server = sim.federation.nbytes, tree.nbytes(sim.server)
    # data and server are already in memory
    free = memory.available(sim.federation.device) + data + server
    cohort = sim.session.cohort_size
    seeds = seeds_at_once(execution, cohort, settings.seeds)
    state = client_state * sim.federation.num_clients * seeds
    location = _state_location(state, free) if settings.state == "auto" else settings.state
    execution, notes = dataclasses.replace(execution, state=location), []
    if state and location != "device":
        target = "host memory" if location == "host" else "a file"
        notes.append(f"client state, {format_bytes(state)}, is stored in {target}")
    if need is None:
        return Placement(execution, cohort, 0, 0, free, tuple(notes))

    def resident(seeds: int) -> int:
        """Bytes beside training, with the next state of a cohort until the round ends."""
        clients = sim.federation.num_clients + cohort if location == "device" else 0
        return data + seeds * (server + client_state * clients)

    if resident(1) + need.first > free:
        movable = bool(client_state) and location == "device"
        raise _too_large(need, resident(1), free, movable, sim.session.workload.work.batch)
    if not engines[execution.engine].batches_clients:
        beside = resident(1) + need.lane * (cohort - 1)
        at_once = max(1, execution.workers)
        if execution.streams:
            limit = int((MAX_MEMORY_SHARE * free - beside) // max(1, need.first))
            at_once = max(1, min(execution.streams, cohort, limit))
            execution = dataclasses.replace(execution, streams=at_once if at_once > 1 else 0)
        total = beside + need.first * at_once
        return Placement(execution, at_once, need.first, total, free, tuple(notes))
    if seeds > 1:  # lanes of different seeds do not share an anchor
        anchor = tree.nbytes(sim.server.weights)
        need = need._replace(first=need.first + anchor, lane=need.lane + anchor)
    wanted = min(execution.chunk or seeds * cohort, seeds * cohort)
    lanes = wanted
    if not execution.chunk:
        budget = MAX_MEMORY_SHARE * free
        whole_seeds = (
            n * cohort
            for n in range(seeds, 0, -1)
            if need.lanes(budget - resident(n)) >= n * cohort
        )
        lanes = next(whole_seeds, max(1, need.lanes(budget - resident(1))))
    if lanes < wanted:
        size = format_bytes(resident(seeds) + need.of(wanted))
        notes.append(f"{wanted} clients at once would take {size}, so {lanes} train at once")
        execution = dataclasses.replace(execution, chunk=lanes)
    total = resident(seeds_at_once(execution, cohort, seeds)) + need.of(lanes)
    return Placement(execution, lanes, need.lane, total, free, tuple(notes))


def _state_location(state: int, free: int) -> str:
    if not state or state < MAX_STATE_ON_DEVICE * free:
        return "device"
    return "host" if state < MAX_STATE_ON_HOST * memory.host_available() else "file"


def _too_large(need: Need, resident: int, free: int, movable: bool, batch: int) -> KedgeError:
    elsewhere = ", or move client state off the device: --state host" if movable else ""
    return KedgeError(
        f"this run does not fit into memory: one client takes {format_bytes(need.first)} beside "
        f"{format_bytes(resident)} for data, server and state, and {format_bytes(free)} are free. "
        f"Make the batch smaller (--batch, now {batch}), use --precision bf16 or a smaller model"
        + elsewhere
    )


def format_bytes(size: float) -> str:
    """A number of bytes in MB or GB.

    >>> format_bytes(1_234_000_000), format_bytes(52_300_000), format_bytes(800)
    ('1.2 GB', '52 MB', '1 MB')
    """
    if size < 995e6:
        return f"{max(1, round(size / 1e6))} MB"
    return f"{size / 1e9:.1f} GB" if size < 99.5e9 else f"{size / 1e9:.0f} GB"
