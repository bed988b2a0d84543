"""Worker processes that share the clients of a loop, each with one thread.

The processes are forked once and inherit the data and the method without a copy. Tensors travel
through shared memory: what all clients share is written once a round, and a slot holds the job of
one client and then its answer. Tickets name the next client and its slot; they wait in a pipe that
all processes read, so the next free process takes one. Answers are reduced in the order of the
cohort: for any number of workers, the result equals that of the loop with one thread bit for bit.
"""

from __future__ import annotations

import gc
import math
import mmap
import multiprocessing
import os
import pickle
import select
import signal
import struct
import threading
import traceback
import warnings
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.bound import Bound
from kedge.core.tree import Tree
from kedge.core.work import take_jobs
from kedge.engines.cohort import Cohort, clone
from kedge.engines.device import keep_freed_memory
from kedge.engines.execution import Execution
from kedge.engines.layout import layout_of
from kedge.engines.loop import Loop, Query
from kedge.errors import FieldError, KedgeError

START_TIMEOUT_S = 60.0


class Workers(Loop):
    """The loop engine with worker processes."""

    _pool: Pool | None = None

    @classmethod
    def create(cls, execution: Execution, device: torch.device) -> Workers:
        check_workers(execution.workers, device)
        return cls(execution)

    def answers(self, cohort: Cohort, query: Query) -> Iterator[Any]:
        bound = cohort.bound.root
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the cores belong to the workers
        try:
            if self._pool is None or self._pool.bound is not bound:
                self._pool = Pool(self, bound, self.execution.workers)
            yield from self._pool.run(cohort, query)
        except BaseException:
            if self._pool is not None:
                self._pool.close()  # processes may be in the middle of a client
            self._pool = None
            raise
        finally:
            torch.set_num_threads(threads)


def can_start_workers() -> bool:
    """Whether this process can start workers: it needs fork, and Linux's shared memory."""
    forks = "fork" in multiprocessing.get_all_start_methods()
    return hasattr(os, "memfd_create") and forks and not multiprocessing.current_process().daemon


Loop.shared = Workers


def check_workers(workers: int, device: torch.device) -> None:
    """Raise a FieldError if worker processes are not possible."""
    if device.type != "cpu":
        raise FieldError(
            f"workers = {workers}: worker processes share the cores of a CPU, but this run is on "
            f"{device.type}; leave workers out, or set device = cpu"
        )
    if not can_start_workers():
        raise FieldError(
            f"workers = {workers}: worker processes need Linux, and a process that may have "
            "children (a daemon of multiprocessing may not); leave workers out"
        )


class Ticket(NamedTuple):
    """A client to train, and where to find the header of the round."""

    round: int
    header_start: int
    header_size: int
    position: int  # in the cohort
    slot: int
    client: int
    steps: int


TICKET = struct.Struct(f"<{len(Ticket._fields)}q")  # small enough for atomic writes to a pipe


class Pool:
    """Processes that train clients, forked with ``bound``."""

    def __init__(self, loop: Loop, bound: Bound, count: int) -> None:
        self.bound, self._round = bound, 0
        # slots: one per client at work, one per client that waits, one for the answer being read
        self.common, self.slots = SharedMemory(), [SharedMemory() for _ in range(2 * count + 1)]
        ticket_reader, self._tickets = os.pipe()
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        files = [self._tickets, self.common.file, *(slot.file for slot in self.slots)]
        self.close = weakref.finalize(
            self, _close, os.getpid(), self._processes, self._connections, files
        )
        context = multiprocessing.get_context("fork")
        for _ in range(count):
            receiver, sender = context.Pipe(duplex=False)
            worker = Worker(self, loop, ticket_reader, sender)
            process = context.Process(target=worker.main, args=(self._tickets,), daemon=True)
            with warnings.catch_warnings():
                # Python warns of threads that may hold a lock; torch's hold none between calls
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            sender.close()
            self._processes.append(process)
            self._connections.append(receiver)
        os.close(ticket_reader)
        try:
            for _ in range(count):
                error = self._receive(START_TIMEOUT_S)
                if error is not None:
                    raise error
        except BaseException:
            self.close()
            raise

    def run(self, cohort: Cohort, query: Query) -> Iterator[Any]:
        """The clients' answers in the order of the cohort. Each is valid until the next one."""
        total, free = cohort.size, list(range(len(self.slots)))
        header, places = self._write_header(cohort, query)
        begun = 0
        done: dict[int, tuple[int | None, Any]] = {}  # slot and answer, by position
        for i in range(total):
            while i not in done:
                while free and begun < total:
                    self._hand_out(cohort, begun, free.pop(), header, places)
                    begun += 1
                position, slot, answer = self._receive()
                done[position] = slot, answer
                # copy out-of-order answers if slots run short, so that no process is idle
                if position != i and not free and begun < total:
                    done[position] = None, self._read(slot, answer, copy=True)
                    free.append(slot)
            slot, answer = done.pop(i)
            if isinstance(answer, Exception):
                raise answer
            yield answer if slot is None else self._read(slot, answer)
            if slot is not None:
                free.append(slot)

    def _write_header(self, cohort: Cohort, query: Query) -> tuple[Span, Tree]:
        """Write what the clients of a round share, and the header that describes it.

        Returns the place of the header, and the places of a client's job in its slot.
        """
        self._round += 1
        values = {"anchor": cohort.jobs.anchor, "sent": cohort.jobs.sent}
        shared, end = allocate(values)
        places, job_end = allocate(_job_of(cohort, 0))
        text = bytearray(pickle.dumps((shared, places, job_end, query)))
        header = Span(torch.uint8, (len(text),), end)
        self.common.write(shared, values)
        self.common.write(header, torch.frombuffer(text, dtype=torch.uint8))
        return header, places

    def _hand_out(
        self, cohort: Cohort, position: int, slot: int, header: Span, places: Tree
    ) -> None:
        """Write a client's job into a slot, and its ticket into the pipe."""
        self.slots[slot].write(places, _job_of(cohort, position))
        number, steps = cohort.clients[position], cohort.steps[position]
        start, size = header.start, header.shape[0]
        ticket = Ticket(self._round, start, size, position, slot, number, steps)
        with suppress(BrokenPipeError):  # all processes died, which _receive reports
            os.write(self._tickets, TICKET.pack(*ticket))

    def _read(self, slot: int, answer: Any, copy: bool = False) -> Any:
        if isinstance(answer, Exception):
            return answer
        value = self.slots[slot].read(answer)
        return clone(value) if copy else value

    def _receive(self, timeout: float | None = None) -> Any:
        """The next message from any process."""
        sentinels = {process.sentinel: process for process in self._processes}
        ready = wait([*self._connections, *sentinels], timeout)
        if not ready:
            raise KedgeError(
                f"worker processes did not start within {timeout:g} s; leave workers out"
            )
        for connection in self._connections:
            if connection in ready:
                try:
                    return connection.recv()
                except (EOFError, OSError):
                    break
        dead = sentinels[wait(list(sentinels))[0]]  # type: ignore[index]
        dead.join()
        code = dead.exitcode or 0
        status = signal.Signals(-code).name if code < 0 else f"status {code}"
        raise KedgeError(
            f"a worker process died ({status}); SIGKILL usually means out of memory. "
            f"Use fewer workers than {len(self._processes)}, or leave workers out"
        )


class Worker:
    """A worker process: answers for one client after the other."""

    def __init__(self, pool: Pool, loop: Loop, tickets: int, connection: Connection) -> None:
        self.loop, self.bound, self.common, self.slots = loop, pool.bound, pool.common, pool.slots
        self.tickets, self.connection, self._round = tickets, connection, 0

    def main(self, ticket_writer: int) -> None:
        """Serve tickets until the parent closes the pipe; ``ticket_writer`` is its end of it."""
        os.close(ticket_writer)  # or the pipe would stay open after the parent has exited
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt lets the round finish
        threading.Thread(target=_exit_with_parent, args=(self.tickets,), daemon=True).start()
        torch.set_num_threads(1)
        keep_freed_memory()
        gc.freeze()  # inherited objects are never garbage here
        self.connection.send(_gradient_error())
        while packed := os.read(self.tickets, TICKET.size):
            self._serve(Ticket(*TICKET.unpack(packed)))
        os._exit(0)  # skip the cleanup of inherited objects

    def _serve(self, ticket: Ticket) -> None:
        try:
            slot = self.slots[ticket.slot]
            if ticket.round != self._round:
                self._read_header(ticket)
            values = slot.read(self._places)
            job = values["job"]._replace(anchor=self._shared["anchor"], sent=self._shared["sent"])
            batches = values["batches"][: ticket.steps]
            value = self.loop.answer(self._bound, job, batches, ticket.client, self._query)
            answer, _ = allocate(value, self._job_end)
            slot.write(answer, value)
        except Exception as error:  # noqa: BLE001
            answer = _picklable(error, ticket.client)
        self.connection.send((ticket.position, ticket.slot, answer))

    def _read_header(self, ticket: Ticket) -> None:
        """Read the header of a round."""
        header = Span(torch.uint8, (ticket.header_size,), ticket.header_start)
        text = self.common.read(header).numpy().tobytes()
        shared, self._places, self._job_end, self._query = pickle.loads(text)
        self._bound = self.bound.in_phases(self._query.phases)
        self._shared = layout_of(self.bound.model).place(self.common.read(shared))
        self._round = ticket.round


def _job_of(cohort: Cohort, position: int) -> Tree:
    """The job and batch indices of one client, without what all clients share."""
    job: Any = take_jobs(cohort.jobs, position)
    return {"job": job._replace(anchor={}, sent={}), "batches": cohort.batches[position]}


def _gradient_error() -> KedgeError | None:
    """The error if this process cannot take gradients, else None."""
    try:
        torch.ones((), requires_grad=True).mul(2.0).backward()
    except RuntimeError as error:
        return KedgeError(
            "worker processes cannot be started after gradients were taken in a process that sees "
            f"a GPU: hide it (CUDA_VISIBLE_DEVICES=), or leave workers out. torch: {error}"
        )
    return None


def _picklable(error: Exception, number: int) -> Exception:
    """An error that can be pickled, with the traceback of the worker as a note."""
    error.add_note(f"in a worker process, client {number}:\n{traceback.format_exc()}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001
        return KedgeError(f"client {number}: {type(error).__name__}: {error}")
    return error


def _exit_with_parent(tickets: int) -> None:
    """Exit as soon as the parent process does, even in the middle of a client."""
    poll = select.poll()
    poll.register(tickets, 0)  # reports hang-ups only
    poll.poll()
    os._exit(1)


def _close(
    owner: int, processes: list[BaseProcess], connections: list[Connection], files: list[int]
) -> None:
    """End the processes and close the files, in the process that opened them only."""
    if os.getpid() != owner:
        return
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
        process.close()
    for connection in connections:
        connection.close()
    for file in files:
        os.close(file)


ALIGNMENT = 64  # bytes, as torch aligns its own tensors


@dataclass(frozen=True)
class Span:
    """The place of a tensor in shared memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte offset

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize


class SharedMemory:
    """Anonymous shared memory that grows as needed.

    Processes forked after its creation inherit it. It is freed when the last of them exits.
    """

    def __init__(self) -> None:
        self.file = os.memfd_create("kedge")
        self._map: mmap.mmap | None = None

    def write(self, places: Tree, values: Tree) -> None:
        """Copy tensors to their places; other leaves are ignored."""
        tree.map(lambda p, x: self._at(p).copy_(x) if isinstance(p, Span) else p, places, values)

    def read(self, places: Tree) -> Tree:
        """The tensors at some places, without a copy; other leaves are returned as they are."""
        return tree.map(lambda p: self._at(p) if isinstance(p, Span) else p, places)

    def _at(self, place: Span) -> Tensor:
        count = math.prod(place.shape)
        if not count:
            return torch.empty(place.shape, dtype=place.dtype)
        if self._map is None or len(self._map) < place.end:
            if os.fstat(self.file).st_size < place.end:
                os.ftruncate(self.file, place.end)
            self._map = mmap.mmap(self.file, 0)  # tensors keep the old map alive
        flat = torch.frombuffer(self._map, dtype=place.dtype, count=count, offset=place.start)
        return flat.reshape(place.shape)


def allocate(values: Tree, start: int = 0) -> tuple[Tree, int]:
    """Assign places to the tensors of a tree, one after the other from byte ``start``.

    Returns the tree with a :class:`Span` for every tensor, other leaves unchanged, and the byte
    where the last tensor ends.
    """
    end = start

    def place(x: Any) -> Any:
        nonlocal end
        if not isinstance(x, Tensor):
            return x
        found = Span(x.dtype, tuple(x.shape), math.ceil(end / ALIGNMENT) * ALIGNMENT)
        end = found.end
        return found

    return tree.map(place, values), end
