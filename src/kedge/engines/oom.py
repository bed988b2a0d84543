"""Retry with fewer clients after CUDA runs out of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from kedge.engines.capture import Captures
from kedge.errors import HookError

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
