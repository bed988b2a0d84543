"""Run a grid of settings, as many side by side as can be.

Settings that differ only in numbers, in the partition, in the amount of local work, ... are lanes
of one stack together with their seeds; others train in groups, one after the other.
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
from kedge.engines.device import precise
from kedge.engines.lane_bound import static
from kedge.errors import KedgeError
from kedge.loading import load_options
from kedge.runs.config import Config, resolve_device
from kedge.runs.folder import ENVIRONMENT, Folder, stored_config
from kedge.runs.grid import Setting
from kedge.runs.result import Result
from kedge.runs.runner import (
    Ended,
    Order,
    Say,
    advise,
    choose,
    result_of,
    simulation,
    slug,
    train_all,
)
from kedge.sim.simulation import Simulation

Watch = Callable[[Config, int, dict[str, Any], str], None]  # (config, seed, record, name)
LISTING = "sweep.json"
#: Settings in which simulations of one stack may differ.
SIDE_BY_SIDE = {
    "lr", "momentum", "weight_decay", "clip", "schedule", "epochs", "steps", "replacement",
    "weighting", "per_round", "partition", "split", "eval_every", "target", "angles", "personal",
}  # fmt: skip


class Swept(NamedTuple):
    """Results in the order of the settings, and how they were computed, in words."""

    settings: list[Setting]
    results: list[Result]
    computed: str

    def to_dict(self) -> dict[str, Any]:
        """All as plain data, as ``--json`` prints it; None where a number is not finite."""
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
    say: Say | None = None,
) -> Swept:
    """Run all settings. One whose loss is not finite ends alone, its metric NaN from there on."""
    folders = _folders(settings, out, resume)
    hint = f"Go on with: --out {out} --resume{load_options()}" if out else "It was not saved"
    advise([setting.config for setting in settings])
    datasets: dict[str, Dataset] = {}
    results: dict[int, Result] = {}
    lanes: list[int] = []
    looped = False
    for group in _groups(settings, folders):
        config = settings[group[0]].config
        if config.data not in datasets:
            datasets[config.data] = load(config.data)
        data = datasets[config.data]
        orders = [o for i in group for o in _orders(settings[i], data, folders[i], watch)]
        with precise(config.precision, resolve_device(config.device)):
            planned = _planned(orders)
            if say is not None:
                for line in planned.lines():
                    say(line)
            ended, stacks = train_all(orders, planned.execution, hint, strict=False)
        together = engines[planned.execution.engine].batches_clients
        looped = looped or not together
        lanes += stacks if together else []
        for i in group:
            own, ended = ended[: len(config.seeds)], ended[len(config.seeds) :]
            results[i] = _result(settings[i].config, own, planned, folders[i])
    every = [results[i] for i in range(len(settings))]
    return Swept(list(settings), every, count(settings) + _in_words(lanes, looped))


def listed(out: str | Path) -> list[Setting]:
    """The settings of a sweep that was begun."""
    path = Path(out) / LISTING
    if not path.is_file():
        raise KedgeError(f"{out} holds no sweep to resume; leave out --resume to start one there")
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [Setting(row["values"], stored_config(Path(out) / row["folder"])) for row in rows]


def _folders(
    settings: Sequence[Setting], out: str | Path | None, resume: bool
) -> list[Folder | None]:
    """A folder for every setting, each as ``kedge run`` would make it."""
    if out is None:
        return [None] * len(settings)
    root = Folder(out)
    if (root.path / LISTING).exists() and not resume:
        raise KedgeError(
            f"{out} holds a sweep already. Continue it with --resume, or choose another --out"
        )
    if resume:
        listed(out)
    names: list[str] = []
    for setting in settings:
        name = slug(setting.name)[:80]
        taken = sum(other.split("~")[0] == name for other in names)
        names.append(f"{name}~{taken + 1}" if taken else name)
    folders: list[Folder | None] = []
    for name, setting in zip(names, settings, strict=True):
        begun = resume and (root.path / name / "config.toml").exists()
        make = Folder.resume if begun else Folder.create
        made = make(root.path / name, setting.config)
        folders.append(made[0] if isinstance(made, tuple) else made)
    rows = [{"folder": name, "values": s.values} for name, s in zip(names, settings, strict=True)]
    root.write(LISTING, json.dumps(rows, indent=1).encode())
    return folders


def _groups(settings: Sequence[Setting], folders: Sequence[Folder | None]) -> list[list[int]]:
    """Which settings may train side by side, by all in which they must agree."""
    found: dict[str, list[int]] = {}
    for i, (setting, folder) in enumerate(zip(settings, folders, strict=True)):
        config = setting.config
        same = {k: v for k, v in vars(config).items() if k not in SIDE_BY_SIDE}
        same["method"] = [(part.name, static(part)) for part in parse(config.method).parts]
        # what is 0 is left out of the computation
        same["used"] = [bool(getattr(config, k)) for k in ("momentum", "weight_decay", "clip")]
        # what is complete needs no lanes
        same["complete"] = folder is not None and (folder.path / "result.json").exists()
        found.setdefault(repr(same), []).append(i)
    return list(found.values())


def _orders(
    setting: Setting, dataset: Dataset, folder: Folder | None, watch: Watch | None
) -> Iterator[Order]:
    config = setting.config
    device = resolve_device(config.device)

    def make(seed: int, how: Execution) -> Simulation:
        try:
            return simulation(config, dataset, seed, device, how)
        except KedgeError as error:
            error.args = (f"{setting.name}: {error}",)
            raise

    seen = (
        None if watch is None else (lambda seed, record: watch(config, seed, record, setting.name))
    )
    for seed in config.seeds:
        yield Order(config, seed, make, folder, seen)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _planned(orders: Sequence[Order]) -> Plan:
    """The plan for all of them, as if they were seeds of one run."""
    first = orders[0]
    seeds = tuple(range(first.seed, first.seed + len(orders)))
    config = dataclasses.replace(first.config, seeds=seeds)
    planned = choose(config, first.make, resolve_device(config.device), first.folder)
    if first.folder is not None:
        environment = (first.folder.path / ENVIRONMENT).read_bytes()
        for folder in {o.folder.path: o.folder for o in orders if o.folder is not None}.values():
            if not folder.has_environment:
                folder.write(ENVIRONMENT, environment)
    return planned


def _result(config: Config, ended: Sequence[Ended], planned: Plan, folder: Folder | None) -> Result:
    whole = [
        one._replace(records=_filled(one.records, config, one.task)) if one.failed else one
        for one in ended
    ]
    seconds = sum(record["seconds"] for one in whole for record in one.records)
    return result_of(config, whole, planned, seconds, folder)


def _filled(records: list[dict[str, Any]], config: Config, task: Task) -> list[dict[str, Any]]:
    """Records of a seed that ended early, with NaN for the rounds that it did not reach."""
    filled, nan = list(records), math.nan
    for number in range(len(records) + 1, config.rounds + 1):
        record: dict[str, Any] = {"round": number, "train_loss": nan, "divergence": nan}
        record |= {"mb_up": 0.0, "mb_down": 0.0, "seconds": 0.0}
        if number % config.eval_every == 0 or number == config.rounds:
            record |= {metric.name: nan for metric in task.metrics} | {"per_class": []}
        filled.append(record)
    return filled


def count(settings: Sequence[Setting]) -> str:
    """``6 settings x 3 seeds``."""
    numbers = {"setting": len(settings), "seed": len(settings[0].config.seeds)}
    return " x ".join(f"{n} {word}{'s' if n > 1 else ''}" for word, n in numbers.items())


def _in_words(lanes: Sequence[int], looped: bool) -> str:
    """
    >>> _in_words([40, 40, 20], True)
    ' in 2 stacks of 40 lanes and 1 of 20, the rest one after the other (engine loop)'
    """
    stacks = [f"{n} of {size}" for size, n in Counter(lanes).items()]
    loop = "one after the other (engine loop)"
    if not stacks:
        return f", {loop}" if looped else ", all of them complete before"
    word = "stack" if stacks[0].startswith("1 ") else "stacks"
    first = stacks[0].replace(" ", f" {word} ", 1) + " lanes"
    return " in " + " and ".join([first, *stacks[1:]]) + (f", the rest {loop}" if looped else "")
