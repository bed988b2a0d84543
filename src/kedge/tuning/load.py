"""Other work on this machine, during trials.

A time that was measured beside other work says little about a quiet machine, so it is marked and
measured again.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path

MAX_OTHERS = 0.25  # other tasks that want to run, per core, on a quiet machine
MAX_WAIT = 1.25  # seconds per second of CPU time of one thread on a quiet machine
SAMPLES = 5


class Load:
    """How busy the machine was during some trials."""

    def __init__(self) -> None:
        self._others: list[float] = []
        self._wall = self._cpu = 0.0

    def sample(self) -> None:
        """Count the other tasks that want to run now."""
        self._others.append(other_tasks())

    def add(self, wall: float, cpu: float) -> None:
        """Add a trial of one thread: its seconds, and its seconds of CPU time."""
        self._wall, self._cpu = self._wall + wall, self._cpu + cpu

    @property
    def is_busy(self) -> bool:
        """Whether other work took part of the cores."""
        others = statistics.fmean(self._others) if self._others else 0.0
        waited = self._wall > MAX_WAIT * self._cpu and self._wall > 0.05
        return waited or others > MAX_OTHERS * (os.cpu_count() or 1)


def is_busy() -> bool:
    """Whether the machine is busy now."""
    load = Load()
    for _ in range(SAMPLES):
        load.sample()
    return load.is_busy


def other_tasks() -> float:
    """Tasks that want to run, beside this one: at this moment on Linux, elsewhere the mean of the
    last minute, which may include this process."""
    try:
        runnable = Path("/proc/loadavg").read_text().split()[3].split("/")[0]
        return max(0.0, float(runnable) - 1.0)
    except (OSError, ValueError, IndexError):
        return max(0.0, os.getloadavg()[0] - 1.0) if hasattr(os, "getloadavg") else 0.0
