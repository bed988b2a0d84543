"""Runs that train together, each with a folder of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from kedge.data.datasets import Dataset, load
from kedge.engines import Execution
from kedge.engines.device import precise, resolve_device, restored_threads
from kedge.runs.config import Config
from kedge.runs.environment import CONFIG, check_unchanged
from kedge.runs.folder import Folder
from kedge.runs.headline import with_personal
from kedge.runs.memory import memory_errors
from kedge.runs.planning import choose
from kedge.runs.rounds import MAX_SAVE_SHARE, Watch
from kedge.runs.runner import Report, advise, given_back, result_of, simulation
from kedge.runs.seeds import SeedJob, SeedResult, train_seeds
from kedge.sim.simulation import Simulation
from kedge.tuning.plan import Plan


def run_together(
    configs: Sequence[Config],
    paths: Sequence[Path],
    watch: Watch | None = None,
    report: Report | None = None,
    execution: Execution | None = None,
    yardstick: str = "",
    hint: str = "",
    save_share: float = MAX_SAVE_SHARE,
) -> list[SeedResult]:
    """Start or resume several runs of one seed each; in lanes if the engine batches clients.

    A loss that is not finite ends its own run: ``failed`` of the result is the reason.

    Args:
        configs: settings that are equal but for the seed.
        paths: the folder of each run; one that exists is resumed.
        watch: called as ``watch(seed, record)`` after every round; True stops all of them.
        report: called with each line of the plan.
        execution: of new runs; None measures which is fastest.
        yardstick: train on the pooled data of all clients instead.
        hint: printed on interrupt.
        save_share: of the time, spent on checkpoints at most.

    Raises:
        KedgeError: the settings do not fit the data, the device or the folders.
        Interrupted: the user pressed Ctrl-C, or ``watch`` requested a stop; all is saved.
    """
    configs = with_personal(configs)
    first = configs[0]
    folders = [
        Folder.resume(path, config)[0] if (path / CONFIG).exists() else Folder.create(path, config)
        for config, path in zip(configs, paths, strict=True)
    ]
    dataset, device = load(first.data), resolve_device(first.device)

    def make(seed: int, execution: Execution) -> Simulation:
        return simulation(first, dataset, seed, device, execution, pooled=bool(yardstick))

    jobs = [
        SeedJob(config, config.seeds[0], make, folder, watch)
        for config, folder in zip(configs, folders, strict=True)
    ]
    with (
        precise(first.precision, device),
        restored_threads(),
        given_back(*folders),
        memory_errors(first),
    ):
        advise(configs[:1])
        planned = plan_together(jobs, dataset, execution)
        if report is not None:
            for line in planned.lines():
                report(line)
        results, _ = train_seeds(jobs, planned.execution, hint, False, save_share)
        for job, result in zip(jobs, results, strict=True):
            if not result.failed:
                result_of(job.config, [result], planned, job.folder)
        return results


def plan_together(
    jobs: Sequence[SeedJob], dataset: Dataset, execution: Execution | None = None
) -> Plan:
    """Plan all jobs as if they were the seeds of one run, and claim their folders."""
    first = jobs[0]
    seeds = tuple(range(first.seed, first.seed + len(jobs)))
    config = dataclasses.replace(first.config, seeds=seeds)
    device = resolve_device(config.device)
    planned = choose(config, first.make, device, first.folder, dataset, execution)
    if first.folder is not None:
        found = first.folder.environment()
        for folder in {job.folder.path: job.folder for job in jobs if job.folder}.values():
            if folder.has_environment:
                check_unchanged(folder.environment(), folder.path, found.get("data", ""))
            folder.claim()
            if not folder.has_environment:
                folder.save_environment(found)
    return planned
