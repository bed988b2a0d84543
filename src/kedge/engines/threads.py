"""Threads of torch on a CPU: how many a run uses, and how they wait.

A thread that waits for the others spins by default. On a machine with other work it takes the core
that the others need, and a run of small operators becomes 10 to 50 times slower. The command
``kedge`` therefore lets them sleep (:func:`kedge.cli.let_waiting_threads_sleep`). For a program of
your own, set ``OMP_WAIT_POLICY=passive`` before it starts.

The number of threads changes the order of sums, hence the last digits of results. A run records it,
and a resumed run keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def use_threads(count: int) -> None:
    """Compute with so many threads from now on; 0 changes nothing."""
    if count and count != torch.get_num_threads():
        torch.set_num_threads(count)


@contextmanager
def restored_threads() -> Iterator[None]:
    """Restore the number of threads on exit."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        use_threads(before)
