"""Two ways to run the clients of a round, with the same result: :class:`~kedge.sim.loop.Loop`, one
after the other, and :class:`~kedge.sim.vector.Vector`, all at once."""

from __future__ import annotations

from kedge.errors import UnknownName
from kedge.sim.cohort import How
from kedge.sim.loop import Loop
from kedge.sim.vector import Vector

Engine = Loop | Vector
__all__ = ["ENGINES", "Engine", "How", "make_engine"]
ENGINES: dict[str, type[Engine]] = {"loop": Loop, "vector": Vector}


def make_engine(how: How) -> Engine:
    if how.engine not in ENGINES:
        raise UnknownName("engine", how.engine, ENGINES)
    return ENGINES[how.engine](how)
