"""Before a run: how it is computed, what memory and time it will take."""

from __future__ import annotations

import dataclasses
import gc
import math
import multiprocessing
import os
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kedge._version import __version__
from kedge.engines.choice import cache, timings
from kedge.engines.choice.fit import Fit, fit, in_bytes
from kedge.engines.choice.memory import Need
from kedge.engines.choice.subject import Settings, Subject
from kedge.engines.choice.timings import Timings, label
from kedge.engines.choice.trial import need
from kedge.engines.device import device_name, effective
from kedge.engines.engine import Request, engines
from kedge.engines.execution import Execution
from kedge.engines.workers import possible
from kedge.errors import KedgeError

TRIAL_TIMEOUT_S = 600.0  # for two steps of one client, in a process of their own


@dataclass(frozen=True)
class Plan:
    """How a run is computed, and what it will take as far as that is known (else 0)."""

    execution: Execution
    device: str
    at_once: int = 1  # clients that train at the same time
    lane_bytes: int = 0  # of each of them
    total_bytes: int = 0
    available_bytes: int = 0
    round_seconds: float = 0.0  # of one seed
    total_seconds: float = 0.0
    reason: str = ""  # for the engine
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The plan in words."""
        about = []
        if self.total_bytes:
            clients = "one client" if self.at_once == 1 else f"{self.at_once} clients"
            size, free = in_bytes(self.total_bytes), in_bytes(self.available_bytes)
            about.append(f"about {size} of {free} free on {self.device} ({clients} at once)")
        if self.total_seconds:
            each, every = in_seconds(self.round_seconds), in_seconds(self.total_seconds)
            about.append(f"about {each} a round, {every} in all")
        return [line for line in (self.reason, *self.notes, ", ".join(about)) if line]


def choose(settings: Settings, sim: Subject) -> Plan:
    """The fastest way to compute a run that works and fits, tried on one of its simulations."""
    plan = _planned(settings, sim)
    if sim.federation.device.type == "cuda":  # what trials have left belongs to the run
        gc.collect()
        torch.cuda.empty_cache()
    return plan


def candidates(settings: Settings, sim: Subject) -> list[Execution]:
    """The ways to compute a run that may be the fastest, the simplest first."""
    request = _request(settings, sim)
    if settings.engine != "auto" or settings.workers:
        shared = (name for name in engines if engines[name].has_workers)
        name = settings.engine if settings.engine != "auto" else next(shared)
        fused = settings.compile == "on" and engines[name].fusible(request.device)
        given = {"workers": settings.workers, "chunk": settings.chunk, "compile": fused}
        return [Execution(name, **given)]  # type: ignore[arg-type]
    plain = [way for name in engines for way in engines[name].candidates(request)]
    plain.sort(key=lambda way: (way.streams > 0) + 2 * (way.workers > 0))  # simplest first
    last = {way.engine: way for way in plain if not way.workers}  # of each, with most streams
    fusible = [way for way in last.values() if engines[way.engine].fusible(request.device)]
    compiled = [dataclasses.replace(way, compile=True) for way in fusible]
    if settings.compile == "on":
        return compiled
    return plain + (compiled if settings.compile == "auto" and request.can_compile else [])


def _request(settings: Settings, sim: Subject) -> Request:
    device = sim.federation.device
    return Request(
        device=device,
        cohort=sim.per_round,
        convolves=any(w.ndim > 2 for w in sim.weights.params.values()),
        chunk=settings.chunk,
        cores=os.cpu_count() or 1,
        can_fork=_may_fork_after_trials(),
        can_compile=device.type == "cuda" or shutil.which("g++") is not None,
    )


def _may_fork_after_trials() -> bool:
    """Whether workers can be started once gradients were taken here: where torch sees a GPU, though
    it is not used, the first gradient starts threads that no fork survives."""
    return possible() and not torch.accelerator.is_available()


def _planned(settings: Settings, sim: Subject) -> Plan:
    """The fastest of the candidates that work and fit."""
    ways, key = candidates(settings, sim), _key(settings, sim)
    known = _Known.read(cache.recall(key))
    for how in ways:
        if how.engine not in known.needs:
            found = _need(sim, how, settings.rounds)
            known.needs[how.engine] = None if isinstance(found, str) else found
            if isinstance(found, str):
                known.failures[how.engine] = found
    # where all fail the run will say why
    able = [how for how in ways if known.needs[how.engine] is not None] or ways[:1]
    fits = _fitting(able, known, settings, sim)
    chosen, reason = _picked(fits, known, settings, sim)
    if not settings.workers or None not in known.needs.values():  # a process may fail by chance
        cache.keep(key, known.written())
    notes = _failures(ways, able, known)
    plan = Plan(
        execution=chosen.execution,
        device=device_name(sim.federation.device),
        at_once=chosen.at_once,
        lane_bytes=chosen.lane,
        total_bytes=chosen.total,
        available_bytes=chosen.available,
        reason=reason,
        notes=(*notes, *chosen.notes),
    )
    each = (
        known.timings.rounds.get(label(chosen.execution), math.inf) if known.timings else math.inf
    )
    if known.timings is None or not math.isfinite(each):
        return plan
    tests = math.ceil(settings.rounds / settings.eval_every)
    total = settings.seeds * (settings.rounds * each + tests * known.timings.test)
    return dataclasses.replace(plan, round_seconds=each, total_seconds=total)


def _failures(ways: Sequence[Execution], able: Sequence[Execution], known: _Known) -> list[str]:
    """Which candidates were left out, and why."""
    notes = []
    for name in sorted({how.engine for how in ways if how not in able}):
        why = known.failures.get(name, "")
        text = f"engine {name} cannot run this model with this method"
        notes.append(f"{text}: {why}" if why else text)
    labels = {label(how) for how in able}
    for name, why in known.timings.failures.items() if known.timings else ():
        if name in labels:
            notes.append(f"engine {name} failed in a trial and is left out: {why}")
    return notes


def _need(sim: Subject, how: Execution, rounds: int) -> Need | str | None:
    """As :func:`need`; before workers are started in a process of its own, since gradients that are
    taken in this one may keep it from starting them (:func:`_may_fork_after_trials`)."""
    if not how.workers or sim.federation.device.type != "cpu" or not possible():
        return need(sim, how.engine, rounds)
    context = multiprocessing.get_context("fork")
    line, there = context.Pipe(duplex=False)

    def tell() -> None:
        torch.set_num_threads(1)  # those of the other process are not here
        there.send(need(sim, how.engine, rounds))

    process = context.Process(target=tell, daemon=True)
    with warnings.catch_warnings():
        # Python warns of threads that may hold a lock; between calls torch's hold none
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    there.close()
    try:  # one that is stuck is not waited for, nor remembered
        found: Need | str | None = line.recv() if line.poll(TRIAL_TIMEOUT_S) else None
    except EOFError:  # it has ended, of which the run's own processes will say more
        found = None
    finally:
        process.kill()
        process.join()
        process.close()
        line.close()
    return found


def _fitting(
    ways: Sequence[Execution], known: _Known, settings: Settings, sim: Subject
) -> list[Fit]:
    """Those for which there is enough memory, made to fit."""
    fits: list[Fit] = []
    problems: list[KedgeError] = []
    for how in ways:
        try:
            found = fit(how, known.needs[how.engine], settings, sim)
            if all(found.execution != other.execution for other in fits):
                fits.append(found)
        except KedgeError as error:
            problems.append(error)
    if not fits:
        raise problems[0]
    return fits


def _picked(
    fits: Sequence[Fit], known: _Known, settings: Settings, sim: Subject
) -> tuple[Fit, str]:
    """The fastest of some ways, and why it is that."""
    if len(fits) == 1 or known.needs.get("loop") is None:  # timings start from the loop's
        return fits[0], ""
    hows = [found.execution for found in fits]
    remembered = known.timings is not None and not _lacking(known.timings, hows, settings)
    if not remembered:
        known.timings = timings.times(sim, hows, settings.rounds, settings.seeds) or known.timings
    if known.timings is not None:
        how = timings.fastest(hows, known.timings, settings.rounds * settings.seeds)
        return fits[hows.index(how)], _because(how, known.timings, sim, remembered)
    request = _request(settings, sim)
    usual = (found for found in fits if engines[found.execution.engine].is_usual(request))
    chosen = next(usual, fits[0])
    return chosen, f"engine {label(chosen.execution)}: too short a run to measure"


def _lacking(known: Timings, hows: Sequence[Execution], settings: Settings) -> bool:
    """Whether this run is long enough to try what was not tried for a shorter one."""
    seconds = min(known.rounds.values()) * settings.rounds * settings.seeds
    new = any(label(how) not in known.steps for how in hows)
    return seconds >= timings.MIN_COMPILED_RUN_S and new


def _because(how: Execution, known: Timings, sim: Subject, remembered: bool) -> str:
    took = {name: _in_ms(t) for name, t in known.steps.items() if math.isfinite(t)}
    own = took.pop(label(how), "?")
    engine = f"{how.engine} with {how.workers} workers" if how.workers else label(how)
    all_of_them = [
        f"engine {engine}: {own} ms a client-step",
        *(f"{n} {t}" for n, t in took.items()),
    ]
    threads = torch.get_num_threads()
    where = f"{threads} thread{'s' if threads > 1 else ''}"
    if sim.federation.device.type != "cpu":
        where = device_name(sim.federation.device)
    what = f"measured, {sim.per_round} clients, batch {sim.work.batch}, {where}"
    return f"{', '.join(all_of_them)}; {what}{' (remembered)' if remembered else ''}"


# -- what is remembered -----------------------------------------------------------------------


@dataclass
class _Known:
    """What was measured, by engine; None for one that fails."""

    needs: dict[str, Need | None]
    timings: Timings | None = None
    failures: dict[str, str] = field(default_factory=dict)  # why, by engine

    @classmethod
    def read(cls, record: dict[str, Any] | None) -> _Known:
        """A record that is not as it should be counts as none."""
        try:
            assert record is not None
            needs = {
                name: some and Need(int(some[0]), int(some[1]))
                for name, some in record["needs"].items()
            }
            given = record["timings"]
            timings = given and Timings(
                dict(given["steps"]), dict(given["rounds"]), given["test"], dict(given["failures"])
            )
            return cls(needs, timings, dict(record["failures"]))
        except (AssertionError, AttributeError, LookupError, TypeError, ValueError):
            return cls({})

    def written(self) -> dict[str, Any]:
        return {
            "needs": self.needs,
            "timings": dataclasses.asdict(self.timings) if self.timings else None,
            "failures": self.failures,
        }


def _key(settings: Settings, sim: Subject) -> dict[str, Any]:
    """All that the measurements depend on."""
    fed, bound = sim.federation, sim.bound
    weights = {**bound.initial.params, **bound.initial.buffers}
    return {
        "kedge": __version__,
        "torch": torch.__version__,
        "device": device_name(fed.device),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "ways": [dataclasses.asdict(how) for how in candidates(settings, sim)],
        "method": repr(bound.method),
        "optim": repr(bound.optim),
        "model": repr(bound.model.template),
        "weights": [(name, list(x.shape), str(x.dtype)) for name, x in weights.items()],
        "input": [list(fed.input_shape), str(fed.x.dtype), settings.augment],
        "batchnorm": bound.model.batchnorm,
        "precision": effective(bound.model.precision, fed.device),
        "work": repr(sim.work),
        "steps": sorted(sim.work.steps_for(size) for size in fed.sizes),
        "cohort": sim.per_round,
        "seeds": settings.seeds,
    }


# -- numbers in words -------------------------------------------------------------------------


def in_seconds(seconds: float) -> str:
    """
    >>> in_seconds(0.0312), in_seconds(40.2), in_seconds(200), in_seconds(9000)
    ('0.03 s', '40 s', '3.3 min', '2.5 h')
    """
    if seconds < 9.5:
        return f"{seconds:.1g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _in_ms(seconds: float) -> str:
    """Milliseconds to two digits."""
    digits = max(0, 1 - math.floor(math.log10(max(seconds * 1e3, 1e-6))))
    return f"{seconds * 1e3:.{digits}f}"
