"""The seeds of a run: build their simulations, train similar ones together, collect the results."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from kedge.core.task import Task
from kedge.core.tree import take
from kedge.data.partition import Partition
from kedge.engines import Execution, engines
from kedge.errors import KedgeError
from kedge.runs.bundle import Inputs, personal_state, save_bundle, save_personal, save_weights
from kedge.runs.clients import save_clients
from kedge.runs.config import Config
from kedge.runs.folder import BEST_MODEL, BEST_PERSONAL, CHECKPOINT, PARTITION, SCORES, Folder
from kedge.runs.result import plain
from kedge.runs.rounds import MAX_SAVE_SHARE, OWN, SeedRun, Watch, train
from kedge.runs.scores import final_scores
from kedge.sim.clients import share, unlike
from kedge.sim.simulation import Simulation

Make = Callable[[int, Execution], Simulation]  # (seed, execution) -> the simulation of that seed


class SeedJob(NamedTuple):
    """One seed of a run, before its simulation is built."""

    config: Config
    seed: int
    make: Make
    folder: Folder | None
    watch: Watch | None


class SeedResult(NamedTuple):
    """One seed of a run, after its last round. ``failed`` is the reason if it ended early."""

    records: list[dict[str, Any]]
    partition_hash: str
    task: Task
    module: nn.Module
    personal: list[nn.Module]
    failed: str
    best: nn.Module | None = None  # of the best round on validation data


def train_seeds(
    jobs: Sequence[SeedJob],
    execution: Execution,
    hint: str,
    strict: bool = True,
    save_share: float = MAX_SAVE_SHARE,
) -> tuple[list[SeedResult], list[int]]:
    """Train all jobs. Neighbours that are similar train together if the engine batches clients.

    Args:
        jobs: the seeds, in the order of the results.
        execution: how all of them are computed.
        hint: printed on interrupt, see :func:`kedge.runs.rounds.train`.
        strict: raise if a loss is not finite; otherwise only that seed ends.
        save_share: of the time, spent on checkpoints at most.

    Returns:
        One result per job, and the number of lanes of each stack that was trained.
    """
    results: list[SeedResult] = []
    stacks: list[int] = []
    members: list[SeedRun] = []

    def train_members() -> None:
        stacks.extend(train(members, hint, strict, save_share))
        results.extend(_result(member) for member in members)
        members.clear()

    for job in jobs:
        if members and _is_full(members, execution):
            train_members()
        member = _member(job, execution)
        if members and (
            member.config.rounds != members[0].config.rounds
            or unlike(members[0].sim.clients, member.sim.clients)
        ):
            train_members()
        if members:  # one copy of the data is enough
            share(members[0].sim.federation, member.sim.federation)
        members.append(member)
    train_members()
    return results, stacks


def _is_full(members: Sequence[SeedRun], execution: Execution) -> bool:
    """Whether one more simulation like the first does not fit into the stack."""
    lanes = (
        sum(member.sim.session.cohort_size for member in members)
        + members[0].sim.session.cohort_size
    )
    one_by_one = not engines[execution.engine].batches_clients
    return one_by_one or 0 < execution.chunk < lanes


def _member(job: SeedJob, execution: Execution) -> SeedRun:
    sim = job.make(job.seed, execution)
    partition = sim.federation.partition
    if job.folder is not None and partition is not None:
        _check_partition(job.folder, job.seed, partition)
        job.folder.seed(job.seed)
        job.folder.write(f"seed-{job.seed}/{PARTITION}", partition.to_json().encode())
    if job.folder is not None:
        save_clients(job.folder, job.seed, sim.federation)
        inputs = Inputs.of(sim.federation)
        save_bundle(job.folder, job.config, inputs, sim.task, sim.bound.model)
    return SeedRun(job.config, job.seed, sim, job.folder, job.watch)


def _check_partition(folder: Folder, seed: int, partition: Partition) -> None:
    """Raise a KedgeError if the rounds of a seed so far were trained with another partition."""
    path = folder.path / f"seed-{seed}" / PARTITION
    if not path.exists() or not path.with_name(CHECKPOINT).exists():
        return
    before = Partition.load(path).hash
    if before != partition.hash:
        raise KedgeError(
            f"the partition of seed {seed} has changed since {folder.path} was started (hash "
            f"{before}, now {partition.hash}): one curve would come from two partitions. Restore "
            "the data and the file of the partition, or start a new run with another --out"
        )


def _result(member: SeedRun) -> SeedResult:
    sim, personal = member.sim, []
    federation, module = sim.federation, sim.module()
    best = None
    own = {n.removeprefix(OWN): v for n, v in member.best.items() if n.startswith(OWN)}
    if member.best:
        best = sim.module()
        best.load_state_dict({n: v for n, v in member.best.items() if not n.startswith(OWN)})
    if member.folder is not None and not member.failed:
        save_weights(member.folder, member.seed, module, sim)
        scores = json.dumps(plain(final_scores(sim, member.config.personal)))
        member.folder.write(f"seed-{member.seed}/{SCORES}", scores.encode())
        if best is not None:
            save_weights(member.folder, member.seed, best, sim, BEST_MODEL)
        if own:
            save_personal(member.folder, member.seed, own, sim, BEST_PERSONAL)
    if member.config.personal:
        stacked = sim.personal()
        if member.folder is not None and not member.failed and sim.has_personal_models:
            save_personal(member.folder, member.seed, personal_state(stacked, sim), sim)
        clients = range(federation.num_clients)
        personal = [sim.bound.model.module(take(stacked, k)) for k in clients]
    partition_hash = federation.partition.hash if federation.partition is not None else ""
    return SeedResult(
        member.records, partition_hash, federation.task, module, personal, member.failed, best
    )
