"""The execution settings of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Execution:
    """How rounds are computed. Results do not depend on it, except for rounding.

    >>> Execution("loop", workers=4).state
    'device'
    """

    engine: str = "vector"
    workers: int = 0  # processes that share the clients of a loop on a CPU; 0: none
    chunk: int = 0  # maximal number of clients at once; 0: the whole cohort
    streams: int = 0  # clients of a loop side by side on a GPU; 0: one at a time
    compile: bool = False  # fuse the steps with torch's compiler (those of a loop on a GPU only)
    state: str = "device"  # location of client state: device, host or file
    threads: int = 0  # of torch on a CPU, set for a whole run; 0: torch's own number
    folder: str = ""  # folder of that file; "": the folder for temporary files
