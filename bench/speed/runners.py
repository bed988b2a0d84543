"""Runners: the engines of kedge and the rivals, each with a function that times one round."""

from __future__ import annotations

import os
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from bench.speed.child import Child, RivalFailed
from bench.speed.rounds import InProcess, rival_rounds, versions_of
from bench.speed.workloads import Workload
from kedge.data.federation import Federation
from kedge.engines import Execution, engines
from kedge.engines.device import precise, restored_threads, use_threads
from kedge.errors import FieldError, KedgeError, UnknownName
from kedge.grammar import Call, parse_call
from kedge.runs.planning import PLANNING
from kedge.sim.simulation import Simulation
from kedge.tuning import plan
from kedge.tuning.placement import Settings

AUTO_ROUNDS = 100  # length of the run that engine auto is planned for
#: Engines of kedge that others may be compared with: the one without batching or compilation.
ENGINE_RIVALS = ("loop",)
RIVALS = (*ENGINE_RIVALS, "eager", "pfl", "flower")
INSTALL = {
    "pfl": "pip install pfl==0.6.0",
    "flower": 'pip install "flwr[simulation]" torch numpy safetensors pillow',
}


class Rounds(Protocol):
    """Runs a round and returns its seconds."""

    def __call__(self) -> float: ...
    def close(self) -> None: ...


@dataclass
class Runner:
    """One row of the table: what is timed, and its times."""

    name: str
    precision: str
    make: Callable[[Runner], Rounds] = field(repr=False)
    method: str = "fedavg"
    rival: str = ""  # the name of its column, if others are compared with it
    kind: str = "kedge"
    idle: bool = False  # takes no steps
    execution: dict[str, Any] | None = None  # of kedge, as plain data
    times: list[float] = field(default_factory=list)
    failed: str = ""

    @property
    def seconds(self) -> float | None:
        """The median time of a round; None if it has no spread."""
        return statistics.median(self.times) if len(self.times) > 1 else None


class RunnerFactory:
    """Builds the runners of one workload; they share its data."""

    def __init__(self, work: Workload, device: str, threads: int, pythons: dict[str, str]) -> None:
        self.work, self.device, self.threads, self.pythons = work, device, threads, pythons
        self.versions: dict[str, str] = {}
        self._federation: Federation | None = None
        self._data: tuple[Tensor, Tensor] | None = None

    def engine(self, text: str, precision: str, method: str, rival: str = "") -> Runner:
        """An engine of kedge, written as ``loop(workers=2)``."""
        execution, threads = read_engine(text)
        make = partial(self._kedge, execution, threads or self.threads)
        return Runner(f"kedge {text}", precision, make, method, rival)

    def rival(self, text: str, precision: str) -> Runner:
        """A rival, written as ``eager(threads=1)``."""
        name, threads = read_rival(text)
        if name in ENGINE_RIVALS:
            return self.engine(text, precision, "fedavg", rival=text)
        in_process = name == "eager" or (name == "pfl" and name not in self.pythons)
        start = self._in_process if in_process else self._child
        make = partial(start, name, threads or self.threads)
        idle = name == "flower" and self.work.idle
        return Runner(text, precision, make, rival=text, kind=name, idle=idle)

    def _kedge(self, execution: Execution, threads: int, runner: Runner) -> Rounds:
        federation = self._federation = self._federation or self.work.federation(self.device)
        precision = runner.precision

        def make(execution: Execution) -> Simulation:
            return self.work.simulation(federation, execution, runner.method, precision)

        if execution.engine == "auto":
            execution = self._planned(make, runner, threads)
        runner.execution = asdict(execution)
        sim = make(execution)
        close = getattr(sim.engine, "close", lambda: None)
        return InProcess(
            partial(sim.run_round, check="none"),
            self.device,
            precision,
            execution.threads or threads,
            close,
        )

    def _planned(
        self, make: Callable[[Execution], Simulation], runner: Runner, threads: int
    ) -> Execution:
        """The execution that ``kedge run`` chooses for a run of ``AUTO_ROUNDS`` rounds."""
        with precise(runner.precision, torch.device(self.device)), restored_threads():
            use_threads(threads)
            return plan.choose(Settings(rounds=AUTO_ROUNDS), make(PLANNING)).execution

    def _in_process(self, name: str, threads: int, runner: Runner) -> Rounds:
        if self._data is None:
            self._data = self.work.normalised(self.device)
        try:
            run = rival_rounds(name, self.work, self._data, runner.precision)
        except ModuleNotFoundError as error:
            raise RivalFailed(str(error), missing=True) from None
        self.versions |= versions_of(name)
        return InProcess(run, self.device, runner.precision, threads)

    def _child(self, name: str, threads: int, runner: Runner) -> Rounds:
        python = self.pythons.get(name, sys.executable)
        child = Child(python, name, self.work, self.device, runner.precision, threads)
        self.versions |= child.versions
        return child


def split_list(text: str) -> list[str]:
    """Split a list at its commas, except those in brackets.

    >>> split_list("vector, loop(workers=2, threads=1)")
    ['vector', 'loop(workers=2, threads=1)']
    """
    entries, depth = [""], 0
    for sign in text:
        depth += (sign in "([") - (sign in ")]")
        if sign == "," and not depth:
            entries.append("")
        else:
            entries[-1] += sign
    return list(dict.fromkeys(filter(None, map(str.strip, entries))))


def read_engine(text: str) -> tuple[Execution, int]:
    """The execution and the threads of an engine such as ``loop(workers=2, threads=1)``.

    Raises:
        UnknownName: there is no such engine or setting.
        FieldError: a setting has no name or the wrong type.
    """
    call = parse_call(text)
    if call.name not in (*engines, "auto"):
        raise UnknownName("engine", call.name, [*engines, "auto"])
    defaults = {f.name: f.default for f in fields(Execution) if f.name != "engine"} | {"threads": 0}
    settings = _settings(call, text, defaults)
    threads = settings.pop("threads", 0)
    return Execution(call.name, **settings), threads


def read_rival(text: str) -> tuple[str, int]:
    """The name and the threads of a rival such as ``eager(threads=1)``; raises as above."""
    call = parse_call(text)
    if call.name not in RIVALS:
        raise UnknownName("rival", call.name, RIVALS)
    if call.name in ENGINE_RIVALS:
        return call.name, read_engine(text)[1]
    return call.name, _settings(call, text, {"threads": 0}).get("threads", 0)


def _settings(call: Call, text: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call, checked against the names and types of ``defaults``."""
    if call.args or call.preset:
        raise FieldError(
            f"{text!r}: name the settings, as in {call.name}({next(iter(defaults))}=2)"
        )
    for name, value in call.kwargs.items():
        if name not in defaults:
            raise UnknownName(f"setting of {call.name}", name, defaults)
        if type(value) is not type(defaults[name]):
            expected = type(defaults[name]).__name__
            raise FieldError(f"{text!r}: {name} = {value!r} is not of type {expected}")
    return call.kwargs


def read_pythons(texts: Iterable[str]) -> dict[str, str]:
    """The Python of each rival with its own environment, from ``flower=PATH`` or
    ``$KEDGE_FLOWER_PYTHON``."""
    found = {n: os.environ[v] for n in INSTALL if (v := f"KEDGE_{n.upper()}_PYTHON") in os.environ}
    for text in texts:
        name, sign, path = text.partition("=")
        if not (sign and path):
            raise KedgeError(f"--python-of takes NAME=PATH, as in flower=venv/bin/python: {text!r}")
        if name not in INSTALL:
            raise UnknownName("rival with a Python of its own", name, INSTALL)
        found[name] = path
    for name, python in found.items():
        if shutil.which(python) is None:
            raise KedgeError(f"the Python for {name} does not exist or cannot be run: {python}")
    return found
