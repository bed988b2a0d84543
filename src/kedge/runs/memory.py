"""Out of memory in a run: one sentence that says what to lower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kedge.errors import OutOfMemory
from kedge.limits import is_out_of_memory, out_of_memory
from kedge.runs.config import Config


@contextmanager
def memory_errors(config: Config) -> Iterator[None]:
    """Turn errors that mean out of memory into an :class:`OutOfMemory` for these settings."""
    try:
        yield
    except OutOfMemory:
        raise
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        doing = f"training {config.method} on {config.data}"
        lower = (
            f"Lower --chunk (clients at once) or --batch (now {config.batch}), keep client state "
            "elsewhere (--state file), or choose a smaller --model"
        )
        raise out_of_memory(error, doing, lower) from error
