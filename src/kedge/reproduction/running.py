"""Run the rows of a table: what is missing is trained, what was stopped is resumed."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kedge.engines import Execution
from kedge.engines.device import device_name, resolve_device
from kedge.errors import DataError, Interrupted, KedgeError
from kedge.files import check_links, finite
from kedge.history.experiment import RUNS, kind_of
from kedge.history.folder import CONFIG, ENVIRONMENT, stored_config
from kedge.reproduction.recipes import EXECUTION, PaperRow, PaperTable
from kedge.reproduction.records import (
    Record,
    choice_path,
    differences,
    found_records,
    keep,
    read_choice,
    record_of,
    record_path,
    run_path,
    write_results_file,
)
from kedge.runs import train
from kedge.runs.build import with_personal
from kedge.runs.checkpoint import TrainingFolder
from kedge.runs.environment import read_environment
from kedge.runs.grid import Setting
from kedge.settings import Config

SAVE_SHARE = 0.02  # of the time, spent on checkpoints
Show = Callable[[str, Config, int, dict[str, Any]], None]  # (row, config, seed, record)


class OutOfTime(KedgeError):
    """The time or the rounds of a command are used up; all is saved."""


@dataclass
class Limits:
    """When a command stops: at a time, or each run after a number of rounds."""

    deadline: float = float("inf")  # of time.monotonic()
    rounds: int = 0  # 0: all of the recipe
    hit: str = ""  # which limit has stopped the last run: time or rounds

    @classmethod
    def of(cls, minutes: float | None, rounds: int | None) -> Limits:
        seconds = float("inf") if minutes is None else 60 * minutes
        return cls(time.monotonic() + seconds, rounds or 0)

    @property
    def is_late(self) -> bool:
        return time.monotonic() >= self.deadline

    def reached(self, number: int) -> bool:
        """Whether a run stops after this round."""
        if self.is_late:
            self.hit = "time"
        elif self.rounds and number >= self.rounds:
            self.hit = "rounds"
        return bool(self.hit)


@dataclass
class Context:
    """What the runs of a command share."""

    results: Path
    limits: Limits = field(default_factory=Limits)
    execution: Mapping[str, Any] = field(default_factory=dict)  # settings, e.g. engine, threads
    show: Show | None = None
    report: Callable[[str], None] | None = None

    def say(self, text: str) -> None:
        if self.report is not None:
            self.report(text)


def run_table(
    table: PaperTable, rows: Sequence[PaperRow], seeds: Sequence[int] | None, context: Context
) -> None:
    """Train what is missing of some rows, one after the other; records are written.

    Args:
        table: the table.
        rows: its rows to run.
        seeds: the seeds; None takes those of each row.
        context: folder, limits and how to compute.

    Raises:
        OutOfTime: the limit of time was reached.
        Interrupted: the user pressed Ctrl-C.
        KedgeError: the data are missing, or a run folder does not fit.
    """
    check_writable(context.results)
    for home in {row.home[0] for row in rows}:
        check_links(context.results, Path(RUNS, home))
        check_links(context.results, home)
    for row in rows:
        collect(table, row, context.results)
    for row, group in _groups(table, rows, seeds):
        missing = [seed for seed in group if not _is_done(table, row, seed, context)]
        if missing and context.limits.is_late:
            raise OutOfTime("time is up")
        if missing:
            _run(table, row, missing, context)


def _groups(
    table: PaperTable, rows: Sequence[PaperRow], seeds: Sequence[int] | None
) -> Iterator[tuple[PaperRow, list[int]]]:
    """Rows with the seeds that train together: in lanes all of them; otherwise every row has its
    first seed before one has its second."""
    wanted = {row.name: list(seeds or row.seeds) for row in rows}
    if table.lanes:
        yield from ((row, wanted[row.name]) for row in rows)
        return
    for i in range(max(map(len, wanted.values()), default=0)):
        yield from ((row, wanted[row.name][i : i + 1]) for row in rows)


def _is_done(table: PaperTable, row: PaperRow, seed: int, context: Context) -> bool:
    choices = {row.name: read_choice(context.results, table, row) or {}}
    found, _ = found_records(context.results, table, choices)
    record = found[row.name].get(seed)
    if record is None:
        return False
    wanted = row.config(seed).rounds
    if context.limits.rounds:
        wanted = min(wanted, context.limits.rounds)
    if record.has(wanted):
        return True
    if not (run_path(context.results, table, row, seed) / CONFIG).is_file():
        context.say(
            f"{row.name}, seed {seed}: its record has {record.rounds_done} of {wanted} rounds, but "
            "its run folder is not here: it starts from the first round"
        )
    return False


def _run(table: PaperTable, row: PaperRow, seeds: Sequence[int], context: Context) -> None:
    """Start or resume the runs of some seeds, and write their records, whatever happens."""
    chosen = _chosen(table, row, context)
    configs = [_config(table, row, seed, chosen, context) for seed in seeds]
    paths = [run_path(context.results, table, row, seed) for seed in seeds]
    _check_device(configs[0], paths)

    shown = dataclasses.replace(configs[0], seeds=tuple(seeds))

    def watch(job: train.TrainingJob, seed: int, record: dict[str, Any]) -> bool:
        if context.show is not None:
            context.show(row.name, shown, seed, record)
        return context.limits.reached(record["round"])

    failed: dict[int, str] = {}
    context.limits.hit = ""
    jobs = [
        train.TrainingJob(
            row.name,
            config,
            TrainingFolder.resume(path, config)[0]
            if (path / CONFIG).exists()
            else TrainingFolder.create(path, config),
            row.yardstick,
        )
        for config, path in zip(with_personal(configs), paths, strict=True)
    ]
    options = train.Options(
        watch,
        context.report,
        execution=_execution(table, configs[0], context),
        strict=False,
        together=True,
        save_share=SAVE_SHARE,
        hint="The same command goes on from there.",
    )
    try:
        train.train(jobs, options)
        failed = {s: j.result.seeds[0].failed for s, j in zip(seeds, jobs, strict=True) if j.result}
    except Interrupted as error:
        _pass_on(error, table, row, context)
    finally:
        for seed in seeds:
            record = collect_seed(table, row, seed, context.results, failed.get(seed, ""))
            if record is not None and not record.is_complete:
                context.say(
                    f"{row.name}, seed {seed}: {record.rounds_done} of {record.rounds} rounds done"
                )


def _pass_on(error: Interrupted, table: PaperTable, row: PaperRow, context: Context) -> None:
    """Raise what ends the command; a run that has the rounds that were wanted does not."""
    if context.limits.hit == "time":
        raise OutOfTime("time is up") from None
    if not context.limits.hit:
        raise Interrupted(f"{table.name}, {row.name}: {error}") from None


def _chosen(table: PaperTable, row: PaperRow, context: Context) -> dict[str, Any]:
    """The setting that is chosen on validation data, if the table says so."""
    if table.choose is None:
        return {}
    known = read_choice(context.results, table, row)
    if known is not None:
        return known
    config = dataclasses.replace(row.config(table.choose.seed), **_settings(context))

    def watch(job: train.TrainingJob, seed: int, record: dict[str, Any]) -> bool:
        if context.show is not None:
            context.show(f"{row.name} {job.name}", job.config, seed, record)
        return context.limits.is_late and context.limits.reached(0)

    context.limits.hit = ""
    try:
        execution = _execution(table, config, context)
        options = train.Options(watch, context.report, execution=execution)
        return choose_value(context.results, table, row, config, options)
    except Interrupted as error:
        _pass_on(error, table, row, context)
        raise


def choose_value(
    results: Path,
    table: PaperTable,
    row: PaperRow,
    config: Config,
    options: train.Options = train.PLAIN,
) -> dict[str, Any]:
    """Train with each value, and choose the best one on validation data; it is recorded.

    Raises:
        KedgeError: the settings do not fit the data.
        Interrupted: the user pressed Ctrl-C, or ``watch`` requested a stop.
    """
    choose = table.choose
    assert choose is not None
    short = dataclasses.replace(config, rounds=choose.rounds, validation=choose.validation)
    settings = [
        Setting({choose.key: value}, dataclasses.replace(short, **{choose.key: value}))
        for value in choose.values
    ]
    folder = results / RUNS / row.home[0] / f"{row.home[1]}.choice.{table.scale}"
    is_begun = bool(kind_of(folder))
    found = train.experiment(
        "sweep", train.setting_jobs(settings), folder, is_begun, options
    ).results
    scores = [r.validation.mean if r.validation else math.nan for r in found]
    sign = 1.0 if found[0].higher_is_better else -1.0
    best = max(range(len(scores)), key=lambda i: (not math.isnan(scores[i]), sign * scores[i]))
    written = {
        "recipe": table.name,
        "row": row.name,
        "scale": table.scale,
        "method": row.method,
        "key": choose.key,
        "values": list(choose.values),
        "validation": scores,
        "chosen": choose.values[best],
        "seed": choose.seed,
        "rounds": choose.rounds,
        "share": choose.validation,
        "device": found[0].device,
        "date": time.strftime("%Y-%m-%d"),
    }
    text = json.dumps(finite(written), indent=1)
    write_results_file(choice_path(results, table, row), text, results)
    return {choose.key: choose.values[best]}


def _settings(context: Context) -> dict[str, Any]:
    """How to compute, as settings of a run."""
    return {key: value for key, value in context.execution.items() if value is not None}


def _config(
    table: PaperTable, row: PaperRow, seed: int, chosen: Mapping[str, Any], context: Context
) -> Config:
    """The settings of a run; one that was started keeps how it is computed.

    Raises:
        KedgeError: the run folder has a run with other settings.
    """
    config = row.config(seed, **dict(chosen) | _settings(context))
    path = run_path(context.results, table, row, seed)
    if not (path / CONFIG).is_file():
        return config
    stored = stored_config(path)
    config = dataclasses.replace(config, **{key: getattr(stored, key) for key in EXECUTION})
    old, new = vars(stored), vars(config)
    changed = [k for k in old if old[k] != new[k] and k not in ("rounds", "personal")]
    if changed or stored.rounds > config.rounds:
        lines = [f"  {k}: {old[k]!r} -> {new[k]!r}" for k in changed or ["rounds"]]
        raise KedgeError(
            f"{path} has a run with other settings than {row.file} has now:\n"
            + "\n".join(lines)
            + "\nDelete that folder to run it again, or choose another --results"
        )
    return config


def _check_device(config: Config, paths: Sequence[Path]) -> None:
    name = device_name(resolve_device(config.device))
    for path in paths:
        if (path / ENVIRONMENT).is_file():
            before = read_environment(path / ENVIRONMENT)["device"]
            if before != name:
                raise KedgeError(
                    f"{path} was started on {before!r}, but this device is {name!r}: go on there, "
                    "or choose another --results and merge the records later (--merge)"
                )


def _execution(table: PaperTable, config: Config, context: Context) -> Execution | None:
    """How the table is computed on a GPU; None where the user says, or on a CPU."""
    on_gpu = resolve_device(config.device).type == "cuda"
    own = any(key != "device" for key in _settings(context))
    return table.execution if on_gpu and not own else None


def collect(table: PaperTable, row: PaperRow, results: Path) -> None:
    """Write the records of runs that were killed, as far as they came."""
    folder, name = run_path(results, table, row, 0).parent, row.home[1]
    for path in sorted(folder.glob(f"{name}.seed*.{table.scale}")) if folder.is_dir() else ():
        number = path.name.removeprefix(f"{name}.seed").removesuffix(f".{table.scale}")
        if number.isdigit():
            collect_seed(table, row, int(number), results)


def collect_seed(
    table: PaperTable, row: PaperRow, seed: int, results: Path, failed: str = ""
) -> Record | None:
    """Write the record of a run if its folder is further than the record; returns it."""
    record = record_of(table, row, seed, run_path(results, table, row, seed), failed)
    if record is None or differences(record, row, table.free):
        return None
    return keep(record_path(results, table, row, seed), record, row, table.free, results)


def is_writable(results: Path) -> bool:
    try:
        check_writable(results)
    except DataError:
        return False
    return True


def check_writable(results: Path) -> None:
    """Raise a DataError if the folder for results cannot be written."""
    nearest = next(p for p in (results, *results.absolute().parents) if p.exists())
    if not nearest.is_dir():
        raise DataError(
            f"{results} cannot be created: {nearest} is a file; choose another --results"
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise DataError(f"{results} is not writable ({nearest}); choose another --results")
