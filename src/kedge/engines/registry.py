"""Ways to run the clients of a round, with the same result: :class:`~kedge.engines.loop.Loop`, one
after the other, :class:`~kedge.engines.workers.Workers`, the same shared among processes, and
:class:`~kedge.engines.vector.Vector`, all at once."""

from __future__ import annotations

import torch

from kedge.engines.cohort import How
from kedge.engines.loop import Loop
from kedge.engines.vector import Vector
from kedge.engines.workers import Workers, check_workers
from kedge.errors import FieldError, UnknownName

Engine = Loop | Vector
__all__ = ["ENGINES", "Engine", "How", "make_engine"]
ENGINES: dict[str, type[Engine]] = {"loop": Loop, "vector": Vector}


def make_engine(how: How, device: torch.device) -> Engine:
    if how.engine not in ENGINES:
        raise UnknownName("engine", how.engine, ENGINES)
    if how.streams and (how.engine != "loop" or device.type != "cuda"):
        raise FieldError(
            f"streams = {how.streams}: clients of a loop train side by side on a GPU, but this is "
            f"engine = {how.engine} on {device.type}; leave streams out"
        )
    if not how.workers:
        return ENGINES[how.engine](how)
    if how.engine != "loop":
        raise FieldError(
            f"workers = {how.workers}: worker processes share the clients of a loop; set "
            f"engine = loop, or leave workers out"
        )
    check_workers(how.workers, device)
    return Workers(how)
