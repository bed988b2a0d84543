"""What is done where memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from kedge.engines.capture import Captures
from kedge.errors import HookError

T = TypeVar("T")


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is one, or comes from one (in a hook, or while a graph was recorded)."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def fitting(captures: Captures, work: Callable[[], T], narrow: Callable[[], None]) -> T:
    """Do some work. Where memory runs out, again without what was recorded for other rounds, then
    with less at once: ``narrow`` sees to that, or raises."""
    earlier = len(captures) > 0
    while True:
        try:
            return work()
        except (RuntimeError, HookError) as error:
            if not ran_out_of_memory(error):
                raise
        # outside the handler, where what the failed work held is let go
        if not earlier:
            narrow()
        earlier = False
        captures.forget()
