"""Timing: the runners of a workload take turns, after a warm-up."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from bench.speed import record
from bench.speed.child import RivalFailed
from bench.speed.runners import (
    INSTALL,
    Rounds,
    Runner,
    RunnerFactory,
    read_engine,
    read_pythons,
    read_rival,
    split_list,
)
from bench.speed.workloads import GROUPS, WORKLOADS, Workload
from kedge.core.method import parse
from kedge.core.model import PRECISIONS
from kedge.engines import engines as engine_registry
from kedge.engines.device import effective, resolve_device
from kedge.errors import FieldError, UnknownName

Report = Callable[[str], None]  # prints a line for the user
MISSING = "not installed"
MAX_TURN_S, MAX_TURN_ROUNDS = 0.25, 20  # a turn has at least one round, and several quick ones


@dataclass(frozen=True)
class BenchSettings:
    """What to time. All names are checked."""

    works: tuple[Workload, ...]
    rivals: tuple[str, ...]
    rival_precision: str
    engines: tuple[str, ...]
    precisions: tuple[str, ...]
    methods: tuple[str, ...]  # none: those that each workload is about
    rounds: int
    warm: int
    threads: int
    device: str
    pythons: dict[str, str]

    def methods_of(self, work: Workload) -> tuple[str, ...]:
        """The methods to time on a workload."""
        return self.methods or work.methods


def read_settings(
    names: Iterable[str] = (),
    *,
    against: str = "eager",
    rival_precision: str = "",
    engines: str = "",
    precisions: str = "",
    methods: str = "",
    rounds: int = 5,
    warm: int = 2,
    threads: int = 0,
    device: str = "auto",
    python_of: Iterable[str] = (),
) -> BenchSettings:
    """Read and check all settings before anything is timed. Defaults depend on the device, those
    of the methods on the workload.

    Raises:
        UnknownName: there is no such workload, rival, engine, precision or part.
        FieldError: a number is out of range, or a setting of an engine is wrong.
        KedgeError: the Python of a rival cannot be run.
    """
    target = resolve_device(device)
    gpu = target.type == "cuda"
    words = list(names) or (["pfl", "small10"] if gpu else ["digits", "overhead"])
    workloads = [name for word in words for name in GROUPS.get(word, [word])]
    for name in workloads:
        if name not in WORKLOADS:
            raise UnknownName("workload", name, [*WORKLOADS, *GROUPS])
    if rounds < 2 or warm < 0 or threads < 0:
        raise FieldError("rounds must be 2 or more, for a spread; warm and threads 0 or more")
    rival_precision = rival_precision or ("tf32" if gpu else "fp32")
    kinds = split_list(precisions) or (["tf32", "bf16"] if gpu else ["fp32"])
    for precision in (rival_precision, *kinds):
        if precision not in PRECISIONS:
            raise UnknownName("precision", precision, PRECISIONS)
    rival_precision, *kinds = (effective(p, target) for p in (rival_precision, *kinds))
    rivals = [] if against == "none" else split_list(against)
    engine_texts = split_list(engines) or _default_engines(target)
    for text in rivals:
        read_rival(text)
    for text in engine_texts:
        read_engine(text)
    method_texts = split_list(methods)
    for method in method_texts:
        parse(method)
    if any(m != "fedavg" for m in method_texts):  # the cost of the others is relative to it
        method_texts = ["fedavg", *(m for m in method_texts if m != "fedavg")]
    works = tuple(WORKLOADS[name] for name in dict.fromkeys(workloads))
    return BenchSettings(
        works, tuple(rivals), rival_precision, tuple(engine_texts), tuple(dict.fromkeys(kinds)),
        tuple(method_texts), rounds, warm, threads, str(target), read_pythons(python_of),
    )  # fmt: skip


def _default_engines(device: torch.device) -> list[str]:
    """All engines; on a GPU also compiled if they batch clients, on a CPU also with workers."""
    names = [name for name in engine_registry if engine_registry[name].is_candidate]
    batching = [name for name in names if engine_registry[name].batches_clients]
    if device.type == "cuda":
        return names + [
            f"{n}(compile=true)" for n in batching if engine_registry[n].fusible(device)
        ]
    threads = torch.get_num_threads()
    with_workers = [name for name in names if engine_registry[name].has_workers and threads > 1]
    return names + [f"{name}(workers={threads})" for name in with_workers]


def bench(
    settings: BenchSettings, report: Report = lambda text: None, command: str = ""
) -> dict[str, Any]:
    """Time all workloads and return the record. On interrupt it holds the rounds timed so far.

    Args:
        settings: what to time.
        report: called with lines of progress.
        command: the command line, for the record.
    """
    before = torch.get_num_threads()
    threads = settings.threads or before
    done = record.start(settings.device, threads, command)
    try:
        for work in settings.works:
            factory = RunnerFactory(work, settings.device, threads, settings.pythons)
            runners = _runners(factory, settings)
            try:
                _time(runners, settings, work.name, report)
            finally:
                done["versions"] |= factory.versions
                done["notes"] += [n for n in _notes(runners) if n not in done["notes"]]
                done["rows"] += record.rows(work, runners)
    except KeyboardInterrupt:
        done["interrupted"] = True
    finally:
        torch.set_num_threads(before)
    return done


def _runners(factory: RunnerFactory, settings: BenchSettings) -> list[Runner]:
    """The rivals, then the engines; an engine that is also a rival is timed once."""
    runners = [factory.rival(text, settings.rival_precision) for text in settings.rivals]
    known = {(r.name, r.precision, r.method) for r in runners}
    for engine in settings.engines:
        for precision in settings.precisions:
            for method in settings.methods_of(factory.work):
                runner = factory.engine(engine, precision, method)
                if (runner.name, precision, method) not in known:
                    runners.append(runner)
    return runners


def _time(runners: list[Runner], settings: BenchSettings, name: str, report: Report) -> None:
    """Build and warm up all runners, then time them in turns: A B C A B C ...

    A runner that fails is left out from there on. Garbage is collected before each turn, so that no
    runner pays for another.
    """
    running: list[tuple[Runner, Rounds]] = []
    try:
        for runner in runners:
            report(f"{name}: {runner.name} {runner.precision} {runner.method}, warming up")
            try:
                rounds = runner.make(runner)
            except Exception as error:  # noqa: BLE001  (one failed runner must not end the others)
                runner.failed = _reason(error)
                continue
            running.append((runner, rounds))
            for _ in range(settings.warm):
                if not _attempt(runner, rounds):
                    break
        report(f"{name}: {settings.rounds} turns of timed rounds of each")
        for _ in range(settings.rounds):
            for runner, rounds in running:
                if not runner.failed:
                    gc.collect()
                    _turn(runner, rounds)
    finally:
        for _, rounds in running:
            with suppress(Exception):
                rounds.close()
        running.clear()
        gc.collect()
        if settings.device.startswith("cuda"):
            torch.cuda.empty_cache()


def _turn(runner: Runner, rounds: Rounds) -> None:
    """Time at least one round, and more while they take less than ``MAX_TURN_S`` together."""
    spent = 0.0
    for _ in range(MAX_TURN_ROUNDS):
        seconds = _attempt(runner, rounds)
        if seconds is None:
            break
        runner.times.append(seconds)
        spent += seconds
        if spent + seconds > MAX_TURN_S:
            break


def _attempt(runner: Runner, rounds: Rounds) -> float | None:
    """The seconds of a round; None if it fails, with the reason in ``runner.failed``."""
    try:
        return rounds()
    except Exception as error:  # noqa: BLE001
        runner.failed, runner.times = _reason(error), []
        return None


def _reason(error: Exception) -> str:
    if isinstance(error, RivalFailed):
        return f"{MISSING}: {error}" if error.missing else str(error)
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"


def _notes(runners: list[Runner]) -> list[str]:
    """How to install the rivals that are missing."""
    notes = []
    for runner in runners:
        if runner.failed.startswith(MISSING):
            notes.append(
                f"for {runner.kind}: {INSTALL[runner.kind]} (in an environment of its own, then "
                f"with --python-of {runner.kind}=PATH/bin/python)"
            )
    return notes
