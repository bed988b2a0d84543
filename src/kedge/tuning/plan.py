"""The plan of a run: its execution, its threads, and estimates of its memory and time.

Threads share the work of one operator, so their number follows the largest operator of a client's
step. What trials have measured is remembered, by everything that it depends on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import json
import math
import multiprocessing
import os
import platform
import shutil
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kedge._version import __version__
from kedge.core import client
from kedge.core.work import take_jobs
from kedge.engines.device import device_name, effective
from kedge.engines.engine import RunFacts, engines
from kedge.engines.execution import Execution
from kedge.engines.torch_private import watching_operators
from kedge.engines.workers import can_start_workers
from kedge.errors import KedgeError
from kedge.files import make_folder, write_file
from kedge.sim.simulation import Simulation
from kedge.tuning import timings
from kedge.tuning.memory import Need
from kedge.tuning.placement import Placement, Settings, format_bytes, place, seeds_at_once
from kedge.tuning.timings import Timings, label
from kedge.tuning.trial import form_cohort, isolated, measure_need, one_step, start_trial

SOME_THREADS = 1e7  # floating-point operations of an operator from which a few threads pay
ALL_THREADS = 1e8  # the same for all of them
FEW_THREADS = 4


def threads_of(execution: Execution, operator: float, settings: Settings, sim: Simulation) -> int:
    """The number of threads of an execution; 0 leaves torch's number.

    Args:
        execution: without threads. Those of one with workers are for the rest of the round.
        operator: floating-point operations of the largest operator of one client's step.
        settings: of the run; what they set is not changed.
        sim: a simulation of the run.
    """
    if settings.threads or sim.federation.device.type != "cpu":
        return settings.threads
    size, most = operator * _clients_at_once(execution, settings, sim), torch.get_num_threads()
    if not SOME_THREADS <= size < math.inf:
        return 1
    return most if size >= ALL_THREADS else min(FEW_THREADS, most)


def _clients_at_once(execution: Execution, settings: Settings, sim: Simulation) -> int:
    """Clients that share an operator."""
    if not engines[execution.engine].batches_clients:
        return 1
    every = sim.session.cohort_size * seeds_at_once(
        execution, sim.session.cohort_size, settings.seeds
    )
    return min(execution.chunk or every, every)


def largest_operator(sim: Simulation, rounds: int) -> float:
    """Floating-point operations of the largest operator of a client's step, or of what comes before
    its first step. Infinite if this is not known."""
    largest = 0.0

    def watch(name: str, inputs: Any, outputs: Any) -> None:
        nonlocal largest
        largest = max(largest, flops_of(name, inputs[0], outputs))

    with isolated(sim.federation.device):
        try:
            trial = start_trial(sim, Execution("loop"), rounds)
            cohort = form_cohort(
                trial, one_step(trial, [trial.session.draw_clients(trial.round)[0]])
            )
            bound, job, rows = cohort.bound, take_jobs(cohort.jobs, 0), cohort.batches[0, 0]
            with watching_operators(watch) as watched:
                client.step(bound, job, client.begin(bound, job), rows)
        except Exception:  # noqa: BLE001  (the run itself raises the error)
            return math.inf
    return largest if watched else math.inf


def flops_of(name: str, inputs: Sequence[Any], outputs: Any) -> float:
    """Floating-point operations of an operator; one per element for those that are no products.

    >>> flops_of("aten::mm", (torch.ones(2, 3), torch.ones(3, 5)), torch.ones(2, 5))
    60.0
    """
    kind = name.removeprefix("aten::").split(".")[0]
    every = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    out = next((x for x in every if isinstance(x, Tensor)), None)
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    if kind in ("mm", "bmm", "addmm", "baddbmm") and out is not None:
        return 2.0 * out.numel() * tensors[-1].shape[-2]
    if kind in ("convolution", "convolution_backward"):
        # forward: input, weight -> output; backward: gradient, input, weight -> two gradients
        grad = tensors[0] if kind == "convolution_backward" else out
        weight = tensors[2] if kind == "convolution_backward" else tensors[1]
        assert grad is not None
        return 2.0 * grad.numel() * weight[0].numel()
    return float(out.numel()) if out is not None else 0.0


TRIAL_TIMEOUT_S = 600.0  # for two steps of one client in a separate process


@dataclass(frozen=True)
class Plan:
    """The execution of a run, and estimates of its memory and time; 0 where unknown."""

    execution: Execution
    device: str
    at_once: int = 1  # clients that train at the same time
    lane_bytes: int = 0  # per client at once
    total_bytes: int = 0
    available_bytes: int = 0
    round_seconds: float = 0.0  # per seed
    total_seconds: float = 0.0
    reason: str = ""  # why this engine
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The plan as lines of text."""
        estimates = []
        if self.total_bytes:
            clients = "one client" if self.at_once == 1 else f"{self.at_once} clients"
            size, free = format_bytes(self.total_bytes), format_bytes(self.available_bytes)
            estimates.append(f"about {size} of {free} free on {self.device} ({clients} at once)")
        if self.total_seconds:
            each, total = format_seconds(self.round_seconds), format_seconds(self.total_seconds)
            estimates.append(f"about {each} a round, {total} in all")
        return [line for line in (self.reason, *self.notes, ", ".join(estimates)) if line]


def choose(settings: Settings, sim: Simulation) -> Plan:
    """Choose the fastest execution of a run that works and fits into memory.

    Args:
        settings: of the run; what they set is not changed.
        sim: a simulation of the run, for trials; it is not changed.

    Raises:
        KedgeError: not even one client fits into memory.
    """
    plan = _make_plan(settings, sim)
    if sim.federation.device.type == "cuda":  # free the memory of trials
        gc.collect()
        torch.cuda.empty_cache()
    return plan


def candidates(settings: Settings, sim: Simulation) -> list[Execution]:
    """The executions to compare, the simplest first."""
    request = _request(settings, sim)
    if settings.engine != "auto" or settings.workers:
        with_workers = (name for name in engines if engines[name].has_workers)
        name = settings.engine if settings.engine != "auto" else next(with_workers)
        fuse = settings.compile == "on" and engines[name].fusible(request.device)
        return [Execution(name, workers=settings.workers, chunk=settings.chunk, compile=fuse)]
    eager = [x for name in engines for x in engines[name].candidates(request)]
    eager.sort(key=lambda x: (x.streams > 0) + 2 * (x.workers > 0))
    last = {x.engine: x for x in eager if not x.workers}  # of each engine, with most streams
    fusible = [x for x in last.values() if engines[x.engine].fusible(request.device)]
    compiled = [dataclasses.replace(x, compile=True) for x in fusible]
    if settings.compile == "on":
        return compiled
    return eager + (compiled if settings.compile == "auto" and request.can_compile else [])


def _request(settings: Settings, sim: Simulation) -> RunFacts:
    device = sim.federation.device
    return RunFacts(
        device=device,
        cohort=sim.session.cohort_size,
        convolves=any(w.ndim > 2 for w in sim.weights.params.values()),
        chunk=settings.chunk,
        cores=os.cpu_count() or 1,
        can_fork=_can_fork_after_trials(),
        can_compile=device.type == "cuda" or shutil.which("g++") is not None,
    )


def _can_fork_after_trials() -> bool:
    """Whether workers can start after a gradient was taken in this process. If torch sees a GPU,
    even one that is not used, the first gradient starts threads that do not survive a fork."""
    return can_start_workers() and not torch.accelerator.is_available()


def _make_plan(settings: Settings, sim: Simulation) -> Plan:
    every = candidates(settings, sim)
    key = key_of(every, settings, sim)
    known = Measurements.from_record(load_record(key))
    for candidate in every:
        if candidate.engine not in known.needs:
            found = _measure_need_before_fork(sim, candidate, settings.rounds)
            known.needs[candidate.engine] = None if isinstance(found, str) else found
            if isinstance(found, str):
                known.failures[candidate.engine] = found
    if known.operator is None:
        is_cpu = sim.federation.device.type == "cpu"
        is_open = is_cpu and not settings.threads and torch.get_num_threads() > 1
        known.operator = largest_operator(sim, settings.rounds) if is_open else math.inf
    # if all fail, the run itself raises the error
    working = [x for x in every if known.needs[x.engine] is not None] or every[:1]
    threaded = [
        dataclasses.replace(x, threads=threads_of(x, known.operator, settings, sim))
        for x in working
    ]
    placements = _place_all(threaded, known, settings, sim)
    chosen, reason = _select(placements, known, settings, sim)
    if not settings.workers or None not in known.needs.values():  # a process may die by chance
        store_record(key, dataclasses.asdict(known))
    took = known.timings or Timings({}, {}, 0.0)
    seconds = took.rounds.get(label(chosen.execution), math.inf)
    seconds = seconds if math.isfinite(seconds) else 0.0  # unknown
    evaluations = math.ceil(settings.rounds / settings.eval_every)
    total = settings.seeds * (settings.rounds * seconds + evaluations * took.test)
    return Plan(
        execution=chosen.execution,
        device=device_name(sim.federation.device),
        at_once=chosen.at_once,
        lane_bytes=chosen.lane,
        total_bytes=chosen.total,
        available_bytes=chosen.available,
        round_seconds=seconds,
        total_seconds=total if seconds else 0.0,
        reason=reason,
        notes=(*_failure_notes(every, working, threaded, known), *chosen.notes),
    )


def _failure_notes(
    every: Sequence[Execution],
    working: Sequence[Execution],
    threaded: Sequence[Execution],
    known: Measurements,
) -> list[str]:
    """A note for every candidate that was dropped, with the reason; none if all of them fail, since
    the run itself then raises the error."""
    if all(known.needs[x.engine] is None for x in every):
        return []
    notes = []
    for name in sorted({x.engine for x in every if x not in working}):
        reason = known.failures.get(name, "")
        text = f"engine {name} cannot run this model with this method"
        notes.append(f"{text}: {reason}" if reason else text)
    labels = {label(x) for x in threaded}
    for name, reason in known.timings.failures.items() if known.timings else ():
        if name in labels:
            notes.append(f"engine {name} failed in a trial and is left out: {reason}")
    return notes


def _measure_need_before_fork(
    sim: Simulation, execution: Execution, rounds: int
) -> Need | str | None:
    """Call :func:`measure_need`, for an execution with workers in a separate process: gradients
    taken in this one may prevent workers from starting (:func:`_can_fork_after_trials`). None if
    that process dies or does not answer in time."""
    is_on_cpu = sim.federation.device.type == "cpu"
    if not execution.workers or not is_on_cpu or not can_start_workers():
        return measure_need(sim, execution.engine, rounds)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def main() -> None:
        torch.set_num_threads(1)  # the parent's threads do not survive the fork
        sender.send(measure_need(sim, execution.engine, rounds))

    process = context.Process(target=main, daemon=True)
    with warnings.catch_warnings():
        # Python warns of threads that may hold a lock; torch's hold none between calls
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    sender.close()
    try:
        found: Need | str | None = receiver.recv() if receiver.poll(TRIAL_TIMEOUT_S) else None
    except EOFError:  # the process died; the run's own workers will raise the error
        found = None
    finally:
        process.kill()
        process.join()
        process.close()
        receiver.close()
    return found


def _place_all(
    executions: Sequence[Execution], known: Measurements, settings: Settings, sim: Simulation
) -> list[Placement]:
    """Placements of the executions that fit into memory, without duplicates."""
    placements: list[Placement] = []
    errors: list[KedgeError] = []
    for execution in executions:
        try:
            placement = place(execution, known.needs[execution.engine], settings, sim)
            if all(placement.execution != other.execution for other in placements):
                placements.append(placement)
        except KedgeError as error:
            errors.append(error)
    if not placements:
        raise errors[0]
    return placements


def _select(
    placements: Sequence[Placement], known: Measurements, settings: Settings, sim: Simulation
) -> tuple[Placement, str]:
    """The fastest placement, and the reason for it."""
    if len(placements) == 1 or known.needs.get("loop", ()) is None:
        return placements[0], ""  # trials start from the loop's cost
    executions = [placement.execution for placement in placements]
    is_cached = known.is_current and not _lacks_trials(known.timings, executions, settings)
    if not is_cached:
        found = timings.measure(sim, executions, settings.rounds, settings.seeds)
        if found is not None:
            known.timings, known.when = found, time.time()
    if known.timings is not None:
        best = timings.fastest(executions, known.timings, settings.rounds * settings.seeds)
        return placements[executions.index(best)], _explain(best, known.timings, sim, is_cached)
    request = _request(settings, sim)
    default = {p.execution.engine for p in placements if _is_default(p.execution, request)}
    chosen = next((p for p in placements if p.execution.engine in default), placements[0])
    if settings.engine != "auto":
        return chosen, ""
    return chosen, f"engine {label(chosen.execution)}: too short a run to measure"


def _is_default(execution: Execution, request: RunFacts) -> bool:
    return not execution.workers and engines[execution.engine].is_default(request)


def _lacks_trials(
    known: Timings | None, executions: Sequence[Execution], settings: Settings
) -> bool:
    """Whether this run is long enough for candidates that a shorter one did not try."""
    if known is None:
        return True
    seconds = min(known.rounds.values()) * settings.rounds * settings.seeds
    has_new = any(label(x) not in known.steps for x in executions)
    return seconds >= timings.MIN_COMPILED_RUN_S and has_new


def _explain(execution: Execution, known: Timings, sim: Simulation, is_cached: bool) -> str:
    """The timings that led to an execution, and how they were measured."""
    steps = {name: _format_ms(s) for name, s in known.steps.items() if math.isfinite(s)}
    own, workers = steps.pop(label(execution), "?"), execution.workers
    engine = f"{execution.engine} with {workers} workers" if workers else label(execution)
    others = "".join(f", {name} {ms}" for name, ms in steps.items())
    threads = 1 if workers else execution.threads or torch.get_num_threads()
    hardware = f"{threads} thread{'s' if threads > 1 else ''}"
    if sim.federation.device.type != "cpu":
        hardware = device_name(sim.federation.device)
    batch = sim.session.workload.work.batch
    conditions = f"measured, {sim.session.cohort_size} clients, batch {batch}, {hardware}"
    cached = " (cached)" if is_cached else ""
    return f"engine {engine}: {own} ms a client-step{others}; {conditions}{cached}"


# -- numbers as text --------------------------------------------------------------------------


def format_seconds(seconds: float) -> str:
    """A duration in seconds, minutes or hours.

    >>> format_seconds(0.0312), format_seconds(40.2), format_seconds(200), format_seconds(9000)
    ('0.03 s', '40 s', '3.3 min', '2.5 h')
    """
    if seconds < 9.5:
        return f"{seconds:.1g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _format_ms(seconds: float) -> str:
    """Milliseconds to two digits."""
    digits = max(0, 1 - math.floor(math.log10(max(seconds * 1e3, 1e-6))))
    return f"{seconds * 1e3:.{digits}f}"


# -- What is remembered of trials ------------------------------------------------------------------


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
    return _cached_records().get(_digest(key))


def store_record(key: dict[str, Any], record: dict[str, Any]) -> None:
    """Store a record under a key; both are JSON objects."""
    path, digest = _cache_path(), _digest(key)
    others = {name: value for name, value in _cached_records().items() if name != digest}
    newest = [*others.items(), (digest, record)][-MAX_ENTRIES:]
    with contextlib.suppress(OSError):
        make_folder(path.parent)
        write_file(path, json.dumps(dict(newest)).encode(), private=True)


def _cached_records() -> dict[str, dict[str, Any]]:
    try:
        records = json.loads(_cache_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(records, dict):
        return {}
    return {name: value for name, value in records.items() if isinstance(value, dict)}


def _cache_path() -> Path:
    folder = os.environ.get("KEDGE_CACHE")
    user_cache = os.environ.get("XDG_CACHE_HOME")
    if folder:
        return Path(folder) / "plans.json"
    return (Path(user_cache) if user_cache else Path.home() / ".cache") / "kedge" / "plans.json"


def _digest(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
