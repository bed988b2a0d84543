"""Run a configuration: plan, build, train, test, save, and resume."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kedge.core.method import parse
from kedge.core.model import Model
from kedge.core.task import tasks
from kedge.data.build import federate
from kedge.data.datasets import Dataset, load
from kedge.data.federation import Federation
from kedge.data.partition import Partition
from kedge.engines import Execution
from kedge.engines.choice import plan
from kedge.engines.choice.plan import Plan
from kedge.engines.choice.subject import Settings
from kedge.engines.device import device_name, effective, precise, resolve_device
from kedge.errors import KedgeError, ModelError
from kedge.loading import load_options
from kedge.models import build
from kedge.runs.config import Config
from kedge.runs.folder import Folder
from kedge.runs.headline import headline_of, like_with_like, split_of, task_of, with_personal
from kedge.runs.result import Result
from kedge.runs.rounds import Interrupted as Interrupted
from kedge.runs.rounds import Watch
from kedge.runs.seeds import Make, SeedJob, SeedResult, train_seeds
from kedge.sim.simulation import Simulation

Report = Callable[[str], None]  # prints a line for the user
#: Execution of a simulation that trains nothing. A plan needs a simulation of the run before its
#: engine is known: this one is cheap, since it changes no layer and keeps client state on the host.
PLANNING = Execution("loop", state="host")


def run(
    config: Config,
    out: str | Path | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    dataset: Dataset | None = None,
    report: Report | None = None,
) -> Result:
    """Run all seeds of a configuration.

    Args:
        config: the settings.
        out: folder for the run; None saves nothing.
        resume: continue the run in ``out``.
        watch: called as ``watch(seed, record)`` after every round.
        dataset: the data, if they are loaded already.
        report: called with each line of the plan before training.

    Raises:
        KedgeError: the settings do not fit the data, the device or the folder.
        Interrupted: the user pressed Ctrl-C; the message says how to resume.
    """
    [config] = with_personal([config])
    folder = None
    if out is not None:
        folder = Folder.resume(out, config)[0] if resume else Folder.create(out, config)
    dataset = dataset or load(config.data)
    device = resolve_device(config.device)

    def make(seed: int, execution: Execution) -> Simulation:
        return simulation(config, dataset, seed, device, execution)

    return run_seeds(config, make, device, folder, watch, report)


def run_seeds(
    config: Config,
    make: Make,
    device: torch.device,
    folder: Folder | None = None,
    watch: Watch | None = None,
    report: Report | None = None,
) -> Result:
    """Run every seed on the simulation that ``make(seed, execution)`` returns, and summarise."""
    [config] = with_personal([config])
    with precise(config.precision, device):
        return _run_seeds(config, make, device, folder, watch, report)


def _run_seeds(
    config: Config,
    make: Make,
    device: torch.device,
    folder: Folder | None,
    watch: Watch | None,
    report: Report | None,
) -> Result:
    start = time.perf_counter()
    advise([config])
    planned = choose(config, make, device, folder)
    if report is not None:
        for line in planned.lines():
            report(line)
    jobs = [SeedJob(config, seed, make, folder, watch) for seed in config.seeds]
    results, _ = train_seeds(jobs, planned.execution, resume_hint(folder.path if folder else None))
    seconds = time.perf_counter() - start
    return result_of(config, results, planned, seconds, folder)


def resume_hint(out: str | Path | None) -> str:
    """What to type to continue an interrupted run in the folder ``out``."""
    return f"Resume with: --out {out} --resume{load_options()}" if out else "It was not saved"


def choose(config: Config, make: Make, device: torch.device, folder: Folder | None) -> Plan:
    """Plan a run. A resumed run keeps its execution and its number of threads."""
    if folder is not None and folder.has_environment:
        return _resumed_plan(folder, device)
    chosen = plan.choose(settings_of(config), make(config.seeds[0], PLANNING))
    if folder is None:
        return chosen
    chosen = dataclasses.replace(chosen, execution=_with_folder(chosen.execution, folder))
    folder.save_environment(chosen.execution, device, effective(config.precision, device))
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
        chunk=config.chunk,
        compile=config.compile,
        state=config.state,
        augment=config.augment,
    )


def _resumed_plan(folder: Folder, device: torch.device) -> Plan:
    environment, name = folder.environment(), device_name(device)
    if environment["device"] != name:
        raise KedgeError(
            f"{folder.path} was started on {environment['device']!r}, but this device is {name!r}; "
            "resume it there, or start a new run with another --out"
        )
    torch.set_num_threads(environment["threads"])
    return Plan(_with_folder(Execution(**environment["how"]), folder), name)


def _with_folder(execution: Execution, folder: Folder) -> Execution:
    """Put the file with the client state, if there is one, into the folder of the run."""
    in_file = execution.state == "file"
    return dataclasses.replace(execution, folder=str(folder.path)) if in_file else execution


def advise(configs: Sequence[Config]) -> None:
    """Warn once of each piece of advice that parts have for the number of rounds."""
    texts = [part.advice(c.rounds) for c in configs for part in parse(c.method).parts]
    for text in dict.fromkeys(text for text in texts if text):
        warnings.warn(text, stacklevel=2)


def result_of(
    config: Config,
    results: Sequence[SeedResult],
    planned: Plan,
    seconds: float,
    folder: Folder | None,
) -> Result:
    """Combine the seeds of a configuration, and write ``result.json`` if all are complete."""
    task = results[0].task
    result = Result(
        config=config,
        records=[one.records for one in results],
        metric=task.metric,
        higher_is_better=task.higher_is_better,
        unit=task.headline.unit,
        decimals=task.headline.decimals,
        partition_hash=[one.partition_hash for one in results],
        engine=planned.execution.engine,
        device=planned.device,
        seconds=seconds,
        models=[one.module for one in results],
        personal=[one.personal for one in results] if config.personal else [],
        folder=folder.path if folder else None,
        headline=headline_of(config, [one.records for one in results]),
    )
    if folder is not None and not any(one.failed for one in results):
        folder.write("result.json", result.to_json().encode())
        folder.log(f"complete: {task.metric} {result.written(result.last)}")
    return result


def simulation(
    config: Config,
    dataset: Dataset,
    seed: int,
    device: torch.device,
    execution: Execution,
    own: Model | None = None,
) -> Simulation:
    """Build the simulation of one seed.

    The partition, the cohorts and the initial weights depend on the settings and the seed alone,
    not on the device or on ``execution``. ``own`` is a model to train in place of a named one.

    Raises:
        KedgeError: the settings do not fit the data, e.g. more clients than samples.
    """
    silos = dataset.groups is not None
    classes = tasks[dataset.task].one_class
    partition: str | Partition = config.partition
    if config.partition == "auto":
        partition = "silos" if silos else "dirichlet(0.1)" if classes else "iid"
    elif config.partition.endswith(".json"):
        partition = Partition.load(config.partition)
    clients = config.clients or (len(dataset.group_names or ()) if silos else 20)
    if config.partition == "central":
        clients = config.clients or 1
    federation = federate(
        dataset,
        partition,
        clients=clients,
        split=split_of(config, dataset),
        augment=config.augment,
        angles=config.angles,
        seed=seed,
        device=device,
    )
    if own is not None:
        return assemble(config, federation, own, seed, execution)
    text = auto_model(dataset) if config.model == "auto" else config.model
    with torch.random.fork_rng(devices=()):  # of the CPU: listing GPUs would initialise CUDA
        torch.default_generator.manual_seed(seed)
        module = build(text, dataset.shape, dataset.outputs)
    return assemble(config, federation, module, seed, execution)


def assemble(
    config: Config,
    federation: Federation,
    module: nn.Module | Model,
    seed: int,
    execution: Execution,
) -> Simulation:
    """Build a simulation from a federation and a model, with the other settings of ``config``."""
    federation.task = task_of(config, federation)
    if not isinstance(module, Model):
        module = Model(module, batchnorm=config.batchnorm, precision=config.precision)
    return Simulation(
        federation,
        module,
        config.method,
        optim=config.optim(),
        work=config.work(),
        per_round=config.per_round or None,
        weighting=config.weighting,
        engine=execution,
        seed=seed,
    )


def auto_model(dataset: Dataset) -> str:
    """The default model: a small CNN for images of at least 28 pixels, otherwise an MLP."""
    if dataset.kind == "tokens":
        raise ModelError(
            "there is no default model for token ids; give one with an embedding, such as "
            "--model hf:NAME, or your own in kedge.fit"
        )
    if not dataset.is_image or min(dataset.shape[1:]) < 28:
        return "mlp(hidden=[64])"
    return "fedcog_cnn" if dataset.shape[1:] in ((28, 28), (32, 32)) else "lenet5(norm=gn)"


def compare(
    methods: Sequence[str],
    configs: Sequence[Config],
    out: str | Path | None = None,
    resume: bool = False,
    watch: Callable[[str, int, dict[str, Any]], None] | None = None,
    report: Report | None = None,
) -> list[Result]:
    """Run several methods on the same partitions, cohorts and initial weights.

    Args:
        methods: their names, as they are shown and passed to ``watch``.
        configs: one configuration per method, equal but for the method.
        out: folder with one subfolder per method; None saves nothing.
        resume: continue the runs in ``out``; those that are missing are started.
        watch: called as ``watch(method, seed, record)`` after every round.
        report: called with each line of the plans.
    """
    dataset = load(configs[0].data)
    results = []
    configs = with_personal(configs)
    for method, config in zip(methods, configs, strict=True):
        path = None if out is None else Path(out) / slug(method)
        started = resume and path is not None and (path / "config.toml").exists()
        watch_one = None if watch is None else (lambda s, r, m=method: watch(m, s, r))
        results.append(run(config, path, started, watch_one, dataset, report))
    return like_with_like(results)


def slug(text: str) -> str:
    """A name for a folder, from a method or a setting.

    >>> slug("fedprox(mu=0.1)")
    'fedprox_mu_0.1'
    """
    return "".join(c if c.isalnum() or c in ".-" else "_" for c in text).strip("_")
