"""Retry with fewer clients after CUDA runs out of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from kedge.engines.capture import Captures
from kedge.errors import HookError

T = TypeVar("T")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is out of memory, or was caused by it (in a hook, or during capture)."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def retry_smaller(captures: Captures, work: Callable[[], T], shrink: Callable[[], None]) -> T:
    """Call ``work``. After out of memory, call it again: first without the graphs captured for
    other rounds, then with fewer clients at once, for which ``shrink`` provides, or raises."""
    earlier = len(captures) > 0
    while True:
        try:
            return work()
        except (RuntimeError, HookError) as error:
            if not is_out_of_memory(error):
                raise
        # outside the handler: there the tensors of the failed call are freed
        if not earlier:
            shrink()
        earlier = False
        captures.forget()
