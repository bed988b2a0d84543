"""Run a configuration: build, train round by round, test, save, and go on where a run stopped."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from kedge.core.method import parse
from kedge.core.model import Model
from kedge.core.task import Task, tasks
from kedge.core.tree import take
from kedge.data.build import federate
from kedge.data.datasets import Dataset, load
from kedge.data.federation import Federation
from kedge.data.partition import Partition
from kedge.engines import Execution, engines
from kedge.engines.choice import plan
from kedge.engines.choice.plan import Plan
from kedge.engines.choice.subject import Settings
from kedge.engines.device import device_name, effective, precise
from kedge.errors import KedgeError
from kedge.loading import load_options
from kedge.models import build
from kedge.runs.config import Config, resolve_device
from kedge.runs.folder import PARTITION, Folder
from kedge.runs.result import Result
from kedge.runs.rounds import Interrupted as Interrupted
from kedge.runs.rounds import Member, Watch, train
from kedge.sim.cohorts import share, unlike
from kedge.sim.simulation import Simulation

Make = Callable[[int, Execution], Simulation]  # (seed, execution) -> the simulation of that seed
Say = Callable[[str], None]  # a line for the user


def run(
    config: Config,
    out: str | Path | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    dataset: Dataset | None = None,
    say: Say | None = None,
) -> Result:
    """Run all seeds of a configuration; ``say`` is told execution, and what it will take."""
    folder = None
    if out is not None:
        folder = Folder.resume(out, config)[0] if resume else Folder.create(out, config)
    dataset = dataset or load(config.data)
    device = resolve_device(config.device)

    def make(seed: int, execution: Execution) -> Simulation:
        return simulation(config, dataset, seed, device, execution)

    return run_seeds(config, make, device, folder, watch, say)


def run_seeds(
    config: Config,
    make: Make,
    device: torch.device,
    folder: Folder | None = None,
    watch: Watch | None = None,
    say: Say | None = None,
) -> Result:
    """Run every seed on the simulation that ``make`` gives for it, and sum up."""
    with precise(config.precision, device):
        return _run_seeds(config, make, device, folder, watch, say)


def _run_seeds(
    config: Config,
    make: Make,
    device: torch.device,
    folder: Folder | None,
    watch: Watch | None,
    say: Say | None,
) -> Result:
    start = time.perf_counter()
    advise([config])
    planned = choose(config, make, device, folder)
    if say is not None:
        for line in planned.lines():
            say(line)
    again = f"--out {folder.path} --resume{load_options()}" if folder else ""
    hint = f"Go on with: {again}" if again else "It was not saved"
    orders = [Order(config, seed, make, folder, watch) for seed in config.seeds]
    ended, _ = train_all(orders, planned.execution, hint)
    seconds = time.perf_counter() - start
    return result_of(config, ended, planned, seconds, folder)


def choose(config: Config, make: Make, device: torch.device, folder: Folder | None) -> Plan:
    """The plan of a run; a resumed one goes on as it was started, with as many threads."""
    if folder is not None and folder.has_environment:
        return _as_before(folder, device)
    chosen = plan.choose(
        settings_of(config), make(config.seeds[0], Execution("loop", state="host"))
    )
    if folder is None:
        return chosen
    chosen = dataclasses.replace(chosen, execution=_in_folder(chosen.execution, folder))
    folder.save_environment(chosen.execution, device, effective(config.precision, device))
    for line in chosen.lines():
        folder.log(line)
    return chosen


def settings_of(config: Config) -> Settings:
    """What of a configuration decides how it is computed."""
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


def _as_before(folder: Folder, device: torch.device) -> Plan:
    before, here = folder.environment(), device_name(device)
    if before["device"] != here:
        raise KedgeError(
            f"{folder.path} was started on {before['device']!r}, this is {here!r}; "
            "resume it there, or start anew with another --out"
        )
    torch.set_num_threads(before["threads"])
    return Plan(_in_folder(Execution(**before["how"]), folder), here)


def _in_folder(execution: Execution, folder: Folder) -> Execution:
    in_file = execution.state == "file"
    return dataclasses.replace(execution, folder=str(folder.path)) if in_file else execution


def advise(configs: Sequence[Config]) -> None:
    """Warn, once, of what parts have to say about so many rounds."""
    texts = [part.advice(c.rounds) for c in configs for part in parse(c.method).parts]
    for text in dict.fromkeys(text for text in texts if text):
        warnings.warn(text, stacklevel=2)


class Order(NamedTuple):
    """One seed of a run, before it is built."""

    config: Config
    seed: int
    make: Make
    folder: Folder | None
    watch: Watch | None


class Ended(NamedTuple):
    """What is left of a seed."""

    records: list[dict[str, Any]]
    partition_hash: str
    task: Task
    module: nn.Module
    personal: list[nn.Module]
    failed: str


def train_all(
    orders: Sequence[Order], execution: Execution, hint: str, strict: bool = True
) -> tuple[list[Ended], list[int]]:
    """Train seeds, alike ones side by side; what is left of them, and the lanes of each stack."""
    ended: list[Ended] = []
    stacks: list[int] = []
    members: list[Member] = []

    def finish() -> None:
        stacks.extend(train(members, hint, strict))
        ended.extend(_end(member) for member in members)
        members.clear()

    for order in orders:
        if members and _is_full(members, execution):
            finish()
        member = _build(order, execution)
        if members and (
            member.config.rounds != members[0].config.rounds or unlike(members[0].sim, member.sim)
        ):
            finish()
        if members:  # one copy of the data is enough
            share(members[0].sim.federation, member.sim.federation)
        members.append(member)
    finish()
    return ended, stacks


def _is_full(members: Sequence[Member], execution: Execution) -> bool:
    """Whether a stack has no room for one more like the first."""
    lanes = sum(member.sim.per_round for member in members) + members[0].sim.per_round
    alone = not engines[execution.engine].batches_clients
    return alone or 0 < execution.chunk < lanes


def _build(order: Order, execution: Execution) -> Member:
    sim = order.make(order.seed, execution)
    partition = sim.federation.partition
    if order.folder is not None and partition is not None:
        partition.save(order.folder.seed(order.seed) / PARTITION)
    return Member(order.config, order.seed, sim, order.folder, order.watch)


def _end(member: Member) -> Ended:
    sim, personal = member.sim, []
    fed, module = sim.federation, sim.module()
    if member.folder is not None and not member.failed:
        member.folder.save_model(member.seed, module)
    if member.config.personal:
        own = sim.personal()
        personal = [sim.bound.model.module(take(own, k)) for k in range(fed.num_clients)]
    name = fed.partition.hash if fed.partition is not None else ""
    return Ended(member.records, name, fed.task, module, personal, member.failed)


def result_of(
    config: Config,
    ended: Sequence[Ended],
    planned: Plan,
    seconds: float,
    folder: Folder | None,
) -> Result:
    """All seeds of a configuration as one result, kept in the folder."""
    task = ended[0].task
    result = Result(
        config=config,
        records=[one.records for one in ended],
        metric=task.metric,
        higher_is_better=task.higher_is_better,
        unit=task.headline.unit,
        decimals=task.headline.decimals,
        partition_hash=[one.partition_hash for one in ended],
        engine=planned.execution.engine,
        device=planned.device,
        seconds=seconds,
        models=[one.module for one in ended],
        personal=[one.personal for one in ended] if config.personal else [],
        folder=folder.path if folder else None,
    )
    if folder is not None and not any(one.failed for one in ended):
        folder.write("result.json", result.to_json().encode())
        folder.log(f"complete: {task.metric} {result.written(result.last)}")
    return result


def simulation(
    config: Config, dataset: Dataset, seed: int, device: torch.device, execution: Execution
) -> Simulation:
    """The simulation of one seed: its partition, cohorts and first weights depend on it alone."""
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
        split=config.split,
        augment=config.augment,
        angles=config.angles,
        seed=seed,
        device=device,
    )
    text = auto_model(dataset) if config.model == "auto" else config.model
    with torch.random.fork_rng(devices=()):  # the host's; looking at a GPU would start it
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
    """A model that fits: a small CNN for images of 28 pixels and more, an MLP for the rest."""
    if not dataset.is_image or min(dataset.shape[1:]) < 28:
        return "mlp(hidden=[64])"
    return "fedcog_cnn" if dataset.shape[1:] in ((28, 28), (32, 32)) else "lenet5(norm=gn)"


def compare(
    methods: Sequence[str],
    configs: Sequence[Config],
    out: str | Path | None = None,
    resume: bool = False,
    watch: Callable[[str, int, dict[str, Any]], None] | None = None,
    say: Say | None = None,
) -> list[Result]:
    """Run several methods on the same partitions, cohorts and first weights."""
    dataset = load(configs[0].data)
    results = []
    for method, config in zip(methods, configs, strict=True):
        path = None if out is None else Path(out) / slug(method)
        again = resume and path is not None and (path / "config.toml").exists()
        seen = None if watch is None else (lambda s, r, m=method: watch(m, s, r))
        results.append(run(config, path, again, seen, dataset, say))
    return results


def slug(text: str) -> str:
    """A method's name for a folder."""
    return "".join(c if c.isalnum() or c in ".-" else "_" for c in text).strip("_")
