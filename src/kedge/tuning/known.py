"""What is remembered of the trials of a run, what it depends on, and how long it counts."""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kedge._version import __version__
from kedge.engines.device import device_name, effective
from kedge.engines.execution import Execution
from kedge.sim.simulation import Simulation
from kedge.tuning import load
from kedge.tuning.memory import Need
from kedge.tuning.placement import Settings
from kedge.tuning.timings import Timings

MAX_AGE_S = 30 * 86400.0  # older timings are measured again
MAX_BUSY_AGE_S = 86400.0  # the same for those of a busy machine


@dataclass
class Measurements:
    """Memory by engine, None for one that fails, and timings by candidate."""

    needs: dict[str, Need | None]
    timings: Timings | None = None
    failures: dict[str, str] = field(default_factory=dict)  # reasons, by engine
    operator: float | None = None  # floating-point operations of the largest operator of a step
    when: float = field(default_factory=time.time)  # of the timings, in seconds since the epoch

    @classmethod
    def from_record(cls, record: dict[str, Any] | None) -> Measurements:
        """Read a record of the cache. A malformed one counts as missing."""
        try:
            assert record is not None
            needs = {
                name: need and Need(int(need[0]), int(need[1]))
                for name, need in record["needs"].items()
            }
            given = record["timings"]
            timings = given and Timings(
                dict(given["steps"]),
                dict(given["rounds"]),
                float(given["test"]),
                dict(given["failures"]),
                dict(given["spread"]),
                bool(given["busy"]),
            )
            operator, failures = float(record["operator"]), dict(record["failures"])
            return cls(needs, timings, failures, operator, float(record["when"]))
        except (AssertionError, AttributeError, LookupError, TypeError, ValueError):
            return cls({})

    def to_record(self) -> dict[str, Any]:
        return {
            "needs": self.needs,
            "timings": dataclasses.asdict(self.timings) if self.timings else None,
            "failures": self.failures,
            "operator": self.operator,
            "when": self.when,
        }

    @property
    def is_current(self) -> bool:
        """Whether the timings still count. They expire, and those that were measured beside other
        work are measured again as soon as the machine is quiet."""
        if self.timings is None:
            return False
        age = time.time() - self.when
        if not 0 <= age < (MAX_BUSY_AGE_S if self.timings.busy else MAX_AGE_S):
            return False
        return not self.timings.busy or load.is_busy()


def key_of(candidates: Sequence[Execution], settings: Settings, sim: Simulation) -> dict[str, Any]:
    """Everything that the measurements depend on."""
    fed, bound = sim.federation, sim.bound
    weights = {**bound.initial.params, **bound.initial.buffers}
    return {
        "kedge": __version__,
        "torch": torch.__version__,
        "device": device_name(fed.device),
        "processor": processor_name(),
        "threads": [settings.threads, torch.get_num_threads()],
        "cores": os.cpu_count(),
        "candidates": [dataclasses.asdict(x) for x in candidates],
        "method": repr(bound.method),
        "optim": repr(bound.optim),
        "model": repr(bound.model.template),
        "weights": [(name, list(x.shape), str(x.dtype)) for name, x in weights.items()],
        "input": [list(fed.input_shape), str(fed.x.dtype), settings.augment],
        "batchnorm": bound.model.batchnorm,
        "precision": effective(bound.model.precision, fed.device),
        "work": repr(sim.session.workload.work),
        "steps": sorted(sim.session.workload.work.steps_for(size) for size in fed.sizes),
        "cohort": sim.session.cohort_size,
        "seeds": settings.seeds,
    }


@cache
def processor_name() -> str:
    """The name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()
