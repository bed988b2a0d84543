"""Ways to run the clients of a round, with the same result: :class:`~kedge.sim.loop.Loop`, one
after the other, :class:`~kedge.sim.workers.Workers`, the same shared among processes, and
:class:`~kedge.sim.vector.Vector`, all at once."""

from __future__ import annotations

import torch

from kedge.errors import FieldError, UnknownName
from kedge.sim.cohort import How
from kedge.sim.loop import Loop
from kedge.sim.vector import Vector
from kedge.sim.workers import Workers, check_workers

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
