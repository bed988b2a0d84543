"""Steps as CUDA graphs: one launch runs several local steps of all clients, or of the server.

A captured graph reads and writes fixed memory, so all inputs of a step are copied into static
buffers at the start of a round: the jobs, the carry, and the batch indices. A graph holds
``UNROLL`` steps if the round is long enough, so that the carry between them stays inside the graph.
Several clients may replay their graphs at the same time, each on its own stream.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.client import Carry
from kedge.core.view import Job
from kedge.core.work import take_jobs
from kedge.engines.torch_private import foreach_copy_
from kedge.errors import HookError

Step = Callable[[Job, Carry, Tensor], Carry]
Fuse = Callable[..., Callable[..., Any]]  # (function, *examples of its arguments)
UNROLL = 10  # steps in one graph
Captured = TypeVar("Captured")


class Graphs:
    """CUDA graphs by name, each captured on its first use.

    Args:
        device: on which they run.
        carry: static buffers that the work changes; the warm-up of a capture restores them.
    """

    def __init__(self, device: torch.device, carry: Any) -> None:
        self._device, self._carry = device, carry
        self._graphs: dict[Any, torch.cuda.CUDAGraph] = {}
        self._results: dict[Any, Any] = {}
        # graphs replay one after the other and their results are copied or kept, so they can share
        # a memory pool
        self._pool = torch.cuda.graph_pool_handle()

    def replay(self, name: Any, work: Callable[[], Any]) -> Any:
        """Replay some work, captured on its first use.

        Returns its result, in memory that the next replay overwrites.
        """
        with torch.cuda.device(self._device):  # graphs belong to the current device
            if name not in self._graphs:
                self._graphs[name], self._results[name] = self._capture(work)
            self._graphs[name].replay()
        return self._results[name]

    def _capture(self, work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Capture some work after a warm-up, which must not change the carry.

        Graphs captured on one stream share its cuBLAS workspace, so graphs that replay at the same
        time must be captured on the streams on which they replay.
        """
        before = tree.map(torch.clone, self._carry)
        current = torch.cuda.current_stream()
        is_default = current == torch.cuda.default_stream()  # which cannot be captured
        stream = torch.cuda.Stream() if is_default else current
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(2):
                work()
        current.wait_stream(stream)
        copy_into(self._carry, before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=None if is_default else current):
            result = work()
        return graph, result


class Functions(NamedTuple):
    """What a round of clients consists of."""

    begin: Callable[[Job], Carry]  # the first carry
    step: Step  # the next carry
    end: Callable[[Job, Carry], Any]  # the result


class CapturedSteps:
    """Captures and replays the steps of a round on static copies of jobs and carry.

    Args:
        functions: of the round.
        jobs: of the shapes of later jobs.
        rows: the shape of one step's batch indices, ``(batch,)`` or ``(lanes, batch)``.
        fuse: compiles ``step`` and ``end``; None: they run eagerly.
    """

    def __init__(
        self, functions: Functions, jobs: Job, rows: tuple[int, ...], fuse: Fuse | None = None
    ) -> None:
        self.begin, self.step, self.end = functions
        step, end, carry = self.step, self.end, self.begin(jobs)
        self.jobs, self.rows = static_copy(jobs), rows
        device = next(iter(tree.leaves(carry))).device
        self.index = torch.zeros((UNROLL, *rows), dtype=torch.int64, device=device)
        # in the memory format that a step returns, which the next step reads
        self.carry = static_copy(step(self.jobs, carry, self.index[0]))
        self.full_step = step  # for all lanes
        if fuse is not None:
            self.full_step = fuse(step, self.jobs, self.carry, self.index[0])
            self.end = fuse(end, self.jobs, self.carry)
        self._graphs = Graphs(device, self.carry)

    def start(self, jobs: Job) -> None:
        """Copy the jobs of a round into the static buffers and begin the round."""
        copy_into(self.jobs, jobs)
        self._graphs.replay("begin", lambda: copy_into(self.carry, self.begin(self.jobs)))

    def finish(self) -> Any:
        """The result of ``end``, valid until the next round."""
        return self._graphs.replay("end", lambda: self.end(self.jobs, self.carry))

    def run(self, batches: Tensor, lanes: int | None = None) -> None:
        """Run steps.

        Args:
            batches: ``[steps, *rows]`` batch indices.
            lanes: run the first so many lanes; None: there is no client axis.
        """
        for done, count in _pieces(len(batches)):
            indices = batches[done : done + count]
            target = self.index[:count] if lanes is None else self.index[:count, :lanes]
            target.copy_(indices)
            self._graphs.replay((count, lanes), partial(self._steps, count, lanes))

    def _steps(self, count: int, lanes: int | None) -> None:
        carry, jobs = self.carry, self.jobs
        if lanes is not None:
            carry, jobs = tree.take(carry, slice(lanes)), take_jobs(jobs, slice(lanes))
        target = carry
        step = self.full_step if lanes is None or lanes == self.rows[0] else self.step
        for t in range(count):
            index = self.index[t] if lanes is None else self.index[t, :lanes]
            carry = step(jobs, carry, index)
        copy_into(target, carry)


def _pieces(total: int) -> Iterator[tuple[int, int]]:
    """``(first step, number of steps)`` of the graphs that run ``total`` steps.

    >>> list(_pieces(7)), list(_pieces(21))
    ([(0, 7)], [(0, 10), (10, 10), (20, 1)])
    """
    done = 0
    while done < total:
        count = UNROLL if total - done >= UNROLL else 1
        if total <= UNROLL:
            count = total  # a short round is one graph
        yield done, count
        done += count


class CapturedLoop:
    """Captures and replays ``carry = step(given, carry, x)`` over the rows x of a tree.

    Args:
        step: a pure function of trees.
        given: of the shapes of later ones.
        carry: of the shapes of later ones.
        xs: leaves ``[steps, ...]``; later ones have as many, or ``UNROLL`` or more.
        fuse: compiles ``step``; None: it runs eagerly.
        stays: whether a tensor of ``given`` or ``xs`` is in the same memory in all later calls, so
            that it is read there.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        given: Any,
        carry: Any,
        xs: Any,
        fuse: Fuse | None = None,
        stays: Callable[[Tensor], bool] = lambda _: False,
    ) -> None:
        self.given = static_copy(given, stays)
        one_piece = len(next(tree.leaves(xs))) <= UNROLL
        rows = tree.take(xs, slice(UNROLL))
        self.xs = static_copy(rows, stays) if one_piece else static_copy(rows)
        first = tree.take(self.xs, 0)
        # in the memory format that a step returns, which the next step reads
        self.carry = static_copy(step(self.given, carry, first))
        self.step = step if fuse is None else fuse(step, self.given, self.carry, first)
        self._graphs = Graphs(next(tree.leaves(self.carry)).device, self.carry)

    def run(self, given: Any, carry: Any, xs: Any) -> Any:
        """The last carry, in memory that the next run overwrites."""
        copy_into(self.given, given)
        copy_into(self.carry, carry)
        for done, count in _pieces(len(next(tree.leaves(xs)))):
            copy_into(tree.take(self.xs, slice(count)), tree.take(xs, slice(done, done + count)))
            self._graphs.replay(count, partial(self._steps, count))
        return self.carry

    def _steps(self, count: int) -> None:
        carry = self.carry
        for t in range(count):
            carry = self.step(self.given, carry, tree.take(self.xs, t))
        # a step may return a leaf of its carry under another name: read all before the first write
        buffers = {address_of(x) for x in tree.leaves(self.carry)}
        carry = tree.map(
            lambda t, x: x if x is t or address_of(x) not in buffers else x.clone(),
            self.carry,
            carry,
        )
        copy_into(self.carry, carry)


class CapturedFunction:
    """Captures and replays a pure function of a tree, given one of the shapes of later ones.

    ``stays`` is that of :class:`CapturedLoop`.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        given: Any,
        fuse: Fuse | None = None,
        stays: Callable[[Tensor], bool] = lambda _: False,
    ) -> None:
        self.given = static_copy(given, stays)
        self.function = function if fuse is None else fuse(function, self.given)
        self._graphs = Graphs(next(tree.leaves(self.given)).device, {})

    def run(self, given: Any) -> Any:
        """The result, in memory that the next run overwrites."""
        copy_into(self.given, given)
        return self._graphs.replay("call", lambda: self.function(self.given))


def address_of(x: Tensor) -> int:
    """Where the memory of a tensor, or of what it is a view of, begins."""
    return x.untyped_storage().data_ptr()


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same memory."""
    if a is b:
        return True
    same = a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.numel() > 0
    return same and a.stride() == b.stride() and a.dtype == b.dtype


def static_copy(value: Any, stays: Callable[[Tensor], bool] = lambda _: False) -> Any:
    """A copy of a tree, but for tensors that stay where they are."""
    return tree.map(lambda x: x if stays(x) else x.clone(), value)


def copy_into(target: Any, source: Any) -> None:
    """Copy a tree into another one."""
    pairs: list[tuple[Tensor, Tensor]] = []
    tree.map(lambda t, s: None if _is_same(t, s) else pairs.append((t, s)), target, source)
    foreach_copy_([t for t, _ in pairs], [s for _, s in pairs])


def shapes_of(value: Any) -> tuple[Any, ...]:
    """Shapes and dtypes of all leaves: the key under which a graph can be reused."""
    return tuple((tuple(x.shape), x.dtype) for x in tree.leaves(value))


class Captures:
    """Captured steps of clients and of the server by key; None where capture failed."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._captured: dict[Any, Any] = {}

    def get(self, key: Any, make: Callable[[], Captured]) -> Captured | None:
        """The steps of a key, made on first use; None after :meth:`give_up`."""
        if key not in self._captured:
            self._captured[key] = make()
        return self._captured[key]

    def __len__(self) -> int:
        return len(self._captured)

    def clear(self) -> None:
        """Free all graphs and their memory."""
        self._captured.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def give_up(self, key: Any, error: Exception) -> None:
        """Run the steps of a key eagerly from now on, with a warning."""
        self._captured[key] = None
        warnings.warn(
            f"steps could not be captured as a CUDA graph and run eagerly: {error}", stacklevel=2
        )


def side_by_side(
    work: Callable[[int, int], Any], count: int, streams: Sequence[torch.cuda.Stream]
) -> Iterator[Any]:
    """The results of ``work(i, slot)`` for ``i < count`` in order, one at a time per stream."""
    main = torch.cuda.current_stream(streams[0].device)
    waiting: list[tuple[Any, torch.cuda.Stream]] = []

    def take() -> Any:
        result, stream = waiting.pop(0)
        main.wait_stream(stream)
        for x in tree.leaves(result):
            if isinstance(x, Tensor):
                x.record_stream(main)  # do not reuse its memory before it is read
        return result

    try:
        for i in range(count):
            slot = i % len(streams)
            stream = streams[slot]
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                waiting.append((work(i, slot), stream))
            if len(waiting) == len(streams):
                yield take()
        while waiting:
            yield take()
    finally:  # the streams' inputs must stay alive until they are read
        for stream in streams:
            main.wait_stream(stream)


# -- Retry with fewer clients after CUDA runs out of memory ----------------------------------------


T = TypeVar("T")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is, or was caused by, out of memory (in a hook, or during capture)."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def retry_smaller(captures: Captures, work: Callable[[], T], shrink: Callable[[], None]) -> T:
    """Call ``work``, and retry after out of memory.

    The first retry frees the graphs captured for other rounds. Before each further one, ``shrink``
    reduces the number of clients at once, or raises.
    """
    has_graphs = len(captures) > 0
    while True:
        try:
            return work()
        except (RuntimeError, HookError) as error:
            if not is_out_of_memory(error):
                raise
        # outside the handler, where the traceback would keep the tensors of the failed call alive
        if not has_graphs:
            shrink()
        has_graphs = False
        captures.clear()
