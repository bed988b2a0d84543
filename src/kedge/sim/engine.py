"""Two ways to run the clients of a round, with the same result: :class:`~kedge.sim.loop.Loop`, one
after the other, and :class:`~kedge.sim.vector.Vector`, all at once."""

from __future__ import annotations

from dataclasses import dataclass

from kedge.errors import UnknownName
from kedge.sim.loop import Loop
from kedge.sim.vector import Vector

Engine = Loop | Vector
ENGINES: dict[str, type[Engine]] = {"loop": Loop, "vector": Vector}


@dataclass(frozen=True)
class How:
    """How rounds are computed. None of it changes what is computed, but for rounding."""

    engine: str = "vector"
    workers: int = 0  # processes that share the clients of a loop on a CPU; 0: this one alone
    chunk: int = 0  # clients at once, at most; 0: the whole cohort
    streams: int = 0  # clients of a loop side by side on a GPU; 0: one
    compile: bool = False  # let torch's compiler fuse the steps on a GPU
    state: str = "device"  # where clients' own state lies: device, host or file


def make_engine(how: How) -> Engine:
    if how.engine not in ENGINES:
        raise UnknownName("engine", how.engine, ENGINES)
    return ENGINES[how.engine]()
