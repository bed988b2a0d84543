"""Timing: every workload's runners in turn, after rounds to warm up."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from kedge.bench import record
from kedge.bench.child import RivalFailed
from kedge.bench.runners import (
    INSTALL,
    Bench,
    Rounds,
    Runner,
    read_engine,
    read_pythons,
    read_rival,
    split_list,
)
from kedge.bench.workloads import GROUPS, WORKLOADS, Workload
from kedge.core.method import parse
from kedge.core.model import PRECISIONS
from kedge.engines.device import effective
from kedge.errors import FieldError, UnknownName
from kedge.runs.config import resolve_device

Say = Callable[[str], None]
MISSING = "not installed"
TURN, MOST = 0.25, 20  # seconds, and rounds: a quick runner's turn has several


@dataclass(frozen=True)
class Plan:
    """What to time; every name in it is known to exist."""

    works: tuple[Workload, ...]
    rivals: tuple[str, ...]
    rival_precision: str
    engines: tuple[str, ...]
    precisions: tuple[str, ...]
    methods: tuple[str, ...]
    rounds: int
    warm: int
    threads: int
    device: str
    pythons: dict[str, str]


def plan(
    names: Iterable[str] = (),
    *,
    against: str = "eager",
    rival_precision: str = "",
    engines: str = "",
    precisions: str = "",
    methods: str = "fedavg",
    rounds: int = 5,
    warm: int = 2,
    threads: int = 0,
    device: str = "auto",
    python_of: Iterable[str] = (),
) -> Plan:
    """Read and check everything before anything is timed; what is left out depends on the
    device."""
    where = resolve_device(device)
    gpu = where.type == "cuda"
    wanted = list(names) or (["pfl", "small10"] if gpu else ["digits", "overhead"])
    wanted = [name for given in wanted for name in GROUPS.get(given, [given])]
    for name in wanted:
        if name not in WORKLOADS:
            raise UnknownName("workload", name, [*WORKLOADS, *GROUPS])
    if rounds < 1 or warm < 0 or threads < 0:
        raise FieldError("rounds must be 1 or more, warm and threads 0 or more")
    rival_precision = rival_precision or ("tf32" if gpu else "fp32")
    kinds = split_list(precisions) or (["tf32", "bf16"] if gpu else ["fp32"])
    for precision in (rival_precision, *kinds):
        if precision not in PRECISIONS:
            raise UnknownName("precision", precision, PRECISIONS)
    rival_precision, *kinds = (effective(p, where) for p in (rival_precision, *kinds))
    rivals = [] if against == "none" else split_list(against)
    ways = split_list(engines) or _usual(gpu)
    for text in rivals:
        read_rival(text)
    for text in ways:
        read_engine(text)
    asked = split_list(methods)
    for method in asked:
        parse(method)
    if any(m != "fedavg" for m in asked):  # which the others are compared with
        asked = ["fedavg", *(m for m in asked if m != "fedavg")]
    works = tuple(WORKLOADS[name] for name in dict.fromkeys(wanted))
    return Plan(
        works, tuple(rivals), rival_precision, tuple(ways), tuple(dict.fromkeys(kinds)),
        tuple(asked), rounds, warm, threads, str(where), read_pythons(python_of),
    )  # fmt: skip


def _usual(gpu: bool) -> list[str]:
    """The engines worth timing on a device."""
    if gpu:
        return ["loop", "vector", "vector(compile=true)"]
    threads = torch.get_num_threads()
    return ["loop", "vector", *([f"loop(workers={threads})"] if threads > 1 else [])]


def bench(what: Plan, say: Say = lambda text: None, command: str = "") -> dict[str, Any]:
    """Time everything and give the record. An interrupt ends it early, with what there is."""
    before = torch.get_num_threads()
    threads = what.threads or before
    done = record.start(what.device, threads, command)
    try:
        for work in what.works:
            maker = Bench(work, what.device, threads, what.pythons)
            runners = _runners(maker, what)
            try:
                _time(runners, what, work.name, say)
            finally:
                done["versions"] |= maker.versions
                done["notes"] += [n for n in _notes(runners) if n not in done["notes"]]
                done["rows"] += record.rows(work, runners)
    except KeyboardInterrupt:
        done["interrupted"] = True
    finally:
        torch.set_num_threads(before)
    return done


def _runners(maker: Bench, what: Plan) -> list[Runner]:
    """Rivals first; a rival that is one of the engines is timed once."""
    runners = [maker.rival(text, what.rival_precision) for text in what.rivals]
    known = {(r.name, r.precision, r.method) for r in runners}
    for engine in what.engines:
        for precision in what.precisions:
            for method in what.methods:
                runner = maker.engine(engine, precision, method)
                if (runner.name, precision, method) not in known:
                    runners.append(runner)
    return runners


def _time(runners: list[Runner], what: Plan, name: str, say: Say) -> None:
    """Start and warm each, then A B C A B C ...; one that fails is left out from there on.

    None pays for what another left behind: garbage is collected before a turn.
    """
    running: list[tuple[Runner, Rounds]] = []
    try:
        for runner in runners:
            say(f"{name}: {runner.name} {runner.precision} {runner.method}, warming up")
            try:
                rounds = runner.make(runner)
            except Exception as error:  # noqa: BLE001  (one that fails must not end the others)
                runner.failed = _reason(error)
                continue
            running.append((runner, rounds))
            for _ in range(what.warm):
                if not _attempt(runner, rounds):
                    break
        say(f"{name}: {what.rounds} turns of timed rounds of each")
        for _ in range(what.rounds):
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
        if what.device.startswith("cuda"):
            torch.cuda.empty_cache()


def _turn(runner: Runner, rounds: Rounds) -> None:
    """At least one timed round, at most as many as take so long together."""
    spent = 0.0
    for _ in range(MOST):
        seconds = _attempt(runner, rounds)
        if seconds is None:
            break
        runner.times.append(seconds)
        spent += seconds
        if spent + seconds > TURN:
            break


def _attempt(runner: Runner, rounds: Rounds) -> float | None:
    """The seconds of a round, or None and the reason kept."""
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
    """What to type to get a rival that is not there."""
    notes = []
    for runner in runners:
        if runner.failed.startswith(MISSING):
            notes.append(
                f"for {runner.kind}: {INSTALL[runner.kind]} (in an environment of its own, then "
                f"with --python-of {runner.kind}=PATH/bin/python)"
            )
    return notes
