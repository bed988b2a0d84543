"""Plan a run: its engine, chunk, threads and place of client state, and claim its folder."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from kedge.data.datasets import Dataset
from kedge.engines import Execution
from kedge.engines.device import device_name, effective, use_threads
from kedge.errors import KedgeError
from kedge.runs.config import Config
from kedge.runs.environment import check_unchanged, environment
from kedge.runs.folder import Folder
from kedge.runs.seeds import Make
from kedge.tuning import plan
from kedge.tuning.placement import Settings
from kedge.tuning.plan import Plan

#: Execution of a simulation that trains nothing. A plan needs a simulation of the run before its
#: engine is known: this one is cheap, since it changes no layer and keeps client state on the host.
PLANNING = Execution("loop", state="host")


def choose(
    config: Config,
    make: Make,
    device: torch.device,
    folder: Folder | None,
    data: Dataset | None = None,
    execution: Execution | None = None,
) -> Plan:
    """Plan a run, and claim its folder. A resumed run keeps its execution and number of threads.

    Nothing is measured if ``execution`` is given.

    Raises:
        KedgeError: the settings do not fit each other, or a resumed run has other data or files.
    """
    if folder is not None and folder.has_environment:
        found = folder.environment()
        if "data" in found or "loaded" in found:
            known = data or make(config.seeds[0], PLANNING).federation
            check_unchanged(found, folder.path, known.fingerprint)
        planned = _resumed_plan(folder, found, device)
        folder.claim()
        return planned
    sim = make(config.seeds[0], PLANNING)
    if execution is None:
        chosen = plan.choose(settings_of(config), sim)
    else:
        chosen = Plan(execution, device_name(device))
    use_threads(chosen.execution.threads)
    if folder is None:
        return chosen
    folder.claim()
    chosen = dataclasses.replace(chosen, execution=_with_folder(chosen.execution, folder))
    found = environment(
        chosen.execution,
        device,
        effective(config.precision, device),
        (data or sim.federation).fingerprint,
    )
    folder.save_environment(found)
    for line in chosen.lines():
        folder.log(line)
    return chosen


def settings_of(config: Config) -> Settings:
    """The settings of a configuration that a plan depends on."""
    return Settings(
        rounds=config.rounds,
        seeds=len(config.seeds),
        eval_every=config.eval_every,
        engine=config.engine,
        workers=config.workers,
        threads=config.threads,
        chunk=config.chunk,
        compile=config.compile,
        state=config.state,
        augment=config.augment,
    )


def _resumed_plan(folder: Folder, found: dict[str, Any], device: torch.device) -> Plan:
    name = device_name(device)
    if found["device"] != name:
        raise KedgeError(
            f"{folder.path} was started on {found['device']!r}, but this device is {name!r}; "
            "resume it there, or start a new run with another --out"
        )
    use_threads(found["threads"])
    return Plan(_with_folder(Execution(**found["how"]), folder), name)


def _with_folder(execution: Execution, folder: Folder) -> Execution:
    """Put the file with the client state, if there is one, into the folder of the run."""
    in_file = execution.state == "file"
    return dataclasses.replace(execution, folder=str(folder.path)) if in_file else execution
