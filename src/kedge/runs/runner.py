"""Run a configuration: plan, build, train, test, save, and resume."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import nn

from kedge.core.method import parse
from kedge.core.model import Model
from kedge.core.task import Task, tasks
from kedge.data.build import federate
from kedge.data.datasets import Dataset, load
from kedge.data.federation import Federation
from kedge.data.partition import Partition
from kedge.engines import Execution
from kedge.engines.device import precise, resolve_device, restored_threads
from kedge.errors import DataError, KedgeError, ModelError
from kedge.loading import load_options
from kedge.models import build
from kedge.runs.checks import check_batchnorm, check_tokens
from kedge.runs.config import Config
from kedge.runs.folder import Folder
from kedge.runs.headline import headline_of, split_of, task_of, with_personal
from kedge.runs.memory import memory_errors
from kedge.runs.observing import Observe, followed
from kedge.runs.planning import choose
from kedge.runs.result import Result
from kedge.runs.rounds import Interrupted as Interrupted
from kedge.runs.rounds import Watch
from kedge.runs.seeds import Make, SeedJob, SeedResult, train_seeds
from kedge.runs.stopping import clear_stop, end_line
from kedge.runs.yardsticks import pooled_config
from kedge.session.sampler import make_sampler
from kedge.sim.simulation import Simulation
from kedge.tuning.plan import Plan

Report = Callable[[str], None]  # prints a line for the user


def run(
    config: Config,
    out: str | Path | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    dataset: Dataset | None = None,
    report: Report | None = None,
    numbered: bool = False,
    yardstick: str = "",
    observe: Observe | None = None,
) -> Result:
    """Run all seeds of a configuration.

    Args:
        config: the settings.
        out: folder for the run; None saves nothing.
        resume: continue the run in ``out``.
        watch: called as ``watch(seed, record)`` after every round.
        dataset: the data, if they are loaded already.
        report: called with each line of the plan before training.
        numbered: whether ``out`` is from :func:`~kedge.runs.folder.new_path`.
        yardstick: train on the pooled data of all clients instead; the name of the result.
        observe: makes the observer that is told of the run, such as loggers.

    Raises:
        KedgeError: the settings do not fit the data, the device or the folder.
        Interrupted: the user pressed Ctrl-C; the message says how to resume.
    """
    [config] = with_personal([config])
    folder = None
    if out is not None and resume:
        folder, config = Folder.resume(out, config)
    elif out is not None:
        folder = Folder.create(out, config, numbered)
    dataset = dataset or load(config.data)
    device = resolve_device(config.device)

    def make(seed: int, execution: Execution) -> Simulation:
        return simulation(config, dataset, seed, device, execution, pooled=bool(yardstick))

    result = run_seeds(config, make, device, folder, watch, report, dataset, observe)
    return dataclasses.replace(result, yardstick=yardstick)


def run_seeds(
    config: Config,
    make: Make,
    device: torch.device,
    folder: Folder | None = None,
    watch: Watch | None = None,
    report: Report | None = None,
    data: Dataset | None = None,
    observe: Observe | None = None,
) -> Result:
    """Run every seed on the simulation that ``make(seed, execution)`` returns, and summarise.

    The fingerprint of the data is kept in the folder, that of the federation if ``data`` is None.
    """
    [config] = with_personal([config])
    with (
        precise(config.precision, device),
        restored_threads(),
        given_back(folder),
        memory_errors(config),
    ):
        advise([config])
        planned = choose(config, make, device, folder, data)
        if report is not None:
            for line in planned.lines():
                report(line)
        path = folder.path if folder else None
        with followed(observe, config, path, watch) as run:
            jobs = [SeedJob(config, seed, make, folder, run.watch) for seed in config.seeds]
            results, _ = train_seeds(jobs, planned.execution, resume_hint(path))
            run.result = result_of(config, results, planned, folder)
        return run.result


@contextmanager
def given_back(*folders: Folder | None) -> Iterator[None]:
    """Give folders without a checkpoint back if a run is interrupted or cannot go on; other
    processes may then train in them."""
    given = [folder for folder in folders if folder is not None]
    try:
        yield
    except BaseException as error:
        for folder in given:
            if folder.is_claimed:
                clear_stop(folder.path)
                with suppress(DataError):  # the disk may be full
                    folder.log(end_line(error))
            if isinstance(error, (KeyboardInterrupt, KedgeError)):
                folder.release()
        raise
    finally:
        for folder in given:
            if folder.is_claimed:
                clear_stop(folder.path)
            folder.lock.give_back()


def resume_hint(out: str | Path | None) -> str:
    """What to type to continue an interrupted run in the folder ``out``."""
    return f"Resume with: --out {out} --resume{load_options()}" if out else "It was not saved"


def advise(configs: Sequence[Config]) -> None:
    """Warn once of each piece of advice that parts have for the number of rounds."""
    texts = [part.advice(c.rounds) for c in configs for part in parse(c.method).parts]
    for text in dict.fromkeys(text for text in texts if text):
        warnings.warn(text, stacklevel=2)


def result_of(
    config: Config,
    results: Sequence[SeedResult],
    planned: Plan,
    folder: Folder | None,
) -> Result:
    """Combine the seeds of a configuration, and write ``result.json`` if all are complete.

    Its time is the sum of its rounds', so that it is the same after a run is resumed.
    """
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
        seconds=sum(record.get("seconds", 0.0) for one in results for record in one.records),
        models=[one.module for one in results],
        personal=[one.personal for one in results] if config.personal else [],
        best_models=[one.best for one in results if one.best is not None],
        folder=folder.path if folder else None,
        headline=headline_of(config, [one.records for one in results]),
    )
    if folder is not None and not any(one.failed for one in results):
        folder.write("result.json", result.to_json().encode())
        folder.log(f"complete: {task.metric} {result.written(result.last)}")
    return result


def partition_of(text: str, dataset: Dataset) -> str:
    """The partition that ``auto`` stands for, or the text itself."""
    if text != "auto":
        return text
    if dataset.groups is not None:
        return "silos"
    return "dirichlet(0.1)" if tasks[dataset.task].one_class else "iid"


def federation_of(
    config: Config, dataset: Dataset, seed: int, device: torch.device | str = "cpu"
) -> Federation:
    """Partition a dataset among clients as the settings say; neither model nor method is needed.

    Raises:
        KedgeError: the settings do not fit the data, e.g. more clients than samples.
    """
    partition: str | Partition = partition_of(config.partition, dataset)
    if config.partition.endswith(".json"):
        partition = Partition.load(config.partition)
    silos = dataset.groups is not None
    clients = config.clients or (len(dataset.group_names or ()) if silos else 20)
    if config.partition == "central":
        clients = config.clients or 1
    return federate(
        dataset,
        partition,
        clients=clients,
        split=split_of(config, dataset),
        validation=config.validation,
        unseen=config.unseen,
        augment=config.augment,
        angles=config.angles,
        seed=seed,
        device=device,
    )


def simulation(
    config: Config,
    dataset: Dataset,
    seed: int,
    device: torch.device,
    execution: Execution,
    own: Model | None = None,
    adjust: Callable[[Task], Task] | None = None,
    pooled: bool = False,
) -> Simulation:
    """Build the simulation of one seed; with ``pooled``, of one client with all training data.

    The partition, the cohorts and the initial weights depend on the settings and the seed alone,
    not on the device or on ``execution``. ``own`` is a model to train in place of a named one,
    and ``adjust`` gives the task an own loss or metric.

    Raises:
        KedgeError: the settings do not fit the data, e.g. more clients than samples.
    """
    federation = federation_of(config, dataset, seed, device)
    if adjust is not None:
        federation.task = adjust(federation.task)
    if own is not None:
        return assemble(config, federation, own, seed, execution)
    text = auto_model(dataset.kind, dataset.shape) if config.model == "auto" else config.model
    with torch.random.fork_rng(devices=()):  # of the CPU: listing GPUs would initialise CUDA
        torch.default_generator.manual_seed(seed)
        module = build(text, dataset.shape, dataset.outputs)
    if pooled:
        return assemble(
            pooled_config(config, federation), federation.pooled(), module, seed, execution
        )
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
    check_batchnorm(config.method, module)
    check_tokens(module, federation)
    return Simulation(
        federation,
        module,
        config.method,
        optim=config.optim(),
        work=config.work(),
        sampler=make_sampler(config.sampler, config.per_round, federation.sizes),
        weighting=config.weighting,
        engine=execution,
        seed=seed,
    )


def auto_model(kind: str, shape: tuple[int, ...]) -> str:
    """The default model: a small CNN for images of at least 28 pixels, otherwise an MLP."""
    if kind == "tokens":
        raise ModelError(
            "there is no default model for token ids; give one with an embedding, such as "
            "--model hf:NAME, or your own in kedge.fit"
        )
    if len(shape) != 3 or min(shape[1:]) < 28:
        return "mlp(hidden=[64])"
    return "fedcog_cnn" if shape[1:] in ((28, 28), (32, 32)) else "lenet5(norm=gn)"


def slug(text: str) -> str:
    """A name for a folder, from a method or a setting.

    >>> slug("fedprox(mu=0.1)")
    'fedprox_mu_0.1'
    """
    return "".join(c if c.isalnum() or c in ".-" else "_" for c in text).strip("_")
