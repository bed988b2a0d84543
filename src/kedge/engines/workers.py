"""The clients of a round shared among processes, each of them a plain loop with one thread.

The processes are forked once, so they have the data and the method without a copy. From then on all
tensors go through shared memory: what all clients share is written once a round, and every client
gets a slot that holds its own job and then its answer. Tickets that name the next client and its
slot stand in a pipe that all processes read, so whoever is free takes one. Answers are taken in the
cohort's order, whatever order they come in: the result is that of the loop with one thread, bit for
bit, whatever the number of processes.
"""

from __future__ import annotations

import ctypes
import gc
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
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.bound import Bound
from kedge.core.tree import Tree
from kedge.core.work import take_jobs
from kedge.engines.cohort import Cohort
from kedge.engines.layout import layout_of
from kedge.engines.loop import Ask, Loop
from kedge.engines.shared_memory import Memory, Place, places
from kedge.errors import FieldError, KedgeError

START_SECONDS = 60.0  # a process that has not reported by then is stuck
MMAP_THRESHOLD, TRIM_THRESHOLD, TOP_PAD = -3, -1, -2  # options of glibc's mallopt


class Workers(Loop):
    """The loop, with its clients shared among processes."""

    _pool: Pool | None = None

    def each(self, cohort: Cohort, ask: Ask) -> Iterator[Any]:
        bound = cohort.bound.root
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the cores belong to the workers
        try:
            if self._pool is None or self._pool.bound is not bound:
                self._pool = Pool(self, bound, self.execution.workers)
            yield from self._pool.run(cohort, ask)
        except BaseException:
            if self._pool is not None:
                self._pool.close()  # they may be in the middle of something
            self._pool = None
            raise
        finally:
            torch.set_num_threads(threads)


def can_start_workers() -> bool:
    """Whether this process can have workers: it forks them, and Linux has the memory they share."""
    forks = "fork" in multiprocessing.get_all_start_methods()
    return hasattr(os, "memfd_create") and forks and not multiprocessing.current_process().daemon


def check_workers(workers: int, device: torch.device) -> None:
    """Say clearly where there are no worker processes."""
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
    """The next client: its place in the cohort, its slot, itself, and the round's note."""

    round: int
    note_start: int
    note_size: int
    at: int
    slot: int
    who: int
    steps: int


TICKET = struct.Struct(f"<{len(Ticket._fields)}q")  # so small that a pipe never splits it


class Pool:
    """Processes that answer for clients, forked with ``bound``."""

    def __init__(self, loop: Loop, bound: Bound, count: int) -> None:
        self.bound, self._round = bound, 0
        # a slot for every client at work, for every one that waits, and for one that is taken in
        self._common, self._slots = Memory(), [Memory() for _ in range(2 * count + 1)]
        counter, self._tickets = os.pipe()
        self._processes: list[BaseProcess] = []
        self._lines: list[Connection] = []
        files = [self._tickets, self._common.file, *(slot.file for slot in self._slots)]
        self.close = weakref.finalize(
            self, _close, os.getpid(), self._processes, self._lines, files
        )
        context = multiprocessing.get_context("fork")
        for _ in range(count):
            line, there = context.Pipe(duplex=False)
            worker = Worker(loop, bound, self._common, self._slots, counter, there)
            process = context.Process(target=worker.main, args=(self._tickets,), daemon=True)
            with warnings.catch_warnings():
                # Python warns of threads that may hold a lock; between calls torch's hold none
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            there.close()
            self._processes.append(process)
            self._lines.append(line)
        os.close(counter)
        try:
            for _ in range(count):
                refusal = self._next(START_SECONDS)
                if refusal is not None:
                    raise refusal
        except BaseException:
            self.close()
            raise

    def run(self, cohort: Cohort, ask: Ask) -> Iterator[Any]:
        """The clients' answers in their order; each one is valid until the next is asked for."""
        total, free = cohort.size, list(range(len(self._slots)))
        note, own = self._announce(cohort, ask)
        begun = 0
        done: dict[int, tuple[int | None, Any]] = {}  # slot and answer of those not yet taken
        for i in range(total):
            while i not in done:
                while free and begun < total:
                    self._hand_out(cohort, begun, free.pop(), note, own)
                    begun += 1
                at, slot, answer = self._next()
                done[at] = slot, answer
                if at != i and not free and begun < total:  # nobody shall wait for a slow client
                    done[at] = None, self._read(slot, answer, copy=True)
                    free.append(slot)
            slot, answer = done.pop(i)
            if isinstance(answer, Exception):
                raise answer
            yield answer if slot is None else self._read(slot, answer)
            if slot is not None:
                free.append(slot)

    def _announce(self, cohort: Cohort, ask: Ask) -> tuple[Place, Tree]:
        """Write what the clients of a round share, with a note that says where; the note's place,
        and those of a client's own job in its slot."""
        self._round += 1
        values = {"anchor": cohort.jobs.anchor, "sent": cohort.jobs.sent}
        shared, end = places(values)
        own, own_end = places(_own(cohort, 0))
        text = bytearray(pickle.dumps((shared, own, own_end, ask)))
        note = Place(torch.uint8, (len(text),), end)
        self._common.write(shared, values)
        self._common.write(note, torch.frombuffer(text, dtype=torch.uint8))
        return note, own

    def _hand_out(self, cohort: Cohort, at: int, slot: int, note: Place, own: Tree) -> None:
        self._slots[slot].write(own, _own(cohort, at))
        who, steps = cohort.clients[at], cohort.steps[at]
        ticket = Ticket(self._round, note.start, note.shape[0], at, slot, who, steps)
        with suppress(BrokenPipeError):  # they have all ended, which _next will say
            os.write(self._tickets, TICKET.pack(*ticket))

    def _read(self, slot: int, answer: Any, copy: bool = False) -> Any:
        if isinstance(answer, Exception):
            return answer
        value = self._slots[slot].read(answer)
        return tree.map(_clone, value) if copy else value

    def _next(self, seconds: float | None = None) -> Any:
        """What one of the processes says next."""
        ends = {process.sentinel: process for process in self._processes}
        ready = wait([*self._lines, *ends], seconds)
        if not ready:
            raise KedgeError(f"worker processes do not start within {seconds:g} s; leave them out")
        for line in self._lines:
            if line in ready:
                try:
                    return line.recv()
                except (EOFError, OSError):
                    break
        ended = ends[wait(list(ends))[0]]  # type: ignore[index]
        ended.join()
        code = ended.exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"status {code}"
        raise KedgeError(
            f"a worker process has ended ({how}); SIGKILL is what the system sends when memory "
            f"runs out. Use fewer workers than {len(self._processes)}, or leave them out"
        )


class Worker:
    """The other side: answers for one client after the other, in a process of its own."""

    def __init__(
        self,
        loop: Loop,
        bound: Bound,
        common: Memory,
        slots: list[Memory],
        counter: int,
        line: Connection,
    ) -> None:
        self.loop, self.bound, self.common, self.slots = loop, bound, common, slots
        self.counter, self.line, self._round = counter, line, 0

    def main(self, tickets: int) -> None:
        os.close(tickets)  # the pipe ends when the process that writes into it does
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C lets the round be finished
        threading.Thread(target=_end_with, args=(self.counter,), daemon=True).start()
        torch.set_num_threads(1)
        _keep_memory()
        gc.freeze()  # what was inherited stays, so it need not be looked through for garbage
        self.line.send(_refusal())
        while packed := os.read(self.counter, TICKET.size):
            self._serve(Ticket(*TICKET.unpack(packed)))
        os._exit(0)  # nothing that was inherited is to be cleaned up here

    def _serve(self, ticket: Ticket) -> None:
        try:
            slot = self.slots[ticket.slot]
            if ticket.round != self._round:
                self._begin(ticket)
            own = slot.read(self._own)
            job = own["job"]._replace(anchor=self._shared["anchor"], sent=self._shared["sent"])
            batches = own["batches"][: ticket.steps]
            value = self.loop.answer(self._bound, job, batches, ticket.who, self._ask)
            answer, _ = places(value, self._own_end)
            slot.write(answer, value)
        except Exception as error:  # noqa: BLE001
            answer = _portable(error, ticket.who)
        self.line.send((ticket.at, ticket.slot, answer))

    def _begin(self, ticket: Ticket) -> None:
        """Read the note of a round."""
        note = Place(torch.uint8, (ticket.note_size,), ticket.note_start)
        text = self.common.read(note).numpy().tobytes()
        shared, self._own, self._own_end, self._ask = pickle.loads(text)
        self._bound = self.bound.in_phases(self._ask.phases)
        self._shared = layout_of(self.bound.model).place(self.common.read(shared))
        self._round = ticket.round


def _own(cohort: Cohort, at: int) -> Tree:
    """What belongs to one client alone."""
    job: Any = take_jobs(cohort.jobs, at)
    return {"job": job._replace(anchor={}, sent={}), "batches": cohort.batches[at]}


def _clone(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _refusal() -> KedgeError | None:
    """Why this process cannot take gradients, if it cannot."""
    try:
        torch.ones((), requires_grad=True).mul(2.0).backward()
    except RuntimeError as error:
        return KedgeError(
            "worker processes cannot be started after gradients were taken in a process that sees "
            f"a GPU: hide it (CUDA_VISIBLE_DEVICES=), or leave workers out. torch says: {error}"
        )
    return None


def _keep_memory() -> None:
    """Let this process keep the memory of tensors that it frees. By default that of large ones goes
    back to the system, which has to clear it before the next step gets it again."""
    with suppress(OSError, AttributeError):  # another C library than glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(TRIM_THRESHOLD, 1 << 30)
        libc.mallopt(TOP_PAD, 1 << 26)
        for size in (1 << 30, 1 << 25):  # the most that old and new ones take
            if libc.mallopt(MMAP_THRESHOLD, size):
                break


def _portable(error: Exception, who: int) -> Exception:
    """An error that can be sent, with where it happened."""
    error.add_note(f"in a worker process, client {who}:\n{traceback.format_exc()}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001
        return KedgeError(f"client {who}: {type(error).__name__}: {error}")
    return error


def _end_with(counter: int) -> None:
    """End this process, whatever it is at, when the one that hands out tickets has ended."""
    poll = select.poll()
    poll.register(counter, 0)  # reports hang-ups only
    poll.poll()
    os._exit(1)


def _close(
    owner: int, processes: list[BaseProcess], lines: list[Connection], files: list[int]
) -> None:
    if os.getpid() != owner:
        return
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
        process.close()
    for line in lines:
        line.close()
    for file in files:
        os.close(file)
