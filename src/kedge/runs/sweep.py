"""Run a grid of settings, as many together as possible.

Settings that differ only in numbers, in the partition or in the amount of local work train as lanes
of one stack, together with their seeds. Other settings train in groups, one after the other.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kedge.core.method import parse
from kedge.core.task import Task
from kedge.data.datasets import Dataset, load
from kedge.engines import Execution, engines
from kedge.engines.choice.plan import Plan
from kedge.engines.device import precise, resolve_device
from kedge.engines.lane_bound import static
from kedge.engines.threads import restored_threads
from kedge.errors import KedgeError
from kedge.runs.config import Config
from kedge.runs.folder import ENVIRONMENT, Folder, stored_config
from kedge.runs.grid import Setting
from kedge.runs.result import Result
from kedge.runs.runner import Report, advise, choose, result_of, resume_hint, simulation, slug
from kedge.runs.seeds import SeedJob, SeedResult, train_seeds
from kedge.sim.simulation import Simulation

Watch = Callable[[Config, int, dict[str, Any], str], None]  # (config, seed, record, name)
LISTING = "sweep.json"
#: Settings in which the simulations of one stack may differ.
MAY_DIFFER = {
    "lr", "momentum", "weight_decay", "clip", "schedule", "epochs", "steps", "replacement",
    "weighting", "per_round", "partition", "split", "eval_every", "target", "angles", "personal",
}  # fmt: skip


class SweepResult(NamedTuple):
    """One result per setting, and a line of text that says how they were computed."""

    settings: list[Setting]
    results: list[Result]
    computed: str

    def to_dict(self) -> dict[str, Any]:
        """The results as plain data, as ``--json`` prints them; numbers not finite are None."""
        rows = [
            {"setting": setting.values} | result.to_dict()
            for setting, result in zip(self.settings, self.results, strict=True)
        ]
        return {"computed": self.computed, "results": _plain(rows)}


def sweep(
    settings: Sequence[Setting],
    out: str | Path | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    report: Report | None = None,
) -> SweepResult:
    """Run all settings. If a loss is not finite, only that run ends, with NaN as its metric.

    Args:
        settings: the combinations, see :func:`kedge.runs.grid.combine`.
        out: folder with one subfolder per setting; None saves nothing.
        resume: continue the sweep in ``out``.
        watch: called as ``watch(config, seed, record, name)`` after every round.
        report: called with each line of the plans.

    Raises:
        KedgeError: a setting does not fit the data, the device or its folder.
        Interrupted: the user pressed Ctrl-C; the message says how to resume.
    """
    folders = _folders(settings, out, resume)
    advise([setting.config for setting in settings])
    datasets: dict[str, Dataset] = {}
    results: dict[int, Result] = {}
    lanes: list[int] = []
    sequential: list[str] = []  # engines that trained one run at a time
    for group in _groups(settings, folders):
        config = settings[group[0]].config
        if config.data not in datasets:
            datasets[config.data] = load(config.data)
        dataset = datasets[config.data]
        jobs = [job for i in group for job in _jobs(settings[i], dataset, folders[i], watch)]
        with precise(config.precision, resolve_device(config.device)), restored_threads():
            planned = _plan(jobs)
            if report is not None:
                for line in planned.lines():
                    report(line)
            found, stacks = train_seeds(jobs, planned.execution, resume_hint(out), strict=False)
        if engines[planned.execution.engine].batches_clients:
            lanes += stacks
        else:
            sequential.append(planned.execution.engine)
        for i in group:
            seeds, found = found[: len(config.seeds)], found[len(config.seeds) :]
            results[i] = _result(settings[i].config, seeds, planned, folders[i])
    ordered = [results[i] for i in range(len(settings))]
    return SweepResult(list(settings), ordered, count(settings) + _in_words(lanes, sequential))


def saved_settings(out: str | Path) -> list[Setting]:
    """The settings of the sweep in a folder.

    Raises:
        KedgeError: the folder holds no sweep.
    """
    path = Path(out) / LISTING
    if not path.is_file():
        raise KedgeError(f"{out} holds no sweep to resume; leave out --resume to start one there")
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [Setting(row["values"], stored_config(Path(out) / row["folder"])) for row in rows]


def _folders(
    settings: Sequence[Setting], out: str | Path | None, resume: bool
) -> list[Folder | None]:
    """Create or open a folder for every setting, with the layout of ``kedge run``."""
    if out is None:
        return [None] * len(settings)
    root = Folder(out)
    if (root.path / LISTING).exists() and not resume:
        raise KedgeError(
            f"{out} holds a sweep already. Continue it with --resume, or choose another --out"
        )
    if resume:
        saved_settings(out)
    names: list[str] = []
    for setting in settings:
        name = slug(setting.name)[:80]
        taken = sum(other.split("~")[0] == name for other in names)
        names.append(f"{name}~{taken + 1}" if taken else name)
    folders: list[Folder | None] = []
    for name, setting in zip(names, settings, strict=True):
        started = resume and (root.path / name / "config.toml").exists()
        if started:
            folders.append(Folder.resume(root.path / name, setting.config)[0])
        else:
            folders.append(Folder.create(root.path / name, setting.config))
    rows = [{"folder": name, "values": s.values} for name, s in zip(names, settings, strict=True)]
    root.write(LISTING, json.dumps(rows, indent=1).encode())
    return folders


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


def _jobs(
    setting: Setting, dataset: Dataset, folder: Folder | None, watch: Watch | None
) -> Iterator[SeedJob]:
    config = setting.config
    device = resolve_device(config.device)

    def make(seed: int, execution: Execution) -> Simulation:
        try:
            return simulation(config, dataset, seed, device, execution)
        except KedgeError as error:
            error.args = (f"{setting.name}: {error}",)
            raise

    watch_one = (
        None if watch is None else (lambda seed, record: watch(config, seed, record, setting.name))
    )
    for seed in config.seeds:
        yield SeedJob(config, seed, make, folder, watch_one)


def _plain(value: Any) -> Any:
    """Replace numbers that are not finite by None."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plan(jobs: Sequence[SeedJob]) -> Plan:
    """Plan all jobs as if they were the seeds of one run."""
    first = jobs[0]
    seeds = tuple(range(first.seed, first.seed + len(jobs)))
    config = dataclasses.replace(first.config, seeds=seeds)
    planned = choose(config, first.make, resolve_device(config.device), first.folder)
    if first.folder is not None:
        environment = (first.folder.path / ENVIRONMENT).read_bytes()
        for folder in {job.folder.path: job.folder for job in jobs if job.folder}.values():
            if not folder.has_environment:
                folder.write(ENVIRONMENT, environment)
    return planned


def _result(
    config: Config, seeds: Sequence[SeedResult], planned: Plan, folder: Folder | None
) -> Result:
    padded = [
        one._replace(records=_padded(one.records, config, one.task)) if one.failed else one
        for one in seeds
    ]
    seconds = sum(record["seconds"] for one in padded for record in one.records)
    return result_of(config, padded, planned, seconds, folder)


def _padded(records: list[dict[str, Any]], config: Config, task: Task) -> list[dict[str, Any]]:
    """The records of a seed that ended early, with NaN for the rounds that it did not reach."""
    padded, nan = list(records), math.nan
    for number in range(len(records) + 1, config.rounds + 1):
        record: dict[str, Any] = {"round": number, "train_loss": nan, "divergence": nan}
        record |= {"mb_up": 0.0, "mb_down": 0.0, "seconds": 0.0}
        if number % config.eval_every == 0 or number == config.rounds:
            record |= {metric.name: nan for metric in task.metrics} | {"per_class": []}
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
