"""What can be timed: kedge's engines and its rivals, each as something that runs one round."""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch
from torch import Tensor

from kedge.bench.child import Child, RivalFailed
from kedge.bench.eager import EagerRounds
from kedge.bench.workloads import Workload
from kedge.data.federation import Federation
from kedge.engines import Execution, engines
from kedge.engines.choice import plan
from kedge.engines.choice.subject import Settings
from kedge.engines.device import precise
from kedge.errors import FieldError, KedgeError, UnknownName
from kedge.grammar import Call, parse_call
from kedge.sim.simulation import Simulation

OWN = ("loop",)  # engines of kedge that serve as a rival
RIVALS = (*OWN, "eager", "pfl", "flower")
INSTALL = {
    "pfl": "pip install pfl==0.6.0",
    "flower": 'pip install "flwr[simulation]" torch numpy safetensors pillow',
}
PACKAGES = {"pfl": ("pfl",), "flower": ("flwr", "ray")}


class Rounds(Protocol):
    """Runs a round and gives its seconds."""

    def __call__(self) -> float: ...
    def close(self) -> None: ...


@dataclass
class Runner:
    """One line of the table: what is timed, and what was found."""

    name: str
    precision: str
    make: Callable[[Runner], Rounds] = field(repr=False)
    method: str = "fedavg"
    rival: str = ""  # the name others are compared with it by
    kind: str = "kedge"
    idle: bool = False  # takes no steps
    how: dict[str, Any] | None = None  # kedge computes
    times: list[float] = field(default_factory=list)
    failed: str = ""

    @property
    def seconds(self) -> float | None:
        return statistics.median(self.times) if self.times else None


class Here:
    """Rounds in this process: with its number of threads and precision, the device waited for."""

    def __init__(
        self, run: Callable[[], Any], device: str, precision: str, threads: int,
        close: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._run, self._device, self._precision = run, torch.device(device), precision
        self._threads, self.close = threads, close
        gpu = self._device.type == "cuda"
        self._wait = partial(torch.cuda.synchronize, self._device) if gpu else lambda: None

    def __call__(self) -> float:
        if self._threads != torch.get_num_threads():
            torch.set_num_threads(self._threads)
        with precise(self._precision, self._device):
            self._wait()
            start = time.perf_counter()
            self._run()
            self._wait()
            return time.perf_counter() - start


def in_process(
    rival: str, work: Workload, data: tuple[Tensor, Tensor], precision: str
) -> Callable[[], None]:
    """The rounds of a rival that runs in this process."""
    if rival == "eager":
        return EagerRounds(work, data, precision)
    from kedge.bench.pfl_rival import PflRounds

    return PflRounds(work, data, precision)


def versions_of(rival: str) -> dict[str, str]:
    """Versions of a rival's packages, of those that are here."""
    found = {}
    for package in PACKAGES.get(rival, ()):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


class Bench:
    """Makes the runners of one workload, which share its data."""

    def __init__(self, work: Workload, device: str, threads: int, pythons: dict[str, str]) -> None:
        self.work, self.device, self.threads, self.pythons = work, device, threads, pythons
        self.versions: dict[str, str] = {}
        self._federation: Federation | None = None
        self._data: tuple[Tensor, Tensor] | None = None

    def engine(self, text: str, precision: str, method: str, rival: str = "") -> Runner:
        """An engine of kedge, written as ``loop(workers=2)``."""
        how, threads = read_engine(text)
        make = partial(self._kedge, how, threads or self.threads)
        return Runner(f"kedge {text}", precision, make, method, rival)

    def rival(self, text: str, precision: str) -> Runner:
        """A rival, written as ``eager(threads=1)``."""
        name, threads = read_rival(text)
        if name in OWN:
            return self.engine(text, precision, "fedavg", rival=text)
        here = name == "eager" or (name == "pfl" and name not in self.pythons)
        start = self._in_process if here else self._child
        make = partial(start, name, threads or self.threads)
        idle = name == "flower" and self.work.idle
        return Runner(text, precision, make, rival=text, kind=name, idle=idle)

    def _kedge(self, how: Execution, threads: int, runner: Runner) -> Rounds:
        federation = self._federation = self._federation or self.work.federation(self.device)
        precision = runner.precision

        def make(how: Execution) -> Simulation:
            return self.work.simulation(federation, how, runner.method, precision)

        if how.engine == "auto":
            how = self._chosen(make, runner)
        runner.how = asdict(how)
        sim = make(how)
        close = getattr(sim.engine, "close", lambda: None)
        return Here(partial(sim.run_round, check=False), self.device, precision, threads, close)

    def _chosen(self, make: Callable[[Execution], Simulation], runner: Runner) -> Execution:
        """What ``kedge run`` would choose for 100 rounds."""
        with precise(runner.precision, torch.device(self.device)):
            sim = make(Execution("loop", state="host"))
            return plan.choose(Settings(rounds=100), sim).execution

    def _in_process(self, name: str, threads: int, runner: Runner) -> Rounds:
        if self._data is None:
            self._data = self.work.scaled(self.device)
        try:
            run = in_process(name, self.work, self._data, runner.precision)
        except ModuleNotFoundError as error:
            raise RivalFailed(str(error), missing=True) from None
        self.versions |= versions_of(name)
        return Here(run, self.device, runner.precision, threads)

    def _child(self, name: str, threads: int, runner: Runner) -> Rounds:
        python = self.pythons.get(name, sys.executable)
        child = Child(python, name, self.work, self.device, runner.precision, threads)
        self.versions |= child.versions
        return child


def split_list(text: str) -> list[str]:
    """The entries of a list with commas, which may have commas of their own in brackets.

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
    """How an engine such as ``loop(workers=2, threads=1)`` computes, and its threads."""
    call = parse_call(text)
    if call.name not in (*engines, "auto"):
        raise UnknownName("engine", call.name, [*engines, "auto"])
    defaults = {f.name: f.default for f in fields(Execution) if f.name != "engine"} | {"threads": 0}
    settings = _settings(call, text, defaults)
    threads = settings.pop("threads", 0)
    return Execution(call.name, **settings), threads


def read_rival(text: str) -> tuple[str, int]:
    """A rival such as ``eager(threads=1)`` and its threads."""
    call = parse_call(text)
    if call.name not in RIVALS:
        raise UnknownName("rival", call.name, RIVALS)
    if call.name in OWN:
        return call.name, read_engine(text)[1]
    return call.name, _settings(call, text, {"threads": 0}).get("threads", 0)


def _settings(call: Call, text: str, defaults: dict[str, Any]) -> dict[str, Any]:
    if call.args or call.preset:
        raise FieldError(
            f"{text!r}: name the settings, as in {call.name}({next(iter(defaults))}=2)"
        )
    for name, value in call.kwargs.items():
        if name not in defaults:
            raise UnknownName(f"setting of {call.name}", name, defaults)
        if type(value) is not type(defaults[name]):
            kind = type(defaults[name]).__name__
            raise FieldError(f"{text!r}: {name} = {value!r} is not of the kind {kind}")
    return call.kwargs


def read_pythons(texts: Iterable[str]) -> dict[str, str]:
    """The Python of each rival that has its own: ``flower=PATH``, or $KEDGE_FLOWER_PYTHON."""
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
            raise KedgeError(f"the Python for {name} is not there or cannot be run: {python}")
    return found
