"""Rounds that are timed in the process that runs them, of kedge or of a rival."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from bench.speed.eager import EagerRounds
from bench.speed.workloads import Workload
from kedge.engines.device import precise

PACKAGES = {"pfl": ("pfl",), "flower": ("flwr", "ray")}


class InProcess:
    """Rounds in this process, with its own number of threads and precision.

    A call runs one round, waits for the device, and returns the seconds.
    """

    def __init__(
        self, run: Callable[[], Any], device: str, precision: str, threads: int,
        close: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._run, self._device, self._precision = run, torch.device(device), precision
        self._threads, self.close = threads, close
        on_gpu = self._device.type == "cuda"
        self._wait = partial(torch.cuda.synchronize, self._device) if on_gpu else lambda: None

    def __call__(self) -> float:
        if self._threads != torch.get_num_threads():
            torch.set_num_threads(self._threads)
        with precise(self._precision, self._device):
            self._wait()
            start = time.perf_counter()
            self._run()
            self._wait()
            return time.perf_counter() - start


def rival_rounds(
    rival: str, work: Workload, data: tuple[Tensor, Tensor], precision: str
) -> Callable[[], None]:
    """The rounds of a rival in this process."""
    if rival == "eager":
        return EagerRounds(work, data, precision)
    from bench.speed.pfl_rival import PflRounds

    return PflRounds(work, data, precision)


def versions_of(rival: str) -> dict[str, str]:
    """The versions of the packages of a rival that are installed."""
    found = {}
    for package in PACKAGES.get(rival, ()):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
