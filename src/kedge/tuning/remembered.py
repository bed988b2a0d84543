"""What is remembered of the trials of a run, what it depends on, and how long it counts."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
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
from kedge.files import make_folder, write_file
from kedge.sim.simulation import Simulation
from kedge.tuning.memory import Need
from kedge.tuning.placement import Settings
from kedge.tuning.timings import Timings

MAX_AGE_S = 30 * 86400.0  # older timings are measured again


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
        """Whether the timings still count: they expire."""
        return self.timings is not None and 0 <= time.time() - self.when < MAX_AGE_S


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


MAX_ENTRIES = 500  # the oldest are evicted


def load_record(key: dict[str, Any]) -> dict[str, Any] | None:
    """The record stored under a key, or None."""
    return _read().get(_digest(key))


def store_record(key: dict[str, Any], record: dict[str, Any]) -> None:
    """Store a record under a key; both are JSON objects."""
    path, digest = _path(), _digest(key)
    others = {name: value for name, value in _read().items() if name != digest}
    newest = [*others.items(), (digest, record)][-MAX_ENTRIES:]
    with contextlib.suppress(OSError):
        make_folder(path.parent)
        write_file(path, json.dumps(dict(newest)).encode(), private=True)


def _read() -> dict[str, dict[str, Any]]:
    try:
        records = json.loads(_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(records, dict):
        return {}
    return {name: value for name, value in records.items() if isinstance(value, dict)}


def _path() -> Path:
    folder = os.environ.get("KEDGE_CACHE")
    user_cache = os.environ.get("XDG_CACHE_HOME")
    if folder:
        return Path(folder) / "plans.json"
    return (Path(user_cache) if user_cache else Path.home() / ".cache") / "kedge" / "plans.json"


def _digest(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
