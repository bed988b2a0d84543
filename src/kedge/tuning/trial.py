"""Trials: pieces of a round, run on a separate simulation to measure time and memory."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch

from kedge.core import tree
from kedge.core.work import LocalWork
from kedge.engines.cohort import Cohort, Outcome
from kedge.engines.device import restored_threads, use_threads
from kedge.engines.engine import engines
from kedge.engines.execution import Execution
from kedge.errors import KedgeError
from kedge.sim.simulation import Simulation
from kedge.tuning import memory
from kedge.tuning.memory import Need

T = TypeVar("T")


class RoundPiece(NamedTuple):
    """Part of a round: some clients and their local work."""

    clients: list[int]
    work: LocalWork

    def steps(self, sim: Simulation) -> int:
        """Client-steps in all."""
        return sum(self.work.steps_for(sim.federation.sizes[k]) for k in self.clients)


def one_step(sim: Simulation, clients: list[int]) -> RoundPiece:
    """The piece in which each client takes one step."""
    return RoundPiece(clients, dataclasses.replace(sim.session.workload.work, steps=1))


def start_trial(sim: Simulation, execution: Execution, rounds: int) -> Simulation:
    """A copy of a simulation at the middle of its rounds, since a part may start late.

    Client state lives on the host, where it takes no memory before its first use.
    """
    return sim.trial(dataclasses.replace(execution, state="host"), rounds // 2)


def form_cohort(sim: Simulation, piece: RoundPiece) -> Cohort:
    """The cohort of a piece."""
    clients = sim.clients.with_work(piece.work)
    return clients.cohort(sim.session.request("", piece.clients))


def training(sim: Simulation, piece: RoundPiece) -> Callable[[], list[Outcome]]:
    """A function that trains a piece. Its cohort is formed here, outside the timed call."""
    cohort = form_cohort(sim, piece)
    return lambda: sim.engine.train(cohort)


def failure_reason(error: Exception) -> str:
    """One line that says why a trial failed.

    >>> failure_reason(AssertionError("expected size 3==3\\nat dim=1"))
    'AssertionError: expected size 3==3'
    """
    lines = str(error).strip().splitlines()
    if isinstance(error, KedgeError) and lines:
        return lines[0]
    return ": ".join([type(error).__name__, *lines[:1]])


def measure_need(sim: Simulation, engine: str, rounds: int) -> Need | str:
    """The memory that training needs, or the reason why the engine fails on this run.

    The trial takes two steps, since the first one reads the anchor in place. An engine that batches
    clients is measured on two lanes. One that trains them in turn keeps of each client its next
    state, and its model if a part needs the clients' models.
    """
    fed, bound, batched = sim.federation, sim.bound, engines[engine].batches_clients
    largest = max(range(fed.num_clients), key=fed.sizes.__getitem__)
    lanes = 2 if batched else 1
    piece = RoundPiece([largest] * lanes, dataclasses.replace(sim.session.workload.work, steps=2))
    with isolated(fed.device):
        try:
            work = training(start_trial(sim, Execution(engine), rounds), piece)
            size = memory.peak(work, fed.device)
        except Exception as error:  # noqa: BLE001  (another engine may still work)
            return failure_reason(error)
    if batched:
        return Need(size // 2, size // 2)
    weights, state = tree.nbytes(sim.weights), tree.nbytes(bound.client())
    client_model = weights if bound.needs("clients") else 0
    # beside the client itself: the sum over clients, the next term, and the new sum
    return Need(size + 3 * weights, state + 2 * client_model)


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Restore random states, threads and warning filters after a trial. On a CPU it has one thread,
    unless it sets another number: on a busy machine, several may be very slow."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), warnings.catch_warnings(), restored_threads():
        warnings.simplefilter("ignore")
        if device.type == "cpu":
            use_threads(1)
        yield


def timed(device: torch.device, work: Callable[..., T], *args: object) -> tuple[T, float]:
    """The result of a call, and its seconds until the device has finished."""
    _synchronize(device)
    start = time.perf_counter()
    result = work(*args)
    _synchronize(device)
    return result, time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
