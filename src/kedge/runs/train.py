"""Train: the one entry for a run, a comparison, a sweep and the rows of a paper's table.

Each of them is a list of jobs. Jobs that may be computed together train in lockstep, with their
seeds as lanes of one stack where the engine batches clients; the others train one after the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import nn

from kedge.core.method import parse
from kedge.core.task import Task
from kedge.core.tree import take
from kedge.data.datasets import Dataset, load
from kedge.data.partition import Partition
from kedge.engines import Execution, engines
from kedge.engines.device import precise, resolve_device, restored_threads
from kedge.engines.lane_bound import static
from kedge.errors import DataError, KedgeError, OutOfMemory
from kedge.files import check_links, finite
from kedge.history.compare import setting_name
from kedge.history.experiment import KEYS, Experiment, settings_row
from kedge.history.folder import (
    BEST_MODEL,
    BEST_PERSONAL,
    CHECKPOINT,
    CONFIG,
    PARTITION,
    RESULT,
    SCORES,
    clear_stop,
    new_path,
)
from kedge.history.read import save_clients
from kedge.history.run import like_with_like
from kedge.limits import is_out_of_memory, out_of_memory
from kedge.loading import load_options
from kedge.runs.build import simulation, split_of, with_personal
from kedge.runs.checkpoint import TrainingFolder
from kedge.runs.clients import clients_of
from kedge.runs.grid import Setting
from kedge.runs.measure import headline_of
from kedge.runs.planning import PLANNING, Make, SeedJob, choose
from kedge.runs.result import Result
from kedge.runs.rounds import MAX_SAVE_SHARE, OWN, SeedRun, SeedWatch, train_rounds
from kedge.saved.bundle import Inputs, personal_state, save_bundle, save_personal, save_weights
from kedge.saved.scores import final_scores
from kedge.settings import Config
from kedge.sim.clients import share, unlike
from kedge.sim.simulation import Simulation
from kedge.tuning.plan import Plan

POOLED = "pooled data"
#: Settings in which the simulations of one stack may differ.
MAY_DIFFER = {
    "lr", "momentum", "weight_decay", "clip", "schedule", "epochs", "steps", "replacement",
    "weighting", "per_round", "sampler", "partition", "split", "eval_every", "target", "angles",
    "personal", "validation", "patience",
}  # fmt: skip
#: Settings that no error of a simulation depends on.
NUMBERS = ("lr", "momentum", "weight_decay", "clip", "schedule", "rounds", "eval_every", "target")
DEFAULT: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Config)}
MAX_FOLDER_NAME = 80  # characters of a setting


class Observer(Protocol):
    """Is told of one run: its start, every round of every seed, its end. Loggers are observers."""

    def start(self, config: Config, folder: Path | None) -> None:
        """The run begins; its folder is None if it is not saved."""

    def log(self, seed: int, record: dict[str, Any]) -> None:
        """A round has ended."""

    def end(self, result: Result | None) -> None:
        """The run has ended; None if it was interrupted or failed."""


@dataclass
class TrainingJob:
    """One run: what is trained, and where it is saved.

    Attributes:
        name: of the run in tables: its method, its yardstick or its setting.
        config: the settings.
        folder: None saves nothing.
        yardstick: train on the pooled data of all clients instead; the name of the result.
        values: of the settings that a sweep varies.
        make: builds the simulation of a seed; None: from the settings.
        result: once it is trained.
    """

    name: str
    config: Config
    folder: TrainingFolder | None = None
    yardstick: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    make: Make | None = None
    result: Result | None = None

    @property
    def words(self) -> str:
        """The setting of a sweep as it is typed: ``lr=0.1 fedprox.mu=0.01``."""
        return " ".join(setting_name({key: value}) for key, value in self.values.items())


#: Called after every round; if it returns True, the training stops, saved.
Watch = Callable[[TrainingJob, int, dict[str, Any]], bool | None]
Observe = Callable[[], Observer]  # one observer per run


class Options(NamedTuple):
    """How jobs are trained.

    Attributes:
        watch: called as ``watch(job, seed, record)`` after every round.
        report: called with each line of the plans.
        observe: makes the observer of each run, such as its loggers.
        execution: of new runs; None measures which is fastest.
        strict: raise if a loss is not finite; otherwise only that seed ends.
        together: whether jobs may train together.
        save_share: of the time, spent on checkpoints at most.
        hint: printed on interrupt: how to resume; empty: the folder of the first job says it.
    """

    watch: Watch | None = None
    report: Callable[[str], None] | None = None
    observe: Observe | None = None
    execution: Execution | None = None
    strict: bool = True
    together: bool = False
    save_share: float = MAX_SAVE_SHARE
    hint: str = ""


PLAIN = Options()


class TrainedRuns(NamedTuple):
    """The results of several jobs, and a line of text that says how they were computed."""

    results: list[Result]
    computed: str
    folder: Path | None = None


class SeedResult(NamedTuple):
    """What is kept of a seed after its last round; ``failed`` is the reason if it ended early."""

    records: list[dict[str, Any]]
    partition_hash: str
    task: Task
    module: nn.Module
    personal: list[nn.Module]
    failed: str
    best: nn.Module | None = None  # of the best round on validation data


# -- what is trained ------------------------------------------------------------------------------


def run(
    config: Config,
    out: str | Path | None = None,
    resume: bool = False,
    options: Options = PLAIN,
    dataset: Dataset | None = None,
    numbered: bool = False,
    make: Make | None = None,
) -> Result:
    """Run all seeds of a configuration.

    Args:
        config: the settings.
        out: folder for the run; None saves nothing.
        resume: continue the run in ``out``.
        options: how it is trained.
        dataset: the data, if they are loaded already.
        numbered: whether ``out`` is from :func:`~kedge.history.folder.new_path`.
        make: builds the simulation of a seed; None: from the settings.

    Raises:
        KedgeError: the settings do not fit the data, the device or the folder.
        Interrupted: the user pressed Ctrl-C, or ``watch`` requested a stop; the checkpoint is
            saved.
    """
    [config] = with_personal([config])
    folder = None
    if out is not None and resume:
        folder = TrainingFolder.resume(out, config)[0]
    elif out is not None:
        folder = TrainingFolder.create(out, config, numbered)
    job = TrainingJob(config.method, config, folder, make=make)
    datasets = {config.data: dataset} if dataset is not None or make else {}
    train([job], options, datasets)
    assert job.result is not None
    return job.result


def method_jobs(configs: Sequence[Config], pooled: bool = False) -> list[TrainingJob]:
    """One job per method; with ``pooled``, also one that trains on the pooled data.

    The pooled data are those of all clients that train, with the same initial weights, optimiser
    and tests. A round takes as many samples as the clients of a round take together. If one method
    is personal, all are tested client by client, and a yardstick on the same samples.
    """
    configs = with_personal(configs)
    jobs = [TrainingJob(config.method, config) for config in configs]
    if pooled:
        split = split_of(configs[0], load(configs[0].data))
        plain = dataclasses.replace(configs[0], method="fedavg", split=split, personal=False)
        jobs.append(TrainingJob(POOLED, plain, yardstick=POOLED))
    return jobs


def setting_jobs(settings: Sequence[Setting]) -> list[TrainingJob]:
    """One job per setting of a sweep."""
    configs = with_personal([setting.config for setting in settings])
    pairs = zip(settings, configs, strict=True)
    return [TrainingJob(setting_name(s.values), c, values=s.values) for s, c in pairs]


def experiment(
    kind: str,
    jobs: Sequence[TrainingJob],
    out: str | Path | None = None,
    resume: bool = False,
    options: Options = PLAIN,
    numbered: bool = False,
) -> TrainedRuns:
    """Train a comparison or a sweep, with one subfolder per job.

    In a sweep, jobs that differ only in numbers train together, and a loss that is not finite ends
    its own run only.

    Args:
        kind: ``compare`` or ``sweep``.
        jobs: see :func:`method_jobs` and :func:`setting_jobs`.
        out: the folder; None saves nothing.
        resume: continue the runs in ``out``; those that are missing are started.
        options: how they are trained.
        numbered: whether ``out`` is from :func:`~kedge.history.folder.new_path`.

    Raises:
        KedgeError: a job does not fit the data, the device or its folder.
        Interrupted: the user pressed Ctrl-C; the message says how to resume.
    """
    is_sweep = kind == "sweep"
    datasets: dict[str, Dataset | None] = {}
    options = options._replace(strict=not is_sweep, together=is_sweep)
    if out is None:
        _check(jobs, datasets)
        lines = train(jobs, options, datasets)
        return TrainedRuns(_results(jobs), lines)
    first = jobs[0].config
    renumber = (lambda: new_path(first, Path(out).parent, kind)) if numbered else None
    listing = Experiment(out, kind, renumber)
    if resume:
        check_links(listing.root)
    else:
        listing.check_free()
    known = listing.read() if resume and (is_sweep or listing.path.exists()) else []
    names = _folder_names(jobs, MAX_FOLDER_NAME if is_sweep else None)
    for job, name in zip(jobs, names, strict=True):
        path = listing.root / name
        if resume and (path / CONFIG).exists():
            job.folder = TrainingFolder.resume(path, job.config)[0]
        else:
            job.folder = TrainingFolder.create(path, job.config)
    _check(jobs, datasets)
    rows = [row for row in known if row["folder"] not in names and not is_sweep]
    for job, name in zip(jobs, names, strict=True):
        keys = {"name": job.name, "yardstick": job.yardstick, "values": job.values}
        shown = {key: keys[key] for key in KEYS[kind]}
        rows.append({"folder": name} | shown | settings_row(job.config))
    listing.write(rows, resume)
    for job in jobs:  # another process may have been faster: then the folder has another number
        assert job.folder is not None
        job.folder.path = listing.root / job.folder.path.name
    with listing.given_back():
        lines = train(jobs, options._replace(hint=resume_hint(listing.root)), datasets)
    return TrainedRuns(_results(jobs), lines, listing.root)


def saved_jobs(kind: str, out: str | Path) -> list[TrainingJob]:
    """The jobs of the experiment in a folder.

    Raises:
        KedgeError: the folder holds no such experiment, or its files are damaged.
    """
    listing = Experiment(out, kind)
    return [
        TrainingJob(
            row.get("name") or setting_name(row["values"]),
            listing.config(row),
            yardstick=row.get("yardstick", ""),
            values=row.get("values", {}),
        )
        for row in listing.read()
    ]


def _results(jobs: Sequence[TrainingJob]) -> list[Result]:
    return like_with_like([job.result for job in jobs if job.result is not None])


def _folder_names(jobs: Sequence[TrainingJob], length: int | None) -> list[str]:
    """Names of the subfolders; they stay as they were named by kedge 0.1."""
    names: list[str] = []
    for job in jobs:
        name = slug(job.words or job.name)[:length]
        taken = sum(other.split("~")[0] == name for other in names)
        names.append(f"{name}~{taken + 1}" if taken else name)
    return names


def slug(text: str) -> str:
    """A name for a folder, from a method or a setting.

    >>> slug("fedprox(mu=0.1)")
    'fedprox_mu_0.1'
    """
    return "".join(c if c.isalnum() or c in ".-" else "_" for c in text).strip("_")


def _check(jobs: Sequence[TrainingJob], datasets: dict[str, Dataset | None]) -> None:
    """Load all data, and build every job that is not started, before the first one trains: so a
    mistake shows at once."""
    built = set()
    for job in jobs:
        config = job.config
        if config.data not in datasets:
            datasets[config.data] = load(config.data)
        numbers = {key: DEFAULT[key] for key in NUMBERS}
        kind = repr((dataclasses.replace(config, **numbers), job.yardstick))
        if kind in built or (job.folder is not None and job.folder.has_environment):
            continue
        built.add(kind)
        _make(job, datasets)(config.seeds[0], PLANNING)


def _make(job: TrainingJob, datasets: dict[str, Dataset | None]) -> Make:
    """What builds the simulations of a job; an error names the setting of a sweep."""
    if job.make is not None:
        return job.make
    config = job.config
    if config.data not in datasets:
        datasets[config.data] = load(config.data)
    dataset, device = datasets[config.data], resolve_device(config.device)
    assert dataset is not None

    def make(seed: int, execution: Execution) -> Simulation:
        try:
            pooled = bool(job.yardstick)
            return simulation(config, dataset, seed, device, execution, pooled=pooled)
        except KedgeError as error:
            if job.values:
                error.args = (f"{job.words}: {error}",)
            raise

    return make


# -- training -------------------------------------------------------------------------------------


def train(
    jobs: Sequence[TrainingJob],
    options: Options,
    datasets: dict[str, Dataset | None] | None = None,
) -> str:
    """Train all jobs; each has its result then. Returns a line on how they were computed."""
    datasets = {} if datasets is None else datasets
    advise([job.config for job in jobs])
    lanes: list[int] = []
    sequential: list[str] = []  # engines that trained one run at a time
    for group in _groups(jobs) if options.together else [[job] for job in jobs]:
        first = group[0].config
        with (
            precise(first.precision, resolve_device(first.device)),
            restored_threads(),
            given_back(job.folder for job in group),
            memory_errors(first),
        ):
            engine, stacks = _train_group(group, options, datasets)
        if engines[engine].batches_clients:
            lanes += stacks
        else:
            sequential.append(engine)
    return count(jobs) + _in_words(lanes, sequential)


def _train_group(
    group: Sequence[TrainingJob], options: Options, datasets: dict[str, Dataset | None]
) -> tuple[str, list[int]]:
    """Train jobs together; returns the engine, and the number of lanes of each stack."""
    seeds = [
        (job, SeedJob(job.config, seed, make, job.folder))
        for job in group
        for make in [_make(job, datasets)]
        for seed in job.config.seeds
    ]
    dataset = datasets.get(group[0].config.data)
    planned = choose([one for _, one in seeds], dataset, options.execution)
    if options.report is not None:
        for line in planned.lines():
            options.report(line)
    if not options.hint:
        folder = group[0].folder
        hint = "It was not saved" if folder is None else resume_hint(folder.path)
        options = options._replace(hint=hint)
    with _observed(group, options) as watches:
        ended, stacks = _train_seeds(
            [(one, watches[id(job)]) for job, one in seeds], planned.execution, options
        )
        for job in group:
            own, ended = ended[: len(job.config.seeds)], ended[len(job.config.seeds) :]
            job.result = _result(job, own, planned)
    return planned.execution.engine, stacks


@contextmanager
def _observed(group: Sequence[TrainingJob], options: Options) -> Iterator[dict[int, SeedWatch]]:
    """Follow the jobs of a group; an observer is told of the end, whatever happens."""

    def tell(
        job: TrainingJob, observer: Observer | None, seed: int, record: dict[str, Any]
    ) -> bool | None:
        if observer is not None:
            observer.log(seed, record)
        return options.watch(job, seed, record) if options.watch is not None else None

    with contextlib.ExitStack() as stack:
        watches: dict[int, SeedWatch] = {}
        for job in group:
            observer = options.observe() if options.observe is not None else None
            if observer is not None:
                observer.start(job.config, job.folder.path if job.folder else None)
                stack.callback(_end, observer, job)
            watches[id(job)] = partial(tell, job, observer)
        yield watches


def _end(observer: Observer, job: TrainingJob) -> None:
    observer.end(job.result)


def _groups(jobs: Sequence[TrainingJob]) -> list[list[TrainingJob]]:
    """Jobs that may train together: they agree in all that must be equal."""
    found: dict[str, list[TrainingJob]] = {}
    for job in jobs:
        config = job.config
        same = {k: v for k, v in vars(config).items() if k not in (*MAY_DIFFER, "seeds")}
        same["seeds"] = len(config.seeds)
        same["method"] = [(part.name, static(part)) for part in parse(config.method).parts]
        # terms with a factor of 0 are left out of the computation
        same["used"] = [bool(getattr(config, k)) for k in ("momentum", "weight_decay", "clip")]
        # complete runs need no lanes
        same["complete"] = job.folder is not None and (job.folder.path / RESULT).exists()
        found.setdefault(repr(same), []).append(job)
    return list(found.values())


def _train_seeds(
    jobs: Sequence[tuple[SeedJob, SeedWatch]],
    execution: Execution,
    options: Options,
) -> tuple[list[SeedResult], list[int]]:
    """Train seeds. Neighbours that are similar train together if the engine batches clients.

    Returns:
        What is kept of each seed, and the number of lanes of each stack that was trained.
    """
    results: list[SeedResult] = []
    stacks: list[int] = []
    members: list[SeedRun] = []

    def train_members() -> None:
        stacks.extend(train_rounds(members, options.hint, options.strict, options.save_share))
        results.extend(map(_ended, members))
        members.clear()  # simulations are free before the next ones are built

    for job, watch in jobs:
        if members and _is_full(members, execution):
            train_members()
        member = _member(job, execution, watch)
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


def _member(job: SeedJob, execution: Execution, watch: SeedWatch) -> SeedRun:
    sim, folder = job.make(job.seed, execution), job.folder
    partition = sim.federation.partition
    if folder is not None and partition is not None:
        _check_partition(folder, job.seed, partition)
        folder.seed(job.seed)
        folder.write(f"seed-{job.seed}/{PARTITION}", partition.to_json().encode())
    if folder is not None:
        if len(sim.federation.client_names) == len(sim.federation.sizes):  # not pooled
            save_clients(folder, job.seed, clients_of(sim.federation))
        inputs = Inputs.of(sim.federation)
        save_bundle(folder, job.config, inputs, sim.task, sim.bound.model)
    return SeedRun(job.config, job.seed, sim, folder, watch)


def _check_partition(folder: TrainingFolder, seed: int, partition: Partition) -> None:
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


def _ended(member: SeedRun) -> SeedResult:
    """Take what is kept of a seed, and write its models if it did not fail."""
    sim, folder, best = member.sim, member.folder, None
    module = sim.module()
    own = {n.removeprefix(OWN): v for n, v in member.best.items() if n.startswith(OWN)}
    if member.best:
        best = sim.module()
        best.load_state_dict({n: v for n, v in member.best.items() if not n.startswith(OWN)})
    stacked = sim.personal() if member.config.personal else None
    if folder is not None and not member.failed:
        inputs = Inputs.of(sim.federation)
        save_weights(folder, member.seed, module, inputs)
        scores = json.dumps(finite(final_scores(sim, member.config.personal)))
        folder.write(f"seed-{member.seed}/{SCORES}", scores.encode())
        if best is not None:
            save_weights(folder, member.seed, best, inputs, BEST_MODEL)
        if own:
            save_personal(folder, member.seed, own, sim, BEST_PERSONAL)
        if stacked is not None and sim.has_personal_models:
            save_personal(folder, member.seed, personal_state(stacked, sim), sim)
        folder.save_state(member.seed, "stopped early" if member.stopped else "complete")
    clients = range(sim.federation.num_clients) if stacked is not None else ()
    personal = [sim.bound.model.module(take(stacked, k)) for k in clients]
    partition = sim.federation.partition
    return SeedResult(
        member.records,
        partition.hash if partition is not None else "",
        sim.federation.task,
        module,
        personal,
        member.failed,
        best,
    )


def _result(job: TrainingJob, seeds: Sequence[SeedResult], planned: Plan) -> Result:
    """Combine the seeds of a job, and write ``result.json`` if all are complete.

    Its time is the sum of its rounds', so that it is the same after a run is resumed.
    """
    records = [seed.records for seed in seeds]
    result = Result.of(
        job.config,
        records,
        seeds[0].task,
        headline_of(job.config, records),
        [seed.partition_hash for seed in seeds],
        [seed.failed for seed in seeds],
        name=job.name,
        yardstick=job.yardstick,
        values=job.values,
        engine=planned.execution.engine,
        device=planned.device,
        models=[seed.module for seed in seeds],
        personal=[seed.personal for seed in seeds] if job.config.personal else [],
        best_models=[seed.best for seed in seeds if seed.best is not None],
        folder=job.folder.path if job.folder else None,
    )
    if job.folder is not None and not any(seed.failed for seed in seeds):
        job.folder.write(RESULT, result.to_json().encode())
        job.folder.log(f"complete: {result.metric} {result.written(result.last)}")
    return result


@contextmanager
def given_back(folders: Iterable[TrainingFolder | None]) -> Iterator[None]:
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
                    folder.end(error)
            if isinstance(error, (KeyboardInterrupt, KedgeError)):
                folder.release()
        raise
    finally:
        for folder in given:
            if folder.is_claimed:
                clear_stop(folder.path)
            folder.lock.give_back()


@contextmanager
def memory_errors(config: Config) -> Iterator[None]:
    """Turn errors that mean out of memory into an :class:`OutOfMemory` for these settings."""
    try:
        yield
    except OutOfMemory:
        raise
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        doing = f"training {config.method} on {config.data}"
        lower = (
            f"Lower --chunk (clients at once) or --batch (now {config.batch}), keep client state "
            "elsewhere (--state file), or choose a smaller --model"
        )
        raise out_of_memory(error, doing, lower) from error


def resume_hint(out: str | Path) -> str:
    """What to type to continue an interrupted run in the folder ``out``."""
    return f"Resume with: --out {out} --resume{load_options()}"


def advise(configs: Sequence[Config]) -> None:
    """Warn once of each piece of advice that parts have for the number of rounds."""
    texts = [part.advice(c.rounds) for c in configs for part in parse(c.method).parts]
    for text in dict.fromkeys(text for text in texts if text):
        warnings.warn(text, stacklevel=2)


def count(jobs: Sequence[TrainingJob]) -> str:
    """The size of a sweep as text: ``6 settings x 3 seeds``."""
    numbers = {"setting": len(jobs), "seed": len(jobs[0].config.seeds)}
    return " x ".join(f"{n} {word}{'s' if n > 1 else ''}" for word, n in numbers.items())


def _in_words(lanes: Sequence[int], sequential: Sequence[str]) -> str:
    """How the runs were grouped. ``sequential`` names the engines that trained one at a time.

    >>> _in_words([40, 40, 20], ["loop"])
    ' in 2 stacks of 40 lanes and 1 of 20, the rest one after the other (engine loop)'
    """
    stacks = [f"{n} of {size}" for size, n in Counter(lanes).items()]
    rest = f"one after the other (engine {', '.join(dict.fromkeys(sequential))})"
    if not stacks:
        return f", {rest}" if sequential else ", all of them complete before"
    word = "stack" if stacks[0].startswith("1 ") else "stacks"
    first = stacks[0].replace(" ", f" {word} ", 1) + " lanes"
    text = " in " + " and ".join([first, *stacks[1:]])
    return f"{text}, the rest {rest}" if sequential else text
