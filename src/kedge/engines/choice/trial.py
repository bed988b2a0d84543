"""Trials: pieces of a round of a run, on simulations of their own, to see what they take."""

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
from kedge.engines.choice import memory
from kedge.engines.choice.memory import Need
from kedge.engines.choice.subject import Subject
from kedge.engines.cohort import Cohort, Outcome
from kedge.engines.engine import engines
from kedge.engines.execution import Execution
from kedge.errors import KedgeError

T = TypeVar("T")


class Piece(NamedTuple):
    """Some clients, and what they do."""

    clients: list[int]
    work: LocalWork

    def steps(self, sim: Subject) -> int:
        return sum(self.work.steps_for(sim.federation.sizes[k]) for k in self.clients)


def one_step(sim: Subject, clients: list[int]) -> Piece:
    return Piece(clients, dataclasses.replace(sim.work, steps=1))


def start_trial(sim: Subject, execution: Execution, rounds: int) -> Subject:
    """A simulation like another one, in the middle of its rounds, since a part may start late. Its
    clients' state takes no memory before it is used."""
    return sim.trial(dataclasses.replace(execution, state="host"), rounds // 2)


def cohort_of(sim: Subject, piece: Piece) -> Cohort:
    sim.work = piece.work
    return sim.cohort(piece.clients)


def training(sim: Subject, piece: Piece) -> Callable[[], list[Outcome]]:
    """A function that trains a piece; the cohort is formed now."""
    cohort = cohort_of(sim, piece)
    return lambda: sim.engine.train(cohort)


def reason(error: Exception) -> str:
    """Why a trial failed, in one line.

    >>> reason(AssertionError("expected size 3==3\\nat dim=1"))
    'AssertionError: expected size 3==3'
    """
    lines = str(error).strip().splitlines()
    if isinstance(error, KedgeError) and lines:
        return lines[0]
    return ": ".join([type(error).__name__, *lines[:1]])


def need(sim: Subject, engine: str, rounds: int) -> Need | str:
    """The memory that training takes, or why this engine fails on these clients.

    Two steps, since the first one starts from weights that are there already. All clients at once
    are seen on two of them. One after the other, what remains of each is its next state, and its
    model for parts that want to see it.
    """
    fed, bound, stacked = sim.federation, sim.bound, engines[engine].batches_clients
    largest = max(range(fed.num_clients), key=fed.sizes.__getitem__)
    lanes = 2 if stacked else 1
    piece = Piece([largest] * lanes, dataclasses.replace(sim.work, steps=2))
    with undisturbed(fed.device):
        try:
            work = training(start_trial(sim, Execution(engine), rounds), piece)
            size = memory.peak(work, fed.device)
        except Exception as error:  # noqa: BLE001  (whatever it is, other engines may do without)
            return reason(error)
    if stacked:
        return Need(size // 2, size // 2)
    weights, state = tree.nbytes(sim.weights), tree.nbytes(bound.client())
    seen = weights if bound.needs("clients") else 0
    # beside the client's own: a sum over clients, what is added to it, and the next sum
    return Need(size + 3 * weights, state + 2 * seen)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """What is tried leaves no trace: random numbers, threads and warnings stay as they were."""
    threads = torch.get_num_threads()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def timed(device: torch.device, work: Callable[..., T], *args: object) -> tuple[T, float]:
    """What some work gives, and the seconds it takes, with what it leaves to the device."""
    _wait(device)
    start = time.perf_counter()
    done = work(*args)
    _wait(device)
    return done, time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
