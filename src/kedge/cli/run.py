"""Commands that train: ``run``, ``compare``, ``sweep``, ``demo``."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from kedge.cli import next_steps
from kedge.cli.options import (
    FILE,
    JSON,
    LOAD,
    LOG,
    OUT,
    OVERRIDE,
    RESUME,
    load_files,
    with_settings,
)
from kedge.cli.report import NO_REPORT, after_training
from kedge.cli.screen import console, dim, errors, print_table
from kedge.errors import KedgeError
from kedge.history.experiment import kind_of

if TYPE_CHECKING:
    from kedge.runs.result import Result
    from kedge.runs.train import Trained, TrainingJob
    from kedge.settings import Config


@with_settings
def run(
    file: FILE = None,
    override: OVERRIDE = None,
    *,
    out: OUT = None,
    resume: RESUME = False,
    log: LOG = None,
    as_json: JSON = False,
    no_report: NO_REPORT = False,
    load: LOAD = None,
    **settings: Any,
) -> None:
    """Train with one method. Works without any argument: digits, 20 clients, 3 seeds.

    kedge run --method scaffold+fedprox --data cifar10 --partition "dirichlet(0.1)" --rounds 100
    kedge run experiment.toml lr=0.03 seeds=0,1,2,3,4
    kedge run --data hospitals/ --out runs/hospitals          after an interrupt: --resume
    """
    from kedge.cli.progress import Watcher
    from kedge.history.folder import new_path
    from kedge.loggers import observer
    from kedge.runs import train

    load_files(load)
    loggers = observer(log, saved=True)
    config = _config(file, override, settings, resume, out)
    path = Path(out) if out else new_path(config)
    with Watcher(config.rounds * len(config.seeds), console=errors) as watcher:
        options = train.Options(watcher.watch, watcher.report, loggers)
        result = train.run(config, path, resume, options, numbered=not out)
    folder = str(result.folder)
    _finish([result], as_json, f"saved in {folder}; load it with kedge.load({folder!r})")
    after_training(result.folder, no_report)
    if not as_json and not result.diverged:
        next_steps.show(next_steps.after_run(result))
    _fail_if_diverged([result])


@with_settings
def compare(
    methods: Annotated[
        list[str] | None, typer.Argument(help="methods to compare; the first is the baseline")
    ] = None,
    *,
    config_file: Annotated[str | None, typer.Option("--config", help="a TOML file")] = None,
    pooled: Annotated[
        bool, typer.Option("--pooled", help="also train on the pooled data, as a yardstick")
    ] = False,
    out: OUT = None,
    resume: RESUME = False,
    plot: Annotated[str | None, typer.Option(help="plot the curves to a .png or .svg file")] = None,
    log: LOG = None,
    as_json: JSON = False,
    no_report: NO_REPORT = False,
    load: LOAD = None,
    **settings: Any,
) -> None:
    """Compare methods on the same partitions, cohorts and initial weights.

    kedge compare fedavg scaffold "fedprox(mu=0.1)" scaffold+fedsam --rounds 50 --target 90
    kedge compare fedavg scaffold --validation 0.1 --unseen 0.2 --pooled
    """
    from kedge.cli.progress import Watcher
    from kedge.history.folder import new_path
    from kedge.loggers import observer
    from kedge.report import figures
    from kedge.runs import train

    load_files(load)
    loggers = observer(log, saved=True)
    if plot:
        figures.check_path(plot)
    jobs = _jobs(methods or [], config_file, settings, pooled, resume, out)
    path = Path(out) if out else new_path(jobs[0].config, kind="compare")
    total = sum(job.config.rounds * len(job.config.seeds) for job in jobs)
    with Watcher(total, console=errors, names=[job.name for job in jobs]) as watcher:
        options = train.Options(watcher.watch, watcher.report, loggers)
        results = train.experiment("compare", jobs, path, resume, options, not out).results
    folder = results[0].folder
    assert folder is not None
    _finish(results, as_json, f"saved in {folder.parent}")
    after_training(folder.parent, no_report)
    if plot:
        figures.curves(results, [plot], jobs[0].config.data)
    if not as_json and not all(result.diverged for result in results):
        next_steps.show(next_steps.after_comparison(results, folder.parent))
    _fail_if_diverged(results)


@with_settings
def sweep(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="a TOML file; settings, and PART.FIELD, as key=value,value,..."),
    ] = None,
    *,
    out: OUT = None,
    resume: RESUME = False,
    log: LOG = None,
    as_json: JSON = False,
    no_report: NO_REPORT = False,
    load: LOAD = None,
    **settings: Any,
) -> None:
    """Run all combinations of some settings; those that differ only in numbers train together.

    kedge sweep lr=0.01,0.03,0.1 --rounds 50 --validation 0.1
    kedge sweep lr=0.03,0.1 fedprox.mu=0.01,0.1,1 seeds=0,1,2 --method fedprox --out runs/mu
    kedge sweep experiment.toml "partition=iid,dirichlet(0.1)" "method=fedavg,scaffold"
    """
    from kedge.cli.progress import Watcher
    from kedge.history.folder import new_path
    from kedge.loggers import observer
    from kedge.report.tables import results_table
    from kedge.runs import train
    from kedge.runs.validation import data_of_choice, leader

    load_files(load)
    loggers = observer(log, saved=True, several=True)
    jobs = _grid(words or [], settings, resume, out)
    path = Path(out) if out else new_path(jobs[0].config, kind="sweep")
    rounds = sum(job.config.rounds * len(job.config.seeds) for job in jobs)
    with Watcher(rounds, console=errors) as watcher:
        watcher.report(train.count(jobs))
        options = train.Options(watcher.watch, watcher.report, loggers)
        trained = train.experiment("sweep", jobs, path, resume, options, not out)
    results, folder = trained.results, trained.folder
    assert folder is not None
    best = leader(results)
    if as_json:
        _print_sweep(trained)
    else:
        print_table(results_table(results))
        dim(f"{trained.computed}; saved in {folder}")
        if len(results) > 1:
            dim(f"{best.name}: {data_of_choice(results)}")
    after_training(folder, no_report)
    if not as_json:
        next_steps.show(next_steps.after_sweep(results, folder))


def _print_sweep(trained: Trained) -> None:
    """The results of a sweep as JSON."""
    from kedge.files import finite
    from kedge.history.compare import lead

    best, chosen_on = lead(trained.results)
    found = {
        "computed": trained.computed,
        "best": trained.results[best or 0].values,
        "chosen_on": f"{chosen_on} data",
        "results": [{"setting": r.values} | r.to_dict() for r in trained.results],
    }
    typer.echo(json.dumps(finite(found)))


def demo(
    out: Annotated[str, typer.Option(help="folder for the runs and figures")] = "kedge-demo",
) -> None:
    """Compare a few methods on digits; plot the curves and the partition. No network needed."""
    from kedge.cli.demo import CLIENTS, PARTITION, ROUNDS, run_demo
    from kedge.report import tables

    results, (*figures, report), new = run_demo(out)
    n = len(results[0].config.seeds)
    console.print(
        f"digits, {CLIENTS} clients, {PARTITION}, {ROUNDS} rounds, {n} seeds: mean ± sd\n",
        highlight=False,
    )
    print_table(tables.results_table(results))
    written = "  ".join(str(path) for path in figures)
    console.print(f"\nFigures: {written}", highlight=False, soft_wrap=True)
    console.print(f"Report:  {report}", highlight=False, soft_wrap=True)
    console.print(
        f"\nA new image, {new.image}, shows a {new.label}. The saved model of {new.run} says "
        f"{new.predicted}, with probability {new.probability:.2f}:\n"
        f"  kedge predict {new.run} {new.image}\n",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        "Next: kedge list                                     the parts to combine\n"
        "      kedge compare fedavg scaffold+fedsam           your own comparison\n"
        "      kedge run --data FOLDER --method scaffold      your own silos",
        highlight=False,
    )


def _config(
    file: str | None,
    override: list[str] | None,
    settings: dict[str, Any],
    resume: bool,
    out: str | None,
) -> Config:
    """The configuration of a command line; ``--resume`` alone takes the one of the folder."""
    from kedge.history.folder import CONFIG
    from kedge.runs.checkpoint import TrainingFolder
    from kedge.settings import load_config

    words = [*([file] if file and "=" in file else []), *(override or [])]
    path = None if file and "=" in file else file
    flags = _flags(settings)
    if resume:
        if out is None:
            raise KedgeError("--resume needs the folder of the run: --out FOLDER --resume")
        if several := kind_of(Path(out)):
            again = f"kedge {several} --out {shlex.quote(out)} --resume"
            raise KedgeError(f"{out} holds several runs; resume them with: {again}")
        stored = TrainingFolder.resume(out, None, remote=None)[1]
        if path is None:  # a setting that is not given stays as it was
            return load_config(Path(out) / CONFIG, words, flags) if words or flags else stored
    return load_config(path, words, flags)


def _flags(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that are given as options, in their types."""
    from kedge.settings import read_value

    typed = {k: read_value(k, v) if isinstance(v, str) else v for k, v in settings.items()}
    return {k: v for k, v in typed.items() if v is not None}


def _jobs(
    methods: list[str],
    config_file: str | None,
    settings: dict[str, Any],
    pooled: bool,
    resume: bool,
    out: str | None,
) -> list[TrainingJob]:
    """The jobs of a comparison; ``--resume`` takes what is not given from the folder."""
    from kedge.runs.train import method_jobs, saved_jobs
    from kedge.settings import load_config

    method = settings.pop("method", None)
    if method is not None:
        words = " ".join(shlex.quote(m) for m in (*methods, method))
        raise KedgeError(
            f"compare has no --method: its methods are arguments. Write: kedge compare {words}"
        )
    if resume and out is None:
        raise KedgeError("--resume needs the folder of the comparison: --out FOLDER --resume")
    flags = _flags(settings)
    if resume and out is not None and config_file is None:
        saved = saved_jobs("compare", out)
        kept = [job.config for job in saved if not job.yardstick]
        configs = [
            dataclasses.replace(kept[0], **flags, method=m)
            for m in methods or [config.method for config in kept]
        ]
        return method_jobs(configs, pooled or len(kept) < len(saved))
    if not methods:
        raise KedgeError("there is nothing to compare; name methods: kedge compare fedavg scaffold")
    configs = [load_config(config_file, flags=flags | {"method": m}) for m in methods]
    return method_jobs(configs, pooled)


def _grid(
    words: list[str], settings: dict[str, Any], resume: bool, out: str | None
) -> list[TrainingJob]:
    """The jobs of a sweep; ``--resume`` takes those of the folder without words."""
    from kedge.runs.grid import combine, read_words
    from kedge.runs.train import saved_jobs, setting_jobs

    path = words[0] if words and "=" not in words[0] else None
    flags = _flags(settings)
    if resume and out is None:
        raise KedgeError("--resume needs the folder of the sweep: --out FOLDER --resume")
    if resume and out is not None and not words:
        jobs = saved_jobs("sweep", out)
        for job in jobs:
            job.config = dataclasses.replace(job.config, **flags)
        return jobs
    return setting_jobs(combine(read_words(words[1:] if path else words), path, flags))


def _finish(results: list[Result], as_json: bool, note: str) -> None:
    """Print the results as a table or as JSON."""
    from kedge.files import finite
    from kedge.report import tables
    from kedge.runs.validation import data_of_choice, leader

    if as_json:
        rows = [finite(result.to_dict()) for result in results]
        typer.echo(json.dumps(rows[0] if len(rows) == 1 else {"results": rows}))
        return
    print_table(tables.results_table(results))
    if len([result for result in results if not result.yardstick]) > 1:
        mark = "bold, " if console.is_terminal else ""
        dim(f"{mark}{leader(results).name}: {data_of_choice(results)}")
    if note:
        errors.print(note, style="dim", highlight=False, soft_wrap=True)


def _fail_if_diverged(results: list[Result]) -> None:
    """Exit with code 1 and a sentence for each run whose loss has exploded."""
    from kedge.runs.divergence import message

    texts = [text for text in map(message, results) if text]
    for text in texts:
        errors.print(Text("error: ", "bold red") + Text(text), soft_wrap=True)
    if texts:
        raise typer.Exit(1)
