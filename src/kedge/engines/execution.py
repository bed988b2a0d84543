"""The settings that say how rounds are computed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Execution:
    """How rounds are computed. None of it changes what is computed, but for rounding."""

    engine: str = "vector"
    workers: int = 0  # processes that share the clients of a loop on a CPU; 0: this one alone
    chunk: int = 0  # clients at once, at most; 0: the whole cohort
    streams: int = 0  # clients of a loop side by side on a GPU; 0: one
    compile: bool = False  # let torch's compiler fuse the steps (of a loop: on a GPU)
    state: str = "device"  # where clients' own state lies: device, host or file
    folder: str = ""  # where such a file lies; "": the folder for temporary files
