"""Run a configuration: build, train round by round, test, save, and go on where a run stopped."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kedge.config import Config, resolve_device
from kedge.core.method import parse
from kedge.core.model import Model
from kedge.core.server import Totals
from kedge.core.tree import sq_norm, take
from kedge.errors import KedgeError
from kedge.runs import plan
from kedge.runs.folder import PARTITION, Folder, environment
from kedge.runs.result import Result
from kedge.sim.build import federate
from kedge.sim.engine import How
from kedge.sim.federation import Federation
from kedge.sim.partition import Partition
from kedge.sim.simulation import Simulation
from kedge.zoo.datasets import Dataset, load
from kedge.zoo.models import build

Make = plan.Make
Watch = Callable[[int, dict[str, Any]], None]  # (seed, record of a round)
SAVE_SHARE = 0.1  # at most this share of the time goes into checkpoints


class Interrupted(KedgeError):
    """Ctrl-C: the round was finished and saved."""


def run(
    config: Config,
    out: str | Path | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    dataset: Dataset | None = None,
) -> Result:
    """Run all seeds of a configuration."""
    folder = None
    if out is not None:
        folder = Folder.resume(out, config)[0] if resume else Folder.create(out, config)
    dataset = dataset or load(config.data)
    device = resolve_device(config.device)

    def make(seed: int, how: How) -> Simulation:
        return simulation(config, dataset, seed, device, how)

    return run_seeds(config, make, device, folder, watch)


def run_seeds(
    config: Config,
    make: Make,
    device: torch.device,
    folder: Folder | None = None,
    watch: Watch | None = None,
) -> Result:
    """Run every seed on the simulation that ``make`` gives for it, and sum up."""
    start = time.perf_counter()
    records, hashes, modules, personal = [], [], [], []
    for part in parse(config.method).parts:
        if part.advice(config.rounds):
            warnings.warn(part.advice(config.rounds), stacklevel=3)
    how = plan.choose(config, make, device, folder)
    for seed in config.seeds:
        sim = make(seed, how)
        fed = sim.federation
        if folder is not None and fed.partition is not None:
            fed.partition.save(folder.seed(seed) / PARTITION)
        records.append(train(sim, config, seed, folder, watch))
        hashes.append(fed.partition.hash if fed.partition is not None else "")
        modules.append(sim.module())
        if folder is not None:
            folder.save_model(seed, modules[-1])
        if config.personal:
            own, model = sim.personal(), sim.bound.model
            personal.append([model.module(take(own, k)) for k in range(fed.num_clients)])
    task = sim.federation.task
    result = Result(
        config=config,
        records=records,
        metric=task.metric,
        higher_is_better=task.higher_is_better,
        partition_hash=hashes,
        engine=how.engine,
        device=environment(how, device)["device"],
        seconds=time.perf_counter() - start,
        models=modules,
        personal=personal,
        folder=folder.path if folder else None,
    )
    if folder is not None:
        folder.write("result.json", result.to_json().encode())
        folder.log(f"complete: {task.metric} {result.last}")
    return result


def train(
    sim: Simulation, config: Config, seed: int, folder: Folder | None, watch: Watch | None
) -> list[dict[str, Any]]:
    """Train one seed to the end, from its checkpoint if there is one."""
    records: list[dict[str, Any]] = []
    state = folder.load(seed) if folder else None
    if folder and state:
        sim.load_state(state)
        records = folder.records(seed, sim.round)
        folder.log(f"seed {seed}: resumed after round {sim.round}")
    elif folder:
        folder.seed(seed)
        folder.records(seed, 0)
        folder.log(f"seed {seed}: started")
    saver = _Saver(folder, seed)
    with _patient_interrupt() as interrupted:
        while sim.round < config.rounds:
            begin = time.perf_counter()
            totals = sim.run_round()
            if sim.round == config.rounds:
                sim.finish()
            record = measure(sim, config, totals)
            record["seconds"] = time.perf_counter() - begin
            records.append(record)
            if folder:
                folder.record(seed, record)
            if watch:
                watch(seed, record)
            done = sim.round == config.rounds
            saver.save(sim, force=done or interrupted.is_set())
            if interrupted.is_set() and not done:
                how = f"Go on with: --out {folder.path} --resume" if folder else "It was not saved"
                raise Interrupted(f"stopped after round {sim.round} of seed {seed}. {how}")
    return records


def measure(sim: Simulation, config: Config, totals: Totals) -> dict[str, Any]:
    """What is reported of a round."""
    weight = totals["weight"]
    mean = {n: d / weight for n, d in totals["mean_delta"].params.items()}
    spread = float(totals["sq_norm"] / weight - sq_norm(mean)) if mean else 0.0
    record: dict[str, Any] = {
        "round": sim.round,
        "train_loss": float(totals["terms"]["task"].mean()),
        "divergence": max(0.0, spread) ** 0.5,
        "mb_up": totals["up_bytes"] / 1e6,
        "mb_down": totals["down_bytes"] / 1e6,
    }
    if sim.round % config.eval_every and sim.round != config.rounds:
        return record
    fed, metric = sim.federation, sim.federation.task.metric
    report, record["per_class"] = sim.evaluate_all()
    record |= report
    if fed.held:
        for name in ("client", *(("personal",) if config.personal else ())):
            values = [r.get(metric) for r in sim.evaluate_clients(personal=name == "personal")]
            there = [v for v in values if v is not None]
            worst = min(there) if fed.task.higher_is_better else max(there)
            record |= {
                f"per_{name}": values,
                f"{name}_mean": sum(there) / len(there),
                f"{name}_worst": worst,
            }
    return record


def simulation(
    config: Config, dataset: Dataset, seed: int, device: torch.device, how: How
) -> Simulation:
    """The simulation of one seed: its partition, cohorts and first weights depend on it alone."""
    silos = dataset.groups is not None
    partition: str | Partition = config.partition
    if config.partition == "auto":
        partition = "silos" if silos else "dirichlet(0.1)" if _has_classes(dataset) else "iid"
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
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = build(text, dataset.shape, dataset.outputs)
    return assemble(config, federation, module, seed, how)


def assemble(
    config: Config, federation: Federation, module: nn.Module | Model, seed: int, how: How
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
        engine=how,
        seed=seed,
    )


def auto_model(dataset: Dataset) -> str:
    """A model that fits: a small CNN for images of 28 pixels and more, an MLP for the rest."""
    if not dataset.is_image or min(dataset.shape[1:]) < 28:
        return "mlp(hidden=[64])"
    return "fedcog_cnn" if dataset.shape[1:] in ((28, 28), (32, 32)) else "lenet5(norm=gn)"


def _has_classes(dataset: Dataset) -> bool:
    return dataset.task == "classification"


class _Saver:
    """Checkpoints after a round, unless they would take too much of the time."""

    def __init__(self, folder: Folder | None, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.last, self.cost = float("-inf"), 0.0

    def save(self, sim: Simulation, force: bool) -> None:
        now = time.perf_counter()
        if self.folder is None or not (force or self.cost < SAVE_SHARE * (now - self.last)):
            return
        self.folder.save(self.seed, sim.state())
        self.last = time.perf_counter()
        self.cost = self.last - now


@contextmanager
def _patient_interrupt() -> Iterator[threading.Event]:
    """The first Ctrl-C asks to stop after the round, the second stops at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    signal.signal(signal.SIGINT, ask)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


def compare(
    methods: Sequence[str],
    configs: Sequence[Config],
    out: str | Path | None = None,
    resume: bool = False,
    watch: Callable[[str, int, dict[str, Any]], None] | None = None,
) -> list[Result]:
    """Run several methods on the same partitions, cohorts and first weights."""
    dataset = load(configs[0].data)
    results = []
    for method, config in zip(methods, configs, strict=True):
        path = None if out is None else Path(out) / slug(method)
        again = resume and path is not None and (path / "config.toml").exists()
        seen = None if watch is None else (lambda s, r, m=method: watch(m, s, r))
        results.append(run(config, path, again, seen, dataset))
    return results


def slug(text: str) -> str:
    """A method's name for a folder."""
    return "".join(c if c.isalnum() or c in ".-" else "_" for c in text).strip("_")
