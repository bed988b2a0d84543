"""Plan runs that train together: engine, chunk, threads, place of client state; claim folders."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from kedge.data.datasets import Dataset
from kedge.engines import Execution
from kedge.engines.device import device_name, effective, resolve_device, use_threads
from kedge.errors import KedgeError
from kedge.runs.checkpoint import TrainingFolder
from kedge.runs.environment import check_unchanged, environment
from kedge.settings import Config
from kedge.sim.simulation import Simulation
from kedge.tuning import plan
from kedge.tuning.placement import Settings
from kedge.tuning.plan import Plan

Make = Callable[[int, Execution], Simulation]  # (seed, execution) -> the simulation of that seed
#: Execution of a simulation that trains nothing. A plan needs a simulation of the run before its
#: engine is known: this one is cheap, since it changes no layer and keeps client state on the host.
PLANNING = Execution("loop", state="host")


class SeedJob(NamedTuple):
    """One seed of a run, before its simulation is built."""

    config: Config
    seed: int
    make: Make
    folder: TrainingFolder | None = None


def choose(
    jobs: Sequence[SeedJob], data: Dataset | None = None, execution: Execution | None = None
) -> Plan:
    """Plan all jobs as if they were the seeds of one run, and claim their folders. A resumed run
    keeps its execution and number of threads.

    Args:
        jobs: seeds that train together.
        data: the data, whose fingerprint is kept in the folders; None: those of the federation.
        execution: of new runs; None measures which is fastest.

    Raises:
        KedgeError: the settings do not fit each other, or a resumed run has other data or files.
    """
    config, first, make, folder = jobs[0]
    device = resolve_device(config.device)
    known = "" if data is None else data.fingerprint
    if folder is not None and folder.has_environment:
        found = folder.environment()
        if not known and ("data" in found or "loaded" in found):
            known = make(first, PLANNING).federation.fingerprint
        check_unchanged(found, folder.path, known)
        planned = _resumed_plan(folder, found, device)
        folder.claim()
    else:
        sim = make(first, PLANNING)
        seeds = tuple(range(first, first + len(jobs)))
        settings = settings_of(dataclasses.replace(config, seeds=seeds))
        planned = Plan(execution, device_name(device)) if execution else plan.choose(settings, sim)
        use_threads(planned.execution.threads)
        if folder is None:
            return planned
        folder.claim()
        planned = dataclasses.replace(planned, execution=_with_folder(planned.execution, folder))
        precision = effective(config.precision, device)
        known = known or sim.federation.fingerprint
        found = environment(planned.execution, device, precision, known)
        folder.save_environment(found)
        for line in planned.lines():
            folder.log(line)
    for other in {job.folder.path: job.folder for job in jobs if job.folder}.values():
        if other.has_environment:
            check_unchanged(other.environment(), other.path, found.get("data", ""))
        other.claim()
        if not other.has_environment:
            other.save_environment(found)
    return planned


def settings_of(config: Config) -> Settings:
    """The settings of a configuration that a plan depends on."""
    names = [field.name for field in dataclasses.fields(Settings) if field.name != "seeds"]
    return Settings(seeds=len(config.seeds), **{name: getattr(config, name) for name in names})


def _resumed_plan(folder: TrainingFolder, found: dict[str, Any], device: torch.device) -> Plan:
    name = device_name(device)
    if found["device"] != name:
        raise KedgeError(
            f"{folder.path} was started on {found['device']!r}, but this device is {name!r}; "
            "resume it there, or start a new run with another --out"
        )
    use_threads(found["threads"])
    return Plan(_with_folder(Execution(**found["how"]), folder), name)


def _with_folder(execution: Execution, folder: TrainingFolder) -> Execution:
    """Put the file with the client state, if there is one, into the folder of the run."""
    in_file = execution.state == "file"
    return dataclasses.replace(execution, folder=str(folder.path)) if in_file else execution
