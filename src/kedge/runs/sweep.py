"""Run a grid of settings, as many together as possible.

Settings that differ only in numbers, in the partition or in the amount of local work train as lanes
of one stack, together with their seeds. Other settings train in groups, one after the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kedge.core.method import parse
from kedge.core.task import Task
from kedge.data.datasets import Dataset, load
from kedge.engines import Execution, engines
from kedge.engines.device import precise, resolve_device, restored_threads
from kedge.engines.lane_bound import static
from kedge.errors import KedgeError
from kedge.files import check_links
from kedge.runs import rounds
from kedge.runs.config import Config
from kedge.runs.environment import CONFIG
from kedge.runs.folder import Folder, new_path
from kedge.runs.grid import Setting
from kedge.runs.headline import like_with_like, with_personal
from kedge.runs.listing import Listing, settings_row
from kedge.runs.memory import memory_errors
from kedge.runs.observing import Followed, Observe, followed
from kedge.runs.planning import PLANNING
from kedge.runs.result import COLUMNS, Result, plain
from kedge.runs.runner import (
    Report,
    advise,
    given_back,
    result_of,
    resume_hint,
    simulation,
    slug,
)
from kedge.runs.seeds import SeedJob, SeedResult, train_seeds
from kedge.runs.together import plan_together
from kedge.runs.validation import data_of_choice, leader, on_validation
from kedge.sim.simulation import Simulation
from kedge.tuning.plan import Plan

Watch = Callable[[Config, int, dict[str, Any], str], bool | None]  # (config, seed, record, name)
LISTING = "sweep.json"
#: Settings in which the simulations of one stack may differ.
MAY_DIFFER = {
    "lr", "momentum", "weight_decay", "clip", "schedule", "epochs", "steps", "replacement",
    "weighting", "per_round", "sampler", "partition", "split", "eval_every", "target", "angles",
    "personal", "validation", "patience",
}  # fmt: skip
#: Settings that no error of a simulation depends on.
NUMBERS = ("lr", "momentum", "weight_decay", "clip", "schedule", "rounds", "eval_every", "target")
DEFAULT: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Config)}


class SweepResult(NamedTuple):
    """One result per setting, and a line of text that says how they were computed."""

    settings: list[Setting]
    results: list[Result]
    computed: str
    folder: Path | None = None

    def choice(self) -> str:
        """The best setting, and on which data it was chosen."""
        best = leader(self.results)
        name = self.settings[self.results.index(best)].name
        return f"{name}: {data_of_choice(self.results)}"

    def to_dict(self) -> dict[str, Any]:
        """The results as plain data, as ``--json`` prints them; numbers not finite are None."""
        rows = [
            {"setting": setting.values} | result.to_dict()
            for setting, result in zip(self.settings, self.results, strict=True)
        ]
        best = self.results.index(leader(self.results))
        return {
            "computed": self.computed,
            "best": self.settings[best].values,
            "chosen_on": "validation data" if on_validation(self.results) else "test data",
            "results": plain(rows),
        }


def sweep(
    settings: Sequence[Setting],
    out: str | Path | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    report: Report | None = None,
    numbered: bool = False,
    execution: Execution | None = None,
    observe: Observe | None = None,
) -> SweepResult:
    """Run all settings. If a loss is not finite, only that run ends, with NaN as its metric.

    Args:
        settings: the combinations, see :func:`kedge.runs.grid.combine`.
        out: folder with one subfolder per setting; None saves nothing.
        resume: continue the sweep in ``out``.
        watch: called as ``watch(config, seed, record, name)`` after every round.
        report: called with each line of the plans.
        numbered: whether ``out`` is from :func:`~kedge.runs.folder.new_path`.
        execution: of new runs; None measures which is fastest.
        observe: makes the observer of each run, such as its loggers.

    Raises:
        KedgeError: a setting does not fit the data, the device or its folder.
        Interrupted: the user pressed Ctrl-C; the message says how to resume.
    """
    configs = with_personal([setting.config for setting in settings])
    settings = [s._replace(config=c) for s, c in zip(settings, configs, strict=True)]
    listing = None if out is None else _listing(out, settings, numbered)
    folders = _folders(settings, listing, resume)
    advise([setting.config for setting in settings])
    datasets: dict[str, Dataset] = {}
    results: dict[int, Result] = {}
    lanes: list[int] = []
    sequential: list[str] = []  # engines that trained one run at a time
    _check(settings, folders, datasets)
    if listing is not None:
        _write(listing, settings, folders, resume)
    with contextlib.nullcontext() if listing is None else listing.given_back():
        for group in _groups(settings, folders):
            config = settings[group[0]].config
            dataset = datasets[config.data]
            with (
                precise(config.precision, resolve_device(config.device)),
                restored_threads(),
                given_back(*(folders[i] for i in group)),
                memory_errors(config),
                _followed([(settings[i], folders[i]) for i in group], observe, watch) as runs,
            ):
                jobs = [
                    job
                    for i, run in zip(group, runs, strict=True)
                    for job in _jobs(settings[i], dataset, folders[i], run.watch)
                ]
                planned = plan_together(jobs, dataset, execution)
                if report is not None:
                    for line in planned.lines():
                        report(line)
                hint = resume_hint(listing.root if listing else None)
                found, stacks = train_seeds(jobs, planned.execution, hint, strict=False)
                for i, run in zip(group, runs, strict=True):
                    seeds, found = found[: len(config.seeds)], found[len(config.seeds) :]
                    run.result = _result(settings[i].config, seeds, planned, folders[i])
                    results[i] = run.result
            if engines[planned.execution.engine].batches_clients:
                lanes += stacks
            else:
                sequential.append(planned.execution.engine)
    ordered = like_with_like([results[i] for i in range(len(settings))])
    computed = count(settings) + _in_words(lanes, sequential)
    return SweepResult(list(settings), ordered, computed, listing.root if listing else None)


def saved_settings(out: str | Path) -> list[Setting]:
    """The settings of the sweep in a folder.

    Raises:
        KedgeError: the folder holds no sweep.
    """
    listing = Listing(out, LISTING, "sweep")
    return [Setting(row["values"], listing.config(row)) for row in listing.read({"values": dict})]


def _listing(out: str | Path, settings: Sequence[Setting], numbered: bool) -> Listing:
    first = settings[0].config
    renumber = (lambda: new_path(first, Path(out).parent, "sweep")) if numbered else None
    return Listing(out, LISTING, "sweep", renumber)


def _folders(
    settings: Sequence[Setting], listing: Listing | None, resume: bool
) -> list[Folder | None]:
    """A folder for every setting, with the layout of ``kedge run``, or the one that exists."""
    if listing is None:
        return [None] * len(settings)
    if resume:
        check_links(listing.root)
        listing.read({"values": dict})
    else:
        listing.check_free()
    names: list[str] = []
    for setting in settings:
        name = slug(setting.name)[:80]
        taken = sum(other.split("~")[0] == name for other in names)
        names.append(f"{name}~{taken + 1}" if taken else name)
    folders: list[Folder | None] = []
    for name, setting in zip(names, settings, strict=True):
        path = listing.root / name
        started = resume and (path / CONFIG).exists()
        folders.append(
            Folder.resume(path, setting.config)[0]
            if started
            else Folder.create(path, setting.config)
        )
    return folders


def _write(
    listing: Listing,
    settings: Sequence[Setting],
    folders: Sequence[Folder | None],
    resume: bool,
) -> None:
    """Claim the folder of the sweep; another process may have been faster."""
    rows = [
        {"folder": folder.path.name, "values": setting.values} | settings_row(setting.config)
        for setting, folder in zip(settings, folders, strict=True)
        if folder is not None
    ]
    listing.write(rows, resume)
    for folder in folders:
        if folder is not None:
            folder.path = listing.root / folder.path.name


def _check(
    settings: Sequence[Setting],
    folders: Sequence[Folder | None],
    datasets: dict[str, Dataset],
) -> None:
    """Load all data, and build every setting that is not started, before the first one trains."""
    built = set()
    for setting, folder in zip(settings, folders, strict=True):
        config = setting.config
        if config.data not in datasets:
            datasets[config.data] = load(config.data)
        numbers = {key: DEFAULT[key] for key in NUMBERS}
        kind = repr(dataclasses.replace(config, **numbers))
        if kind in built or (folder is not None and folder.has_environment):
            continue
        built.add(kind)
        [job, *_] = _jobs(setting, datasets[config.data], folder, None)
        job.make(config.seeds[0], PLANNING)


def _groups(settings: Sequence[Setting], folders: Sequence[Folder | None]) -> list[list[int]]:
    """Indices of settings that may train together: they agree in all that must be equal."""
    found: dict[str, list[int]] = {}
    for i, (setting, folder) in enumerate(zip(settings, folders, strict=True)):
        config = setting.config
        same = {k: v for k, v in vars(config).items() if k not in MAY_DIFFER}
        same["method"] = [(part.name, static(part)) for part in parse(config.method).parts]
        # terms with a factor of 0 are left out of the computation
        same["used"] = [bool(getattr(config, k)) for k in ("momentum", "weight_decay", "clip")]
        # complete runs need no lanes
        same["complete"] = folder is not None and (folder.path / "result.json").exists()
        found.setdefault(repr(same), []).append(i)
    return list(found.values())


@contextlib.contextmanager
def _followed(
    runs: Sequence[tuple[Setting, Folder | None]], observe: Observe | None, watch: Watch | None
) -> Iterator[list[Followed]]:
    """Follow all runs of a group."""

    def watching(setting: Setting) -> rounds.Watch | None:
        if watch is None:
            return None
        return lambda seed, record: watch(setting.config, seed, record, setting.name)

    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                followed(observe, s.config, folder.path if folder else None, watching(s))
            )
            for s, folder in runs
        ]


def _jobs(
    setting: Setting, dataset: Dataset, folder: Folder | None, watch: rounds.Watch | None
) -> Iterator[SeedJob]:
    config = setting.config
    device = resolve_device(config.device)

    def make(seed: int, execution: Execution) -> Simulation:
        try:
            return simulation(config, dataset, seed, device, execution)
        except KedgeError as error:
            error.args = (f"{setting.name}: {error}",)
            raise

    for seed in config.seeds:
        yield SeedJob(config, seed, make, folder, watch)


def _result(
    config: Config, seeds: Sequence[SeedResult], planned: Plan, folder: Folder | None
) -> Result:
    padded = [
        one._replace(records=_padded(one.records, config, one.task)) if one.failed else one
        for one in seeds
    ]
    return result_of(config, padded, planned, folder)


def _padded(records: list[dict[str, Any]], config: Config, task: Task) -> list[dict[str, Any]]:
    """The records of a seed that ended early, with NaN for the rounds that it did not reach."""
    padded, nan = list(records), math.nan
    for number in range(len(records) + 1, config.rounds + 1):
        record: dict[str, Any] = {"round": number, "train_loss": nan, "divergence": nan}
        record |= {"mb_up": 0.0, "mb_down": 0.0, "seconds": 0.0}
        if number % config.eval_every == 0 or number == config.rounds:
            record |= {metric.name: nan for metric in task.metrics} | {"per_class": []}
            record |= {column: nan for column in COLUMNS.values() if column}
        padded.append(record)
    return padded


def count(settings: Sequence[Setting]) -> str:
    """The size of a sweep as text: ``6 settings x 3 seeds``."""
    numbers = {"setting": len(settings), "seed": len(settings[0].config.seeds)}
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
